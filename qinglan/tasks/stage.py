"""The frame around every stage: reuse, manifest, MLflow child run, Prefect artifact, progress.

`perform` first searches for a finished stage with the same key: the same inputs, settings and code.
If there is none, it runs the work in its directory, writes the manifest last, and shows in Prefect
and MLflow what came in, what came out and why rows were dropped. An attempt that follows a killed
one continues with its files, its MLflow run and its clock.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any, ParamSpec, TypeVar

import httpx
from prefect import Task, task
from prefect.artifacts import (
    acreate_progress_artifact,
    aupdate_progress_artifact,
    create_markdown_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.events import emit_event
from prefect.logging import get_run_logger

from qinglan.config import Profile
from qinglan.errors import LedgerError, QinglanError, UnexpectedError, first_line
from qinglan.evaluation.targets import row_lines
from qinglan.runs.artifacts import MANIFEST, PROGRESS_FILE, Artifact, StageResult, hash_of
from qinglan.runs.disk_space import explain_full_disk, require_disk_space
from qinglan.runs.locks import removal_lock
from qinglan.runs.run import Run, find_stage, save_stage, stage_of
from qinglan.runs.tracking import Tracker
from qinglan.tasks.attempts import (
    CONTINUED_ANYWAY,
    STARTED,
    Clock,
    Started,
    choose_key,
    digests_of,
    set_aside,
)
from qinglan.text import duration, markdown_table, slug

P = ParamSpec("P")
R = TypeVar("R")
RETRY_DELAYS_S = [2.0, 10.0, 30.0]
_PROGRESS_EVERY_S = 5.0


@dataclass
class Outcome:
    """The findings and files of a stage's work."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    try_again: int = 0
    """Rows that failed, or have no judge's score, for a transient reason; with any, no later run
    reuses this result."""


class Stage:
    """The surroundings of a stage's work: directory, MLflow run, and ways to show its progress."""

    def __init__(
        self, name: str, run: Run, directory: Path, tracker: Tracker, clock: Clock
    ) -> None:
        self.name = name
        self.run = run
        self.directory = directory
        self.key = clock.started.key
        self.tracker = tracker
        self.mlflow_run_id = clock.started.mlflow_run_id
        self.traced = tracker.new_sample()
        """For clients, to note what they send."""
        self._clock = clock
        self._log = get_run_logger()
        self._last_shown_at = time.monotonic()
        self._last_shown_units: float = -1
        self._first_progress: tuple[float, float] | None = None
        self._progress_id: Any = None
        self._showing: asyncio.Task[None] | None = None

    def say(self, text: str, *, to_server: bool = True) -> None:
        """One line in the terminal and, unless it may quote a row, in Prefect's log."""
        self._clock.keep(at_once=False)
        self._log.info("%s: %s", self.name, text, extra={"send_to_api": to_server})

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Show how far the work is, at most every few seconds and at the end."""
        self._clock.keep(at_once=False)
        now = time.monotonic()
        is_too_early = now - self._last_shown_at < _PROGRESS_EVERY_S and done < total
        if is_too_early or done == self._last_shown_units:
            return
        self._last_shown_units = done
        self._last_shown_at = now
        line = f"{done:,.0f}/{total:,.0f} {text}".strip()
        if 0 < done < total:
            line += self._time_left(now, done, total)
        self.say(line)
        (self.directory / PROGRESS_FILE).write_text(line, encoding="utf-8")
        self._show_bar(100 * done / total, line)

    def _time_left(self, now: float, done: float, total: float) -> str:
        """The words about the time left, from the second progress on."""
        # What came before the first unit was start-up, and says nothing of the rest.
        if self._first_progress is None or done <= self._first_progress[1]:
            self._first_progress = (now, done)
            return ""
        first_at, first_units = self._first_progress
        seconds_per_unit = (now - first_at) / (done - first_units)
        return f", {duration(seconds_per_unit * (total - done))} left"

    def _show_bar(self, percent: float, line: str) -> None:
        """Show Prefect's progress bar: at once, or in an event loop as a task of its own."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(self._update_bar(percent, line))
            return
        # A slow server gets fewer updates.
        if self._showing is None or self._showing.done():
            self._showing = loop.create_task(self._update_bar(percent, line))

    async def _update_bar(self, percent: float, line: str) -> None:
        try:
            if self._progress_id is None:
                key = f"{slug(self.name)}-progress"
                self._progress_id = await acreate_progress_artifact(percent, key, line)
            else:
                await aupdate_progress_artifact(self._progress_id, percent, line)
        except httpx.HTTPError as error:
            # A server that is away for a while must not cost a training run.
            self._log.warning("%s: Prefect did not take the progress: %s", self.name, error)


def retried(retries: int) -> dict[str, Any]:
    """The options of a Prefect task that is tried again, at most so often."""
    return {"retries": retries, "retry_delay_seconds": RETRY_DELAYS_S[: max(1, retries)]}


async def _is_ledger_unreachable(_task: Any, _run: Any, state: State) -> bool:
    """Tell whether the ledger's server may be starting again; another error would come again."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, LedgerError) and error.unreachable


def stage_task(name: str, run_name: str | None = None) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task whose results Prefect does not keep: `perform` decides what is reused."""
    options = retried(len(RETRY_DELAYS_S))
    options["retry_condition_fn"] = _is_ledger_unreachable
    as_task = task(name=name, task_run_name=run_name or name, cache_policy=NO_CACHE, **options)

    def decorate(work: Callable[P, R]) -> Task[P, R]:
        return as_task(hiding_row_text()(work))

    return decorate


@contextmanager
def hiding_row_text() -> Iterator[None]:
    """Keep text of rows out of the states, events and messages with which a task or flow ends.

    Of an exception that is none of ours they have type and place alone; the terminal has all of it.
    """
    for name in ("flow_runs", "task_runs", "flow_engine", "task_engine"):
        logging.getLogger(f"prefect.{name}").addFilter(_shorten)
    try:
        yield
    except QinglanError:
        raise
    except Exception as error:
        get_run_logger().error("unexpected", exc_info=True, extra={"send_to_api": False})
        place = extract_tb(error.__traceback__)[-1]
        raise UnexpectedError(
            f"{type(error).__name__} at {place.filename}:{place.lineno}; "
            "its text may quote a row, and is in the terminal or the worker's log alone"
        ) from error


def _shorten(record: logging.LogRecord) -> bool:
    """Make one line of a user's mistake: only a bug deserves a traceback.

    Prefect says of every task that it finished; a stage says so itself, and batches need not.
    """
    if record.exc_info and isinstance(record.exc_info[1], QinglanError):
        record.msg = first_line(record.exc_info[1])
        record.args = ()
        record.exc_info = None
        record.exc_text = None
    finished = ("Finished in state Completed", "Finished in state Failed")
    return not record.getMessage().startswith(finished)


def perform(
    run: Run,
    name: str,
    depends_on: dict[str, Any],
    work: Callable[[Stage], Outcome],
    *,
    has_checkpoints: bool = False,
) -> StageResult:
    """Run a stage, or return what an earlier run of it left.

    The code that its result depends on is that of the module in which `work` is defined, with all
    that this imports.

    Args:
        depends_on: everything else that the result depends on, JSON-able: digests of inputs, config
            sections.
        has_checkpoints: the work continues from what an interrupted attempt left in the stage's
            directory.
    """
    with explain_full_disk(name, run.profile):
        inputs = hash_of(name, depends_on)
        code = digests_of(run.profile, work.__module__)
        started = choose_key(run, name, inputs, code, has_checkpoints, get_run_logger().warning)
        tracker = tracker_of(run.profile)
        result = _reused(run, name, started)
        if result is not None:
            words = (
                f"nothing changed; reusing run {result.run_id} ({duration(result.seconds)} of work)"
            )
        else:
            require_disk_space(name, run.profile, run.directory / name, 0)
            result = _run_attempt(run, name, started, tracker, work)
            save_stage(run, result)
            words = f"done in {duration(result.seconds)}{_row_words(result)}"
        get_run_logger().info("%s: %s", name, words)
        _finish_tracking(run, tracker, result, depends_on)
        _show(result, run)
        _warn_of_rows(result, run)
        return result


def _reused(run: Run, name: str, started: Started) -> StageResult | None:
    """The stage's result with this key, now also saved in this run; None where there is none."""
    # Under this lock, so that clean-up keeps the files of what is found.
    with removal_lock(run.directory.parent):
        result = find_stage(run, name, started.key)
        if result is None:
            return None
        if started.continued_anyway:
            details = {**result.details, CONTINUED_ANYWAY: started.continued_anyway}
            result = result.model_copy(update={"details": details})
        return save_stage(run, result)


def _run_attempt(
    run: Run,
    name: str,
    started: Started,
    tracker: Tracker,
    work: Callable[[Stage], Outcome],
) -> StageResult:
    directory, clock = _begin(run, name, started, tracker)
    try:
        stage = Stage(name, run, directory, tracker, clock)
        try:
            outcome = work(stage)
        finally:
            tracker.log_traces(stage.mlflow_run_id, stage.traced)
    except BaseException:
        tracker.end_run(clock.started.mlflow_run_id, failed=True)
        # The error itself matters more where the disk is full.
        with suppress(OSError):
            clock.keep(tracked=True)
        raise
    clock.keep()
    if started.continued_anyway:
        outcome.details[CONTINUED_ANYWAY] = started.continued_anyway
    return StageResult(
        stage=name, key=started.key, run_id=run.id, seconds=clock.seconds, **vars(outcome)
    )


def tracker_of(profile: Profile) -> Tracker:
    """The tracker that writes to the profile's MLflow."""
    return Tracker(profile.tracking_uri, profile.tracking, profile.paths.state)


def flow_run_id() -> str:
    """The Prefect flow run's id, empty outside of one."""
    context = FlowRunContext.get()
    return str(context.flow_run.id) if context and context.flow_run else ""


def _begin(run: Run, name: str, started: Started, tracker: Tracker) -> tuple[Path, Clock]:
    """The stage's directory and clock: those of an interrupted attempt with the same key, or new
    ones."""
    directory = run.stage_directory(name)
    previous = Started.read(directory)
    is_other = previous is None or previous.key != started.key
    if (directory / STARTED).exists() and is_other:
        if previous and previous.mlflow_run_id and not previous.tracked:
            tracker.end_run(previous.mlflow_run_id, failed=True)
        set_aside(directory, previous, started, get_run_logger().warning)
        directory = run.stage_directory(name)
        previous = None
    manifest = directory / MANIFEST
    interrupted = None
    if previous and previous.mlflow_run_id and not manifest.exists():
        interrupted = previous
    (directory / PROGRESS_FILE).unlink(missing_ok=True)
    # A manifest that is there belongs to damaged files, or was reused from elsewhere for other
    # inputs.
    manifest.unlink(missing_ok=True)
    attempt = _tracked(run, name, started, interrupted, tracker)
    attempt.write(directory)
    return directory, Clock(directory, attempt)


def _tracked(
    run: Run, name: str, started: Started, interrupted: Started | None, tracker: Tracker
) -> Started:
    """The attempt with its MLflow run: that of an interrupted attempt where MLflow still has it."""
    tags = {"stage": name, "qinglan.run_id": run.id, "prefect.flow_run_id": flow_run_id()}
    if started.continued_anyway:
        changed_code = ", ".join(started.continued_anyway)
        tags["qinglan.continued_anyway"] = changed_code
        tracker.set_tags(run.mlflow_run_id, {f"qinglan.continued_anyway.{name}": changed_code})
    earlier_s = interrupted.seconds if interrupted else 0.0
    if interrupted and tracker.resume_run(interrupted.mlflow_run_id):
        tracker.set_tags(interrupted.mlflow_run_id, tags)
        return started.tracked_as(interrupted.mlflow_run_id, earlier_s)
    child_run_id = tracker.start_run(f"{run.id} {name}", tags, parent=run.mlflow_run_id)
    return started.tracked_as(child_run_id, earlier_s)


def _finish_tracking(
    run: Run, tracker: Tracker, result: StageResult, depends_on: dict[str, Any]
) -> None:
    """Report the end to MLflow, once; also where the process was killed after the manifest."""
    directory = run.stage_directory(result.stage)
    started = Started.read(directory)
    if started is None or started.key != result.key or started.tracked or result.run_id != run.id:
        return
    tracker.log_params(started.mlflow_run_id, depends_on)
    metrics: dict[str, float] = {
        "rows_in": result.rows_in,
        "rows_out": result.rows_out,
        "seconds": result.seconds,
    }
    for reason, count in result.dropped.items():
        metrics[f"dropped/{reason}"] = float(count)
    tracker.log_metrics(started.mlflow_run_id, metrics | result.metrics)
    for name, artifact in result.artifacts.items():
        tracker.log_artifact(started.mlflow_run_id, name, artifact)
    for path in _further_files(directory, result):
        # They may quote rows: MLflow gets their place, not their content.
        tracker.log_artifact(started.mlflow_run_id, path.stem, Artifact.of(path), refer=True)
    tracker.end_run(started.mlflow_run_id)
    started.with_seconds(started.seconds, tracked=True).write(directory)


def _further_files(directory: Path, result: StageResult) -> list[Path]:
    """The stage's logs, samples, alarms and engine settings, which are no artifacts."""
    other_names = {MANIFEST, STARTED}
    other_names.update(artifact.path.name for artifact in result.artifacts.values())
    return [
        path
        for path in sorted(directory.glob("*.*"))
        if path.suffix in (".json", ".jsonl", ".log") and path.name not in other_names
    ]


def _row_words(result: StageResult) -> str:
    if not result.rows_out:
        return ""
    return f", {result.rows_in:,} rows in, {result.rows_out:,} out"


def _show(result: StageResult, run: Run) -> None:
    counts = f"{result.rows_in:,} → {result.rows_out:,} rows in {duration(result.seconds)}"
    markdown = stage_markdown(result, run)
    create_markdown_artifact(markdown, key=slug(result.stage), description=counts)


def _warn_of_rows(result: StageResult, run: Run) -> None:
    """Warn where the profile's `targets` plan more or fewer rows.

    A comparison of teachers asks about a sample.
    """
    if result.stage not in run.profile.targets.rows or run.flow == "compare":
        return
    rows = {"ingest": stage_of(run.directory, "ingest").rows_out, result.stage: result.rows_out}
    for line in row_lines(rows, run.profile.targets):
        if line.is_met is False:
            get_run_logger().warning(
                "targets.rows: %s %g; it is %.3f", line.label.en, line.planned, line.found
            )


def stage_markdown(result: StageResult, run: Run) -> str:
    """A stage as Prefect shows it: rows in and out, why rows were dropped, figures and files."""
    lines = [f"## {result.stage}", ""]
    if result.run_id != run.id:
        lines += [f"Nothing changed: reused from run `{result.run_id}`.", ""]
    seconds = duration(result.seconds)
    lines += [f"{seconds} · {result.rows_in:,} rows in · {result.rows_out:,} rows out", ""]
    reasons = [(f"`{reason}`", f"{count:,}") for reason, count in sorted(result.dropped.items())]
    figures = [(name, f"{value:.4g}") for name, value in result.metrics.items()]
    files = [_file_row(name, artifact) for name, artifact in result.artifacts.items()]
    tables: list[tuple[tuple[str, ...], list[Any]]] = [
        (("Why rows were dropped", "Rows"), reasons),
        (("Figure", "Value"), figures),
        (("Artifact", "Rows", "SHA-256", "Path"), files),
    ]
    for heads, rows in tables:
        if rows:
            lines += [markdown_table(heads, rows, " r"), ""]
    return "\n".join(lines)


def _file_row(name: str, artifact: Artifact) -> tuple[str, str, str, str]:
    row_count = "" if artifact.rows is None else f"{artifact.rows:,}"
    return name, row_count, f"`{artifact.sha256[:12]}`", f"`{artifact.path}`"


def emit_run_event(event: str, run: Run, payload: dict[str, Any], **labels: str) -> None:
    """Emit `qinglan.EVENT` for automations: our own (qinglan/ops/prefect/) and the users'.

    Prefect adds flow run, flow and deployment as related resources.
    """
    resource = {
        "prefect.resource.id": f"qinglan.run.{run.id}",
        "prefect.resource.name": run.id,
        "qinglan.profile": run.profile.name,
        "qinglan.tenant": run.profile.tenant.id,
    }
    for label, value in labels.items():
        resource[f"qinglan.{label}"] = value
    emit_event(f"qinglan.{event}", resource=resource, payload=payload)
