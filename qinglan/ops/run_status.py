"""The status of a run: running, waiting for approval, ended or ended early.

With it go the stages that are done, what was paid, and where the log is.
"""

from collections.abc import Iterator
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
    """A run that has no report yet or ended early, as `qinglan show` prints it."""

    sentence: str
    """The status, and what to do."""
    running: bool
    stages: list[StageSummary]
    """Stages that the latest attempt has done or found unchanged, in the order of their ends."""
    rest: list[str]
    """Lines about all else: stages of earlier attempts, those that were running, the logs."""


def ended_early(directory: Path) -> bool:
    """Tell whether a problem stopped the run, perhaps after its report was written."""
    return bool(_read_run_record(directory).ended_by)


def status_of(directory: Path, profile: Profile) -> RunStatus:
    """The status by what the run left in its directory.

    `profile` says where the pages of Prefect are, to which the log's address belongs.
    """
    record = _read_run_record(directory)
    running = is_running(directory)
    stages: list[StageSummary] = []
    earlier_stages: list[str] = []
    for result in _stage_results(directory):
        if result.attempt < record.attempt:
            earlier_stages.append(result.stage)
        else:
            stages.append(StageSummary.of(result, directory.name))
    lines: list[str] = []
    if earlier_stages:
        lines.append(f"Done before the run was continued: {', '.join(earlier_stages)}")
    lines += _unfinished_stages(directory, running=running)
    lines += _logs(directory, record, profile)
    if running:
        # All else is shown where the ledger's database or its key is not at hand, or where the
        # run's settings are another version's.
        with (
            suppress(ConfigError, ArtifactError, LedgerError),
            site_ledger(read_run(directory).profile) as ledger,
        ):
            paid_usd, _ = ledger.spent_usd(directory.name)
            lines.append(f"Paid so far: {usd(paid_usd)}")
    return RunStatus(_sentence(directory, record, running=running), running, stages, lines)


def _read_run_record(directory: Path) -> _RunRecord:
    try:
        return read_record(_RunRecord, directory / RUN_FILE)
    except ValidationError as error:
        raise ArtifactError(f"{directory / RUN_FILE}: not readable; run it anew") from error


def _stage_results(directory: Path) -> Iterator[StageResult]:
    """Finished stages in the order of their ends, without those of another version of Qinglan."""
    for manifest in sorted(directory.glob(f"*/{MANIFEST}"), key=_modified_at):
        with suppress(ValidationError, ArtifactError):
            yield StageResult.read(manifest)


def _sentence(directory: Path, record: _RunRecord, *, running: bool) -> str:
    """The status in words, and what to do."""
    run = f"run {directory.name} ({record.flow} of {record.profile_name})"
    waiting = Waiting.read(directory / "gate") if running else None
    if waiting:
        return (
            f"{run}: waits for a person's approval until {waiting.until}: {waiting.page}; "
            "it has no report yet"
        )
    if record.ended_by and (directory / REPORT_FILE).exists():
        return f"{run}: ended early: {record.ended_by}"
    if running:
        status = "has not ended, so it has no report yet; look again later"
    elif record.finished:
        hint = "restore it from a backup, or run it again, which uses its stages"
        status = f"has ended, but its {REPORT_FILE} is missing; {hint}"
    else:
        why = ", as no process of this machine runs it"
        if record.ended_by:
            why = f": {record.ended_by}"
        command = f"qinglan run {record.flow} --profile {record.profile_name}"
        status = f"ended before its report{why}; `{command}` with the same --set goes on with it"
    for newest in runs_of(directory.parent, record.profile_name):
        if (newest / REPORT_FILE).exists():
            status += f"; the newest that has one: `qinglan show {newest.name}`"
            break
    return f"{run}: {status}"


def _unfinished_stages(directory: Path, *, running: bool) -> list[str]:
    """A line that names the stages that were begun, empty where all are done."""
    unfinished: list[str] = []
    for started in sorted(directory.glob("*/started.json")):
        stage = started.parent
        if (stage / MANIFEST).exists():
            continue
        progress = _progress(stage) if running else ""
        unfinished.append(f"{stage.name}{progress}")
    return [f"Begun, but not done: {', '.join(unfinished)}"] if unfinished else []


def _progress(stage: Path) -> str:
    """The progress of a stage when it last wrote it down, in brackets."""
    try:
        progress = (stage / PROGRESS_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    return f" ({progress})"


def _logs(directory: Path, record: _RunRecord, profile: Profile) -> list[str]:
    """Lines that say where the flow's log and the newest log of a stage are."""
    lines: list[str] = []
    flow_run = record.flow_run_id
    if flow_run:
        pages = _pages_of_prefect(profile)
        if pages:
            lines.append(f"Log: {pages}/runs/flow-run/{flow_run}")
        else:
            lines.append(f"Log: flow run {flow_run} on Prefect's pages, which `qinglan up` serves")
    logs = sorted(directory.glob("*/*.log"), key=_modified_at)
    if logs:
        newest = logs[-1]
        lines.append(f"Log of {newest.parent.name}: {newest}")
    return lines


def _pages_of_prefect(profile: Profile) -> str | None:
    """The address of Prefect's pages, None where none is known."""
    if profile.notify.ui_url:
        return profile.notify.ui_url.rstrip("/")
    try:
        server = find_server(profile.paths.state)
    except ConfigError:
        # A profile of Prefect's that can't be read says nothing of where the log is.
        return None
    return server.api_url.removesuffix("/api") if server else None


def _modified_at(path: Path) -> int:
    return path.stat().st_mtime_ns
