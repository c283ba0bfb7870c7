"""The status of a run without a report: running, waiting for approval, or ended early; its stages and its log."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.models import StageSummary
from qinglan.ops.prefect.server import find_server
from qinglan.runs.artifacts import MANIFEST, StageResult
from qinglan.runs.run import RUN_FILE, is_running, runs_of
from qinglan.runs.schema_version import read_record
from qinglan.serving.registry.approval import Waiting

REPORT_FILE = "report.json"


class _Noted(BaseModel):
    """Of `run.json`, what its status follows from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    flow: str
    profile_name: str
    finished: bool
    flow_run_id: str = ""
    ended_by: str = ""


@dataclass(frozen=True)
class RunStatus:
    """A run without a report."""

    sentence: str
    """What it is, and what to do."""
    stages: list[StageSummary]
    """Those that are done, in the order in which they ended."""
    rest: list[str]
    """Stages that were running, and where the logs are; a line each."""


def status_of(directory: Path, profile: Profile) -> RunStatus:
    """By what the run left in its directory.

    Args:
        profile: whose server is asked for the log.

    Raises:
        ArtifactError: its run.json is damaged, or of a newer Qinglan.
    """
    try:
        noted = read_record(_Noted, directory / RUN_FILE)
    except ValidationError as error:
        raise ArtifactError(f"{directory / RUN_FILE}: not readable; run it anew") from error
    return RunStatus(_sentence(directory, noted), _stages(directory), _rest(directory, noted, profile))


def _sentence(directory: Path, noted: _Noted) -> str:
    named = f"run {directory.name} ({noted.flow} of {noted.profile_name})"
    if is_running(directory):
        if waiting := Waiting.read(directory / "gate"):
            return f"{named}: waits for a person's approval until {waiting.until}: {waiting.page}; it has no report yet"
        return f"{named}: has not ended, so it has no report yet; look again later{_with_report(directory, noted)}"
    if noted.finished:
        return (
            f"{named}: has ended, but its {REPORT_FILE} is missing; restore it from a backup, or run it again, which "
            f"uses its stages{_with_report(directory, noted)}"
        )
    why = f": {noted.ended_by}" if noted.ended_by else ", as no process of this machine runs it"
    return (
        f"{named}: ended before its report{why}; `qinglan run {noted.flow} "
        f"--profile {noted.profile_name}` with the same --set goes on with it{_with_report(directory, noted)}"
    )


def _with_report(directory: Path, noted: _Noted) -> str:
    earlier = (each for each in runs_of(directory.parent, noted.profile_name) if (each / REPORT_FILE).exists())
    found = next(earlier, None)
    return f"; the newest that has one: `qinglan show {found.name}`" if found else ""


def _stages(directory: Path) -> list[StageSummary]:
    manifests = sorted(directory.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime_ns)
    stages = []
    for manifest in manifests:
        try:
            stages.append(StageSummary.of(StageResult.read(manifest), directory.name))
        except (ValidationError, ArtifactError):  # of another version: the others are shown all the same
            continue
    return stages


def _rest(directory: Path, noted: _Noted, profile: Profile) -> list[str]:
    begun = sorted(
        file.parent.name for file in directory.glob("*/started.json") if not (file.parent / MANIFEST).exists()
    )
    lines = [f"Begun, but not done: {', '.join(begun)}"] if begun else []
    if noted.flow_run_id:
        page = _pages_of_prefect(profile)
        served = "on Prefect's pages, which `qinglan up` serves"
        where = f"{page}/runs/flow-run/{noted.flow_run_id}" if page else f"flow run {noted.flow_run_id} {served}"
        lines.append(f"Log: {where}")
    logs = sorted(directory.glob("*/*.log"), key=lambda path: path.stat().st_mtime_ns)
    return [*lines, *(f"Log of {log.parent.name}: {log}" for log in logs[-1:])]


def _pages_of_prefect(profile: Profile) -> str | None:
    if profile.notify.ui_url:
        return profile.notify.ui_url.rstrip("/")
    try:
        server = find_server(profile.paths.state)
    except ConfigError:  # a Prefect profile that can't be read says nothing of where the log is
        return None
    return server.shown_url.removesuffix("/api") if server else None
