"""The `qinglan` command. Flows can as well be run from Prefect's UI or by `prefect deployment run`.

A user's mistake, and what the operating system refuses, ends in one line on stderr and exit status
2.
"""

import gc
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from qinglan.cli import dataset, ledger, release, review
from qinglan.cli.common import ProfileOption, SetOption, err, explain_os_error, out, say
from qinglan.cli.init import init
from qinglan.cli.maintenance import backup, clean_up, deploy, doctor, forget, restore
from qinglan.cli.serve import canary_app, serve
from qinglan.config import FlowName, Profile, load_profile
from qinglan.errors import (
    ArtifactError,
    ConfigError,
    QinglanError,
    StageError,
    UnexpectedError,
    first_line,
)
from qinglan.runs.artifacts import close_to_others

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(review.app, name="review")
app.add_typer(ledger.app, name="ledger")
app.add_typer(dataset.app, name="dataset")
app.add_typer(release.app, name="release")
app.add_typer(canary_app, name="canary")
for command in (release.lineage, deploy, serve, init, doctor, clean_up, backup, restore, forget):
    app.command()(command)


@app.command()
def run(
    flow: Annotated[FlowName, typer.Argument(help="Which flow.")],
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    fresh: Annotated[bool, typer.Option(help="Compute every stage anew.")] = False,
    continue_anyway: Annotated[
        bool,
        typer.Option(
            "--continue-anyway",
            help="pipeline, train: continue an interrupted training although its code changed.",
        ),
    ] = False,
    source: Annotated[
        str | None, typer.Option("--from", help="The run to start from, else the newest.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what it would cost.")
    ] = False,
    report_suffices: Annotated[
        bool,
        typer.Option(
            "--report-suffices", help="End well where the run ended early, but has a report."
        ),
    ] = False,
) -> None:
    """Run a flow here and print its result table."""
    from qinglan.ops.up.site import prefect_for

    overrides = tuple(set_ or ())
    if source and flow not in ("train", "evaluate", "release"):
        raise ConfigError(
            f"--from goes with train, evaluate and release; {flow} starts from the workbook"
        )
    if continue_anyway and flow not in ("pipeline", "train"):
        raise ConfigError(f"--continue-anyway goes with pipeline and train; {flow} trains nothing")
    loaded = load_profile(profile, overrides)
    if dry_run:
        from qinglan.ops.preflight import TRAINER_CHECKS, require

        require(loaded, flow, leave_out=TRAINER_CHECKS)  # its user may have no GPU yet
        ledger.print_estimate(loaded, flow)
        return
    with prefect_for(
        loaded.paths.state, say
    ) as wait_for_prefect:  # what follows takes seconds, as its start does
        gc.disable()  # loading modules makes no garbage, and scanning for it would take a fifth of the time
        try:
            from qinglan.ops.preflight import require

            require(loaded, flow)  # the flow does so too, but here a mistake shows before it starts
            import_module(f"qinglan.flows.{flow}")
            from httpx import HTTPError  # of Prefect's client

            from qinglan.evaluation.models import Report
            from qinglan.evaluation.report.terminal import print_table
            from qinglan.runs.disk_space import explain_full_disk
            from qinglan.tasks.session import load_ahead

            load_ahead(loaded)
        finally:
            gc.enable()
        wait_for_prefect()
        failure: StageError | None = None
        try:
            written = _start(flow, profile, overrides, fresh, source, continue_anyway)
        except StageError as error:
            if error.report is None:
                raise
            written, failure = error.report, error
        except HTTPError as error:
            hint = "see whether that of `prefect config view` runs, then give the same command again and it goes on"
            err.print()  # what Prefect's logs say of it has no line's end
            with explain_full_disk(flow, loaded):
                raise StageError(f"Prefect's server does not answer: {error}; {hint}") from error
        except KeyboardInterrupt:
            say(
                "stopped; give the same command again and it goes on: answers that were paid for are kept",
                err,
            )
            raise
        report = Report.read(written)
    out.print()
    out.print(print_table(report))
    out.print(
        f"Report: {(loaded.paths.runs / report.run_id / 'report.html').resolve()}", soft_wrap=True
    )
    if failure and report_suffices:
        say(f"Ended early: {first_line(failure)}", style="yellow")
    elif failure:
        raise failure


@app.command()
def show(
    run_name: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's id, a unique prefix, or `latest`.")
    ],
    intervals: Annotated[
        bool,
        typer.Option(
            "--intervals", help="Student against teacher, each figure with its 95% interval."
        ),
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="As for `run`; then `latest` is the newest of it.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Print a run's result table again, and its status if it has none yet or ended early."""
    from qinglan.evaluation.models import Report
    from qinglan.evaluation.report.terminal import print_intervals, print_table, stages_table
    from qinglan.ops.run_status import REPORT_FILE, ended_early, status_of

    loaded = load_profile(profile or "embedded", set_ or ())
    directory = _find_run(loaded, run_name, of_profile=profile is not None)
    reported = (directory / REPORT_FILE).exists()
    if reported:
        report = Report.read(directory / REPORT_FILE)
        out.print(print_intervals(report) if intervals else print_table(report))
        out.print(f"Report: {directory / 'report.html'}", soft_wrap=True)
        if not ended_early(directory):
            return
    status = status_of(directory, loaded)
    if not reported and status.stages:
        out.print(stages_table(status.stages))
    for line in status.rest:
        say(line)
    if not status.running:
        raise ArtifactError(status.sentence)
    say(status.sentence)


@app.command()
def prompts(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    row: Annotated[int, typer.Option(min=1, help="Which of the workbook's questions.")] = 1,
) -> None:
    """Print what student, teacher and judge are asked about a question; nothing is sent."""
    from itertools import islice

    from qinglan.ops.estimate import questions_of
    from qinglan.recipes import get_recipe
    from qinglan.recipes.prompts import prompts_about

    loaded = load_profile(profile, set_ or ())
    recipe = get_recipe(loaded.recipe)
    with questions_of(loaded) as rows:
        if (
            chosen := next(
                islice((each for each in rows if each.status == "ok"), row - 1, None), None
            )
        ) is None:
            raise ConfigError(f"--row {row}: the workbook has fewer questions")
    for role, messages in prompts_about(chosen, recipe, loaded).items():
        for message in messages:
            say(f"{role}, {message['role']}", style="bold")
            say(message["content"] + "\n")


@app.command()
def up(
    profile: ProfileOption = "embedded",
    set_: SetOption = None,
    prefect_port: Annotated[
        int | None, typer.Option(help="4200, or the next one that is free.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option(help="5000, or the next one that is free.")
    ] = None,
) -> None:
    """Serve Prefect's and MLflow's pages on loopback and run what they ask for, until Ctrl-C."""
    from qinglan.ops.up.serve import serve_site

    serve_site(
        load_profile(profile, set_ or ()), say, prefect_port=prefect_port, mlflow_port=mlflow_port
    )


def main() -> None:
    close_to_others()
    try:
        app()
    except (QinglanError, OSError) as error:
        line = explain_os_error(error) if isinstance(error, OSError) else error.in_terminal
        if line is None:
            raise
        say(f"error: {line}", err, style="red")
        sys.exit(2)


def _start(
    flow: FlowName,
    profile: str,
    overrides: tuple[str, ...],
    fresh: bool,
    source: str | None,
    continue_anyway: bool,
) -> Path:
    start = getattr(
        import_module(f"qinglan.flows.{flow}"), flow
    )  # Prefect reads its settings when it is imported
    from qinglan.tasks.session import send_what_is_queued, unless_skipped

    options: dict[str, Any] = (
        {"source": source or ""} if flow in ("train", "evaluate", "release") else {}
    )
    options |= {"continue_anyway": True} if continue_anyway else {}
    try:
        return unless_skipped(
            start(profile, overrides=overrides, fresh=fresh, return_state=True, **options)
        )
    except UnexpectedError as error:
        raise error.__cause__ or error from None
    finally:
        send_what_is_queued()


def _find_run(profile: Profile, name: str, *, of_profile: bool) -> Path:
    """`latest` is the run that was started or continued last; of a profile the same, else its
    newest run."""
    from qinglan.runs.run import find_run, runs_of

    runs = profile.paths.runs
    if name != "latest" or not of_profile:
        return find_run(runs, name)
    if not (mine := [directory.resolve() for directory in runs_of(runs, profile.name)]):
        hint = "start one, or leave out --profile for the last one of any"
        raise ConfigError(f"run `latest`: profile {profile.name} has no run under {runs}; {hint}")
    return last if (last := (runs / "latest").resolve()) in mine else mine[0]
