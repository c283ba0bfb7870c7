"""`qinglan show`: a run's result table; of a run without a report, its status."""

from pathlib import Path
from typing import Annotated

import typer

from qinglan.cli.common import SetOption, out, say
from qinglan.config import Profile, load_profile
from qinglan.errors import ArtifactError, ConfigError

_LATEST = "latest"


def show(
    run_name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's id, a unique prefix, or `latest`: with --profile, of that one."),
    ],
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Student against teacher, each figure with its 95% interval.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="Name of a file in configs/, or a path; `embedded` if not given.")
    ] = None,
    set_: SetOption = None,
) -> None:
    """Print a run's result table again, or its status if it has none yet."""
    from qinglan.evaluation.models import Report
    from qinglan.evaluation.report.terminal import print_intervals, print_table, stages_table
    from qinglan.ops.run_status import REPORT_FILE, status_of

    loaded = load_profile(profile or "embedded", set_ or ())
    directory = _find(loaded, run_name, of_profile=profile is not None)
    if not (directory / REPORT_FILE).exists():
        status = status_of(directory, loaded)
        if status.stages:
            out.print(stages_table(status.stages))
        for line in status.rest:
            say(line)
        raise ArtifactError(status.sentence)
    report = Report.read(directory / REPORT_FILE)
    out.print(print_intervals(report) if intervals else print_table(report))
    out.print(f"Report: {directory / 'report.html'}", soft_wrap=True)


def _find(profile: Profile, name: str, *, of_profile: bool) -> Path:
    """`latest` is the run that was started or continued last; of a profile the same, else its newest run."""
    from qinglan.runs.run import find_run, runs_of

    runs = profile.paths.runs
    if name != _LATEST or not of_profile:
        return find_run(runs, name)
    mine = [directory.resolve() for directory in runs_of(runs, profile.name)] if runs.is_dir() else []
    if not mine:
        raise ConfigError(
            f"run `{_LATEST}`: profile {profile.name} has no run under {runs}; start one, or leave out --profile "
            "for the last one of any"
        )
    last = (runs / _LATEST).resolve()
    return last if last in mine else mine[0]
