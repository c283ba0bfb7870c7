"""The frame around every stage: reuse, manifest, MLflow child run, Prefect artifact, progress.

`perform` looks for a finished stage with the same key first. Otherwise it runs the work in the stage's directory,
writes the manifest last, and shows in Prefect and MLflow what came in, what came out and why rows fell. An attempt
that follows a killed one goes on with its files, its MLflow run and its clock.
"""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from prefect.artifacts import (
    acreate_progress_artifact,
    aupdate_progress_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from pydantic import BaseModel, ValidationError

import qinglan
from qinglan.config import Profile
from qinglan.runs.artifacts import MANIFEST, Artifact, StageResult, hash_of, sha256_of, write_json
from qinglan.runs.disk_space import explain_full_disk, require_disk_space
from qinglan.runs.locks import removal_lock
from qinglan.runs.run import Run, find_stage, save_stage
from qinglan.runs.tracking import Tracker
from qinglan.text import duration

STARTED = "started.json"
_PROGRESS_EVERY_S = 5.0


class Started(BaseModel):
    """`started.json`: whose inputs a stage's files belong to, its MLflow run, and the work that went into it so far."""

    key: str
    mlflow_run_id: str = ""
    seconds: float = 0.0
    """Of all attempts; of a killed one up to its last progress."""
    tracked: bool = False
    """MLflow has the end of it."""

    @classmethod
    def read(cls, directory: Path) -> "Started | None":
        """What an earlier attempt left, if anything."""
        try:
            return cls.model_validate_json((directory / STARTED).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        """Keep it beside the files."""
        write_json(directory / STARTED, self.model_dump())


class Clock:
    """Counts the seconds of this attempt onto those of earlier ones, and keeps them where a kill can't take them."""

    def __init__(self, directory: Path, started: Started) -> None:
        self.started, self._directory = started, directory
        self._earlier_s, self._start = started.seconds, time.monotonic()
        self._kept_at = self._start

    @property
    def seconds(self) -> float:
        """Of all attempts."""
        return self._earlier_s + time.monotonic() - self._start

    def tick(self) -> None:
        """Keep the seconds, at most every few of them."""
        if time.monotonic() - self._kept_at >= _PROGRESS_EVERY_S:
            self.keep()

    def keep(self, *, tracked: bool = False) -> None:
        """Keep the seconds now."""
        self._kept_at = time.monotonic()
        self.started = self.started.model_copy(update={"seconds": self.seconds, "tracked": tracked})
        self.started.write(self._directory)


@dataclass
class Outcome:
    """What a stage's work found."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    try_again: int = 0
    """Rows that another run may mend; with any, no later run reuses this result."""


class Stage:
    """What a stage's work gets: its directory, its MLflow run, and a way to tell how far it is."""

    def __init__(self, name: str, run: Run, directory: Path, tracker: Tracker, clock: Clock) -> None:
        self.name, self.run, self.directory, self.key = name, run, directory, clock.started.key
        self.tracker, self.mlflow_run_id = tracker, clock.started.mlflow_run_id
        self._clock = clock
        self._log = get_run_logger()
        self._last_shown = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._shown: float = -1
        self._progress_id: Any = None
        self._showing: asyncio.Task[None] | None = None

    def say(self, text: str) -> None:
        """One line in the terminal and in Prefect's log."""
        self._clock.tick()
        self._log.info("%s: %s", self.name, text)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Show how far the work is, at most every few seconds and at the end."""
        self._clock.tick()
        now = time.monotonic()
        if (now - self._last_shown < _PROGRESS_EVERY_S and done < total) or done == self._shown:
            return
        self._shown = done
        self._last_shown = now
        line = f"{done:,.0f}/{total:,.0f} {text}".strip()
        if 0 < done < total:
            if self._first is None or done <= self._first[1]:
                self._first = (now, done)  # what came before the first unit was start-up, and says nothing of the rest
            else:
                began, at = self._first
                line += f", {duration((now - began) / (done - at) * (total - done))} left"
        self.say(line)
        self._show_bar(100 * done / total, line)

    def _show_bar(self, percent: float, line: str) -> None:
        """Prefect's progress bar: at once, or in an event loop as a task of its own."""
        key = f"{artifact_key(self.name)}-progress"
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            with self._unshown():
                if self._progress_id is None:
                    self._progress_id = create_progress_artifact(percent, key, line)
                else:
                    update_progress_artifact(self._progress_id, percent, line)
            return

        async def show() -> None:
            with self._unshown():
                if self._progress_id is None:
                    self._progress_id = await acreate_progress_artifact(percent, key, line)
                else:
                    await aupdate_progress_artifact(self._progress_id, percent, line)

        if self._showing is None or self._showing.done():  # a slow server is told less often
            self._showing = loop.create_task(show())

    @contextmanager
    def _unshown(self) -> Iterator[None]:
        """A server that is away for a while must not cost a training run."""
        try:
            yield
        except httpx.HTTPError as error:
            self._log.warning("%s: Prefect did not take the progress: %s", self.name, error)


def perform(run: Run, name: str, depends_on: dict[str, Any], work: Callable[[Stage], Outcome]) -> StageResult:
    """Run a stage, or hand on what an earlier run of it left.

    Args:
        depends_on: everything that the result depends on, JSON-able: digests of inputs, config sections.
    """
    with explain_full_disk(name, run.profile):
        return _perform(run, name, depends_on, work)


def _perform(run: Run, name: str, depends_on: dict[str, Any], work: Callable[[Stage], Outcome]) -> StageResult:
    log = get_run_logger()
    key = hash_of(name, sources_digest(), depends_on)
    tracker = tracker_of(run.profile)
    if found := _reuse(run, name, key):
        log.info("%s: nothing changed; reusing run %s (%s of work)", name, found.run_id, duration(found.seconds))
        _finish_tracking(run, tracker, found, depends_on)
        _show(found, run)
        return found
    require_disk_space(name, run.profile, run.directory / name, 0)
    directory, clock = _begin(run, name, key, tracker)
    try:
        outcome = work(Stage(name, run, directory, tracker, clock))
    except BaseException:
        tracker.end_run(clock.started.mlflow_run_id, failed=True)
        with suppress(OSError):  # on a full disk, where what went wrong is to be told
            clock.keep(tracked=True)
        raise
    clock.keep()
    result = StageResult(stage=name, key=key, run_id=run.id, seconds=clock.seconds, **vars(outcome))
    save_stage(run, result)
    _finish_tracking(run, tracker, result, depends_on)
    _show(result, run)
    rows = f", {result.rows_in:,} rows in, {result.rows_out:,} out" if result.rows_out else ""
    log.info("%s: done in %s%s", name, duration(result.seconds), rows)
    return result


def tracker_of(profile: Profile) -> Tracker:
    """The MLflow client for a profile."""
    return Tracker(profile.tracking_uri, profile.tracking, profile.paths.state)


def flow_run_id() -> str:
    """The Prefect flow run's id, empty outside of one."""
    context = FlowRunContext.get()
    return str(context.flow_run.id) if context and context.flow_run else ""


@cache
def sources_digest() -> str:
    """Changes with Qinglan's code, the stages' included: results of other code are not reused."""
    packages = (Path(qinglan.__file__).parent, Path(__file__).parent)
    return hash_of([sha256_of(path) for package in packages for path in sorted(package.rglob("*.py"))])


def _reuse(run: Run, name: str, key: str) -> StageResult | None:
    """A finished stage of this run or an earlier one, noted in this run so that clean-up leaves its files alone."""
    with removal_lock(run.directory.parent):
        found = find_stage(run, name, key)
        return found and save_stage(run, found)


def _begin(run: Run, name: str, key: str, tracker: Tracker) -> tuple[Path, Clock]:
    """The stage's directory and clock: an interrupted attempt's where it had the same inputs, else new ones."""
    directory = run.stage_directory(name)
    manifest = directory / MANIFEST
    left = Started.read(directory)
    if (directory / STARTED).exists() and (left is None or left.key != key):
        if left and left.mlflow_run_id and not left.tracked:
            tracker.end_run(left.mlflow_run_id, failed=True)
        _set_aside(directory)
        directory, left = run.stage_directory(name), None
    interrupted = left if left and left.mlflow_run_id and not manifest.exists() else None
    manifest.unlink(missing_ok=True)  # of files that were damaged, or reused from elsewhere for other inputs
    tags = {"stage": name, "qinglan.run_id": run.id, "prefect.flow_run_id": flow_run_id()}
    if interrupted and tracker.resume_run(interrupted.mlflow_run_id):
        tracker.set_tags(interrupted.mlflow_run_id, tags)
        started = interrupted.model_copy(update={"tracked": False})
    else:
        child = tracker.start_run(f"{run.id} {name}", tags, parent=run.mlflow_run_id)
        started = Started(key=key, mlflow_run_id=child, seconds=interrupted.seconds if interrupted else 0.0)
    started.write(directory)
    return directory, Clock(directory, started)


def _set_aside(directory: Path) -> None:
    """Keep what was made of other inputs or by other code: it may hold hours of training."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.superseded-{number}")).exists():
        number += 1
    directory.rename(aside)
    get_run_logger().warning(
        "%s: its inputs or Qinglan's code changed since the last attempt, so it starts anew; what that attempt left "
        "is now in %s, delete it when you don't need it",
        directory.name,
        aside,
    )


def _finish_tracking(run: Run, tracker: Tracker, result: StageResult, depends_on: dict[str, Any]) -> None:
    """Tell MLflow of the end, once; also where the process was killed between the manifest and this."""
    directory = run.stage_directory(result.stage)
    started = Started.read(directory)
    if started is None or started.key != result.key or started.tracked or result.run_id != run.id:
        return
    _track(tracker, started.mlflow_run_id, result, depends_on)
    started.model_copy(update={"tracked": True}).write(directory)


def _track(tracker: Tracker, mlflow_run_id: str, result: StageResult, depends_on: dict[str, Any]) -> None:
    tracker.log_params(mlflow_run_id, depends_on)
    counts = {"rows_in": result.rows_in, "rows_out": result.rows_out, "seconds": result.seconds}
    dropped = {f"dropped/{reason}": float(n) for reason, n in result.dropped.items()}
    tracker.log_metrics(mlflow_run_id, counts | dropped | result.metrics)
    for name, artifact in result.artifacts.items():
        tracker.log_artifact(mlflow_run_id, name, artifact)
    tracker.end_run(mlflow_run_id)


def _show(result: StageResult, run: Run) -> None:
    what = f"{result.rows_in:,} → {result.rows_out:,} rows in {duration(result.seconds)}"
    create_markdown_artifact(stage_markdown(result, run), key=artifact_key(result.stage), description=what)


def stage_markdown(result: StageResult, run: Run) -> str:
    """A stage for people: what came in, what came out, why rows fell, and the files."""
    lines = [f"## {result.stage}", ""]
    if result.run_id != run.id:
        lines += [f"Nothing changed: reused from run `{result.run_id}`.", ""]
    lines += [f"{duration(result.seconds)} · {result.rows_in:,} rows in · {result.rows_out:,} rows out", ""]
    if result.dropped:
        lines += ["| Why rows fell | Rows |", "| --- | ---: |"]
        lines += [f"| `{reason}` | {n:,} |" for reason, n in sorted(result.dropped.items())] + ["", ""]
    if result.metrics:
        lines += ["| Figure | Value |", "| --- | ---: |"]
        lines += [f"| {name} | {value:.4g} |" for name, value in result.metrics.items()] + ["", ""]
    if result.artifacts:
        lines += ["| Artifact | Rows | SHA-256 | Path |", "| --- | ---: | --- | --- |"]
        lines += [
            f"| {name} | {'' if a.rows is None else f'{a.rows:,}'} | `{a.sha256[:12]}` | `{a.path}` |"
            for name, a in result.artifacts.items()
        ]
    return "\n".join(lines) + "\n"


def artifact_key(stage: str) -> str:
    """A stage's name as Prefect wants it: lower case and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", stage.lower())
