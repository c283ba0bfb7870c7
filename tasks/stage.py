"""The frame around every stage: reuse, manifest, MLflow child run, Prefect artifact, progress.

`perform` looks for a finished stage with the same key first. Otherwise it runs the work in the stage's directory,
writes the manifest last, and shows in Prefect and MLflow what came in, what came out and why rows fell.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

import qinglan
from qinglan.artifacts import Artifact, StageResult, hash_of, sha256_of, write_json
from qinglan.config import Profile
from qinglan.formats import duration
from qinglan.runs import Run, find_stage, save_stage
from qinglan.tracking import Tracker

STARTED = "started.json"
_PROGRESS_EVERY_S = 5.0


@dataclass
class Outcome:
    """What a stage's work found."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class Stage:
    """What a stage's work gets: its directory, its MLflow run, and a way to tell how far it is."""

    def __init__(self, name: str, run: Run, directory: Path, tracker: Tracker, mlflow_run_id: str) -> None:
        self.name, self.run, self.directory = name, run, directory
        self.tracker, self.mlflow_run_id = tracker, mlflow_run_id
        self._log = get_run_logger()
        self._last_shown = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._shown: float = -1
        self._progress_id: Any = None
        self.first_failure: str | None = None

    def say(self, text: str) -> None:
        """One line in the terminal and in Prefect's log."""
        self._log.info("%s: %s", self.name, text)

    def progress(self, done: float, total: float, text: str = "") -> None:
        """Show how far the work is, at most every few seconds and at the end."""
        now = time.monotonic()
        if (now - self._last_shown < _PROGRESS_EVERY_S and done < total) or done == self._shown:
            return
        self._shown = done
        self._last_shown = now
        line = f"{done:,.0f}/{total:,.0f} {text}".strip()
        if 0 < done < total:
            if self._first is None:
                self._first = (now, done)  # what came before the first unit was start-up, and says nothing of the rest
            else:
                began, at = self._first
                line += f", {duration((now - began) / (done - at) * (total - done))} left"
        self.say(line)
        if self._progress_id is None:
            key = f"{artifact_key(self.name)}-progress"
            self._progress_id = create_progress_artifact(100 * done / total, key, line)
        else:
            update_progress_artifact(self._progress_id, 100 * done / total, line)


def perform(run: Run, name: str, depends_on: dict[str, Any], work: Callable[[Stage], Outcome]) -> StageResult:
    """Run a stage, or hand on what an earlier run of it left.

    Args:
        depends_on: everything that the result depends on, JSON-able: digests of inputs, config sections.
    """
    log = get_run_logger()
    key = hash_of(name, sources_digest(), depends_on)
    if found := find_stage(run, name, key):
        log.info("%s: nothing changed; reusing run %s (%s of work)", name, found.run_id, duration(found.seconds))
        _show(found, run)
        return save_stage(run, found)
    directory = _prepare_directory(run, name, key)
    tracker = tracker_of(run.profile)
    tags = {"stage": name, "qinglan.run_id": run.id, "prefect.flow_run_id": flow_run_id()}
    mlflow_run_id = tracker.start_run(f"{run.id} {name}", tags, parent=run.mlflow_run_id)
    start = time.monotonic()
    try:
        outcome = work(Stage(name, run, directory, tracker, mlflow_run_id))
    except BaseException:
        tracker.end_run(mlflow_run_id, failed=True)
        raise
    result = StageResult(stage=name, key=key, run_id=run.id, seconds=time.monotonic() - start, **vars(outcome))
    save_stage(run, result)
    _track(tracker, mlflow_run_id, result, depends_on)
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
    """Changes with Qinglan's code: results of other code are not reused."""
    package = Path(qinglan.__file__).parent
    return hash_of([sha256_of(path) for path in sorted(package.rglob("*.py"))])


def _prepare_directory(run: Run, name: str, key: str) -> Path:
    directory = run.stage_directory(name)
    started = directory / STARTED
    if started.exists() and key not in started.read_text(encoding="utf-8"):
        shutil.rmtree(directory)  # what an earlier attempt left belongs to other inputs
        directory = run.stage_directory(name)
    write_json(started, {"key": key})
    return directory


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
    return stage.replace("_", "-")
