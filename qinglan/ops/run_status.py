"""The status of a run: running, waiting for approval, ended or ended early; its stages and its log."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError
from qinglan.evaluation.models import StageSummary
from qinglan.ops.prefect.server import find_server
from qinglan.runs.artifacts import MANIFEST, StageResult
from qinglan.runs.run import RUN_FILE, is_running, runs_of
from qinglan.runs.schema_version import read_record
from qinglan.serving.registry.approval import Waiting

REPORT_FILE = "report.json"


class _RunRecord(BaseModel, frozen=True, extra="ignore"):
    """The keys of `run.json` that its status follows from."""

    flow: str
    profile_name: str
    finished: bool
    flow_run_id: str = ""
    ended_by: str = ""


@dataclass(frozen=True)
class RunStatus:
    sentence: str
    """What it is, and what to do."""
    stages: list[StageSummary]
    """Those that are done, in the order in which they ended."""
    rest: list[str]
    """Stages that were running, and where the logs are; a line each."""
    ended_early: bool
    """A problem stopped it, perhaps after its report was written."""


def status_of(directory: Path, profile: Profile) -> RunStatus:
    """The status by what the run left in its directory, with the log's address on the profile's Prefect server."""
    try:
        record = read_record(_RunRecord, directory / RUN_FILE)
    except ValidationError as error:
        raise ArtifactError(f"{directory / RUN_FILE}: not readable; run it anew") from error
    stages = []
    for manifest in sorted(directory.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime_ns):
        try:
            stages.append(StageSummary.of(StageResult.read(manifest), directory.name))
        except (ValidationError, ArtifactError):  # of another version: the others are shown all the same
            continue
    return RunStatus(_sentence(directory, record), stages, _rest(directory, record, profile), bool(record.ended_by))


def _sentence(directory: Path, record: _RunRecord) -> str:
    named = f"run {directory.name} ({record.flow} of {record.profile_name})"
    running = is_running(directory)
    if running and (waiting := Waiting.read(directory / "gate")):
        return f"{named}: waits for a person's approval until {waiting.until}: {waiting.page}; it has no report yet"
    if record.ended_by and (directory / REPORT_FILE).exists():
        return f"{named}: ended early: {record.ended_by}"
    if running:
        status = "has not ended, so it has no report yet; look again later"
    elif record.finished:
        status = (
            f"has ended, but its {REPORT_FILE} is missing; restore it from a backup, or run it again, which "
            "uses its stages"
        )
    else:
        why = f": {record.ended_by}" if record.ended_by else ", as no process of this machine runs it"
        status = (
            f"ended before its report{why}; `qinglan run {record.flow} "
            f"--profile {record.profile_name}` with the same --set goes on with it"
        )
    runs = runs_of(directory.parent, record.profile_name)
    newest = next((each for each in runs if (each / REPORT_FILE).exists()), None)
    shown = f"; the newest that has one: `qinglan show {newest.name}`" if newest else ""
    return f"{named}: {status}{shown}"


def _rest(directory: Path, record: _RunRecord, profile: Profile) -> list[str]:
    begun = sorted(
        file.parent.name for file in directory.glob("*/started.json") if not (file.parent / MANIFEST).exists()
    )
    lines = [f"Begun, but not done: {', '.join(begun)}"] if begun else []
    if record.flow_run_id:
        page = _pages_of_prefect(profile)
        served = "on Prefect's pages, which `qinglan up` serves"
        where = f"{page}/runs/flow-run/{record.flow_run_id}" if page else f"flow run {record.flow_run_id} {served}"
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
