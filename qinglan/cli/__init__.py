"""The `qinglan` command. Flows can as well be run from Prefect's UI or by `prefect deployment run`.

A user's mistake, and what the operating system refuses, ends in one line on stderr and exit status
2. Commands import what they need themselves, so that `qinglan --help` is there at once.
"""

import sys
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from qinglan.cli import dataset, ledger, release, review
from qinglan.cli.common import (
    ProfileOption,
    SetOption,
    err,
    explain_os_error,
    out,
    say,
    without_garbage_collection,
)
from qinglan.cli.init import init
from qinglan.cli.maintenance import backup, clean_up, deploy, doctor, forget, restore
from qinglan.cli.serve import canary_app, serve
from qinglan.config import TRAINING_FLOWS, FlowName, Profile, load_profile
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
# `qinglan --help` lists them in this order, before those of this file.
for command in (release.lineage, deploy, serve, init, doctor, clean_up, backup, restore, forget):
    app.command()(command)

_FROM_FLOWS = ("train", "evaluate", "release")
"""Flows that start from an earlier run."""


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
    if source and flow not in _FROM_FLOWS:
        problem = f"{flow} starts from the workbook"
        raise ConfigError(f"--from goes with train, evaluate and release; {problem}")
    if continue_anyway and flow not in TRAINING_FLOWS:
        problem = f"{flow} trains nothing"
        raise ConfigError(f"--continue-anyway goes with pipeline and train; {problem}")
    loaded = load_profile(profile, overrides)
    if dry_run:
        _print_costs(loaded, flow)
        return
    with prefect_for(loaded.paths.state, say) as wait_for_prefect:
        # Loading takes seconds, in which the server starts.
        with without_garbage_collection():
            _load_flow(loaded, flow)
        wait_for_prefect()
        report_file, failure = _run_flow(
            loaded, flow, profile, overrides, fresh, source, continue_anyway
        )
    _print_report(loaded, report_file)
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
    has_report = (directory / REPORT_FILE).exists()
    if has_report:
        report = Report.read(directory / REPORT_FILE)
        out.print(print_intervals(report) if intervals else print_table(report))
        out.print(f"Report: {directory / 'report.html'}", soft_wrap=True)
        if not ended_early(directory):
            return
    status = status_of(directory, loaded)
    if not has_report and status.stages:
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
    from qinglan.ops.estimate.counting import questions_of
    from qinglan.recipes import get_recipe
    from qinglan.recipes.prompts import prompts_about

    loaded = load_profile(profile, set_ or ())
    recipe = get_recipe(loaded.recipe)
    with questions_of(loaded) as rows:
        usable_rows = (question for question in rows if question.status == "ok")
        chosen_row = next(islice(usable_rows, row - 1, None), None)
    if chosen_row is None:
        raise ConfigError(f"--row {row}: the workbook has fewer questions")
    for role, messages in prompts_about(chosen_row, recipe, loaded).items():
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

    loaded = load_profile(profile, set_ or ())
    serve_site(loaded, say, prefect_port=prefect_port, mlflow_port=mlflow_port)


def main() -> None:
    """The entry point of the command."""
    # Whatever a command writes may hold people's questions.
    close_to_others()
    try:
        app()
    except (QinglanError, OSError) as error:
        line = explain_os_error(error) if isinstance(error, OSError) else error.in_terminal
        if line is None:
            raise
        say(f"error: {line}", err, style="red")
        sys.exit(2)


def _print_costs(profile: Profile, flow: FlowName) -> None:
    """Check what a flow needs but a GPU, which its user may not have yet; print its estimate."""
    from qinglan.ops.preflight import TRAINER_CHECKS, require

    require(profile, flow, leave_out=TRAINER_CHECKS)
    ledger.print_estimate(profile, flow)


def _load_flow(profile: Profile, flow: FlowName) -> None:
    """Check what a flow needs, and load everything that its run will use."""
    from qinglan.ops.preflight import require

    # The flow does so too, but here a mistake shows before it starts.
    require(profile, flow)
    import_module(f"qinglan.flows.{flow}")
    from qinglan.tasks.session import load_ahead

    load_ahead(profile)


def _run_flow(
    loaded: Profile,
    flow: FlowName,
    profile: str,
    overrides: tuple[str, ...],
    fresh: bool,
    source: str | None,
    continue_anyway: bool,
) -> tuple[Path, StageError | None]:
    """Run a flow; the file of its report, and the error after which it ended early, if it did."""
    # Prefect's client raises errors of httpx, which is slow to import.
    from httpx import HTTPError

    from qinglan.runs.disk_space import explain_full_disk

    try:
        return _start(flow, profile, overrides, fresh, source, continue_anyway), None
    except StageError as error:
        if error.report is None:
            raise
        return error.report, error
    except HTTPError as error:
        # What Prefect's logs say of it has no line's end.
        err.print()
        hint = (
            "see whether that of `prefect config view` runs, "
            "then give the same command again and it goes on"
        )
        with explain_full_disk(flow, loaded):
            raise StageError(f"Prefect's server does not answer: {error}; {hint}") from error
    except KeyboardInterrupt:
        say(
            "stopped; give the same command again and it goes on: "
            "answers that were paid for are kept",
            err,
        )
        raise


def _start(
    flow: FlowName,
    profile: str,
    overrides: tuple[str, ...],
    fresh: bool,
    source: str | None,
    continue_anyway: bool,
) -> Path:
    """Start a flow in this process; the file of its report."""
    # Prefect reads its settings when it is imported.
    start = getattr(import_module(f"qinglan.flows.{flow}"), flow)
    from qinglan.tasks.session import send_what_is_queued, unless_skipped

    options: dict[str, Any] = {}
    if flow in _FROM_FLOWS:
        options["source"] = source or ""
    if continue_anyway:
        options["continue_anyway"] = True
    try:
        state = start(profile, overrides=overrides, fresh=fresh, return_state=True, **options)
        return unless_skipped(state)
    except UnexpectedError as error:
        raise error.__cause__ or error from None
    finally:
        send_what_is_queued()


def _print_report(profile: Profile, report_file: Path) -> None:
    from qinglan.evaluation.models import Report
    from qinglan.evaluation.report.terminal import print_table

    report = Report.read(report_file)
    page = (profile.paths.runs / report.run_id / "report.html").resolve()
    out.print()
    out.print(print_table(report))
    out.print(f"Report: {page}", soft_wrap=True)


def _find_run(profile: Profile, name: str, *, of_profile: bool) -> Path:
    """The folder of a run; `latest` is the one that was started or continued last.

    With `of_profile` that holds where it is a run of the profile, else `latest` is the newest of
    its runs.
    """
    from qinglan.runs.run import find_run, runs_of

    runs = profile.paths.runs
    if name != "latest" or not of_profile:
        return find_run(runs, name)
    own_runs = [directory.resolve() for directory in runs_of(runs, profile.name)]
    if not own_runs:
        hint = "start one, or leave out --profile for the last one of any"
        raise ConfigError(f"run `latest`: profile {profile.name} has no run under {runs}; {hint}")
    last_run = (runs / "latest").resolve()
    return last_run if last_run in own_runs else own_runs[0]
