"""The status of a run: running, waiting for approval, ended or ended early; its stages and its
log."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError, LedgerError
from qinglan.evaluation.models import StageSummary
from qinglan.ops.prefect.server import find_server
from qinglan.registry.approval import Waiting
from qinglan.runs.artifacts import MANIFEST, PROGRESS_FILE, StageResult
from qinglan.runs.run import RUN_FILE, is_running, read_run, runs_of
from qinglan.runs.schema_version import read_record
from qinglan.text import usd

REPORT_FILE = "report.json"


class _RunRecord(BaseModel, frozen=True, extra="ignore"):
    """The keys of `run.json` that its status follows from."""

    flow: str
    profile_name: str
    finished: bool
    flow_run_id: str = ""
    ended_by: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class RunStatus:
    sentence: str
    """What it is, and what to do."""
    running: bool
    stages: list[StageSummary]
    """Those that the latest attempt has done or found unchanged, in the order in which they
    ended."""
    rest: list[str]
    """Stages of earlier attempts alone, stages that were running, and where the logs are; a line
    each."""


def ended_early(directory: Path) -> bool:
    """Whether a problem stopped the run, perhaps after its report was written."""
    return bool(_record_of(directory).ended_by)


def status_of(directory: Path, profile: Profile) -> RunStatus:
    """The status by what the run left in its directory, with the log's address on the profile's
    Prefect server."""
    record, stages, earlier = _record_of(directory), [], []
    for manifest in sorted(
        directory.glob(f"*/{MANIFEST}"), key=lambda path: path.stat().st_mtime_ns
    ):
        with suppress(
            ValidationError, ArtifactError
        ):  # of another version: the others are shown all the same
            found = StageResult.read(manifest)
            if found.attempt < record.attempt:
                earlier.append(found.stage)
            else:
                stages.append(StageSummary.of(found, directory.name))
    running = is_running(directory)
    lines = [f"Done before the run was continued: {', '.join(earlier)}"] if earlier else []
    lines += _rest(directory, record, profile, running=running)
    if running:
        # Without the ledger's database or its key, or with settings of another version, all else is
        # shown.
        with (
            suppress(ConfigError, ArtifactError, LedgerError),
            site_ledger(read_run(directory).profile) as ledger,
        ):
            lines.append(f"Paid so far: {usd(ledger.spent_usd(directory.name)[0])}")
    return RunStatus(_sentence(directory, record, running=running), running, stages, lines)


def _record_of(directory: Path) -> _RunRecord:
    try:
        return read_record(_RunRecord, directory / RUN_FILE)
    except ValidationError as error:
        raise ArtifactError(f"{directory / RUN_FILE}: not readable; run it anew") from error


def _sentence(directory: Path, record: _RunRecord, *, running: bool) -> str:
    named = f"run {directory.name} ({record.flow} of {record.profile_name})"
    if running and (waiting := Waiting.read(directory / "gate")):
        return f"{named}: waits for a person's approval until {waiting.until}: {waiting.page}; it has no report yet"
    if record.ended_by and (directory / REPORT_FILE).exists():
        return f"{named}: ended early: {record.ended_by}"
    if running:
        status = "has not ended, so it has no report yet; look again later"
    elif record.finished:
        hint = "restore it from a backup, or run it again, which uses its stages"
        status = f"has ended, but its {REPORT_FILE} is missing; {hint}"
    else:
        why = (
            f": {record.ended_by}" if record.ended_by else ", as no process of this machine runs it"
        )
        command = f"qinglan run {record.flow} --profile {record.profile_name}"
        status = f"ended before its report{why}; `{command}` with the same --set goes on with it"
    runs = runs_of(directory.parent, record.profile_name)
    newest = next((each for each in runs if (each / REPORT_FILE).exists()), None)
    shown = f"; the newest that has one: `qinglan show {newest.name}`" if newest else ""
    return f"{named}: {status}{shown}"


def _rest(directory: Path, record: _RunRecord, profile: Profile, *, running: bool) -> list[str]:
    stages = sorted(file.parent for file in directory.glob("*/started.json"))
    begun = [
        each.name + (_progress(each) if running else "")
        for each in stages
        if not (each / MANIFEST).exists()
    ]
    lines = [f"Begun, but not done: {', '.join(begun)}"] if begun else []
    if flow_run := record.flow_run_id:
        page, served = _pages_of_prefect(profile), "on Prefect's pages, which `qinglan up` serves"
        lines.append(
            f"Log: {page}/runs/flow-run/{flow_run}"
            if page
            else f"Log: flow run {flow_run} {served}"
        )
    logs = sorted(directory.glob("*/*.log"), key=lambda path: path.stat().st_mtime_ns)
    return [*lines, *(f"Log of {log.parent.name}: {log}" for log in logs[-1:])]


def _progress(stage: Path) -> str:
    """How far a stage was when it last said so."""
    with suppress(FileNotFoundError):
        return f" ({(stage / PROGRESS_FILE).read_text(encoding='utf-8')})"
    return ""


def _pages_of_prefect(profile: Profile) -> str | None:
    if profile.notify.ui_url:
        return profile.notify.ui_url.rstrip("/")
    with suppress(
        ConfigError
    ):  # a Prefect profile that can't be read says nothing of where the log is
        if server := find_server(profile.paths.state):
            return server.api_url.removesuffix("/api")
    return None
