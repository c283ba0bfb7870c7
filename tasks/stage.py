"""The frame around every stage: reuse, manifest, MLflow child run, Prefect artifact, progress.

`perform` first searches for a finished stage with the same key: the same inputs, settings and code
(`CODE` in a stage's module names the packages whose code can change its result). If there is none,
it runs the work in its directory, writes the manifest last, and shows in Prefect and MLflow what
came in, what came out and why rows were dropped. An attempt that follows a killed one continues
with its files, its MLflow run and its clock.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
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
from pydantic import BaseModel, ValidationError

from qinglan.config import Profile
from qinglan.errors import LedgerError, QinglanError, UnexpectedError, first_line
from qinglan.evaluation.targets import row_lines
from qinglan.recipes import get_recipe
from qinglan.runs.artifacts import (
    MANIFEST,
    PROGRESS_FILE,
    Artifact,
    StageResult,
    hash_of,
    write_json,
)
from qinglan.runs.code_digest import code_digest
from qinglan.runs.disk_space import explain_full_disk, require_disk_space
from qinglan.runs.locks import removal_lock
from qinglan.runs.run import Run, find_stage, save_stage, stage_of
from qinglan.runs.tracking import Tracker
from qinglan.text import duration, markdown_table, slug

P = ParamSpec("P")
R = TypeVar("R")
STARTED = "started.json"
RECIPE = "recipe"
"""In a stage's `code`: the recipe's class and the modules of `qinglan.recipes` that it uses. The
methods that only one stage calls count where their part is named, such as `recipe.reward`."""
RECIPE_PARTS = {
    "extraction": ("extract_messages", "extract"),
    "validation": ("validate", "validation_roles", "validation_statistics", "messages_about"),
    "selection": ("select", "drop_reason"),
    "training_rows": ("may_ask_in_rl", "rl_schema", "rl_record", "rl_info"),
    "reward": ("reward", "scorer"),
    "evaluation": (
        "measure",
        "measuring_digest",
        "baseline_arms",
        "panel_messages",
        "parse_panel",
        "probes",
        "findings",
    ),
}
"""By part of a recipe, the methods that only one stage uses."""
CONTINUED_ANYWAY = "continued_anyway"
"""In a stage's details: the code that changed while it was interrupted (`--continue-anyway`)."""
RETRY_DELAYS_S = [2.0, 10.0, 30.0]
_PROGRESS_EVERY_S = 5.0


class Started(BaseModel):
    """`started.json`: what a stage's files were made of and by, its MLflow run, and the work that
    went into it."""

    key: str
    inputs: str = ""
    """Digest of everything that the result depends on beside the code."""
    code: dict[str, str] = {}
    """Digest of each package whose code can change the result."""
    continued_anyway: list[str] = []
    """The code that changed between two attempts, where the user wanted to continue all the
    same."""
    mlflow_run_id: str = ""
    seconds: float = 0.0
    """Of all attempts; of a killed one up to its last progress."""
    tracked: bool = False
    """MLflow has the end of it."""

    @classmethod
    def read(cls, directory: Path) -> "Started | None":
        try:
            return cls.model_validate_json((directory / STARTED).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write(self, directory: Path) -> None:
        write_json(directory / STARTED, self.model_dump())


class Clock:
    """Counts the seconds of this attempt onto those of earlier ones, and keeps them where a kill
    can't take them."""

    def __init__(self, directory: Path, started: Started) -> None:
        self.started, self._directory = started, directory
        self._earlier_s, self._start = started.seconds, time.monotonic()
        self._kept_at = self._start

    @property
    def seconds(self) -> float:
        return self._earlier_s + time.monotonic() - self._start

    def keep(self, *, tracked: bool = False, at_once: bool = True) -> None:
        """Write the seconds down; unless `at_once`, at most every few of them."""
        now = time.monotonic()
        if not at_once and now - self._kept_at < _PROGRESS_EVERY_S:
            return
        self._kept_at = now
        self.started = self.started.model_copy(update={"seconds": self.seconds, "tracked": tracked})
        self.started.write(self._directory)


@dataclass
class Outcome:
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
    """What a stage's work gets: its directory, its MLflow run, and a way to show its progress."""

    def __init__(
        self, name: str, run: Run, directory: Path, tracker: Tracker, clock: Clock
    ) -> None:
        self.name, self.run, self.directory, self.key = name, run, directory, clock.started.key
        self.tracker, self.mlflow_run_id = tracker, clock.started.mlflow_run_id
        self.traced = tracker.new_sample()
        """For clients, to note what they send."""
        self._clock = clock
        self._log = get_run_logger()
        self._last_shown = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._shown: float = -1
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
        if (now - self._last_shown < _PROGRESS_EVERY_S and done < total) or done == self._shown:
            return
        self._shown = done
        self._last_shown = now
        line = f"{done:,.0f}/{total:,.0f} {text}".strip()
        if 0 < done < total:
            if self._first is None or done <= self._first[1]:
                self._first = (
                    now,
                    done,
                )  # what came before the first unit was start-up, and says nothing of the rest
            else:
                began, at = self._first
                line += f", {duration((now - began) / (done - at) * (total - done))} left"
        self.say(line)
        (self.directory / PROGRESS_FILE).write_text(line, encoding="utf-8")
        self._show_bar(100 * done / total, line)

    def _show_bar(self, percent: float, line: str) -> None:
        """Prefect's progress bar: at once, or in an event loop as a task of its own."""
        key = f"{slug(self.name)}-progress"

        async def show() -> None:
            try:
                if self._progress_id is None:
                    self._progress_id = await acreate_progress_artifact(percent, key, line)
                else:
                    await aupdate_progress_artifact(self._progress_id, percent, line)
            except (
                httpx.HTTPError
            ) as error:  # a server that is away for a while must not cost a training run
                self._log.warning("%s: Prefect did not take the progress: %s", self.name, error)

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(show())
            return
        if self._showing is None or self._showing.done():  # a slow server gets fewer updates
            self._showing = loop.create_task(show())


def retried(retries: int) -> dict[str, Any]:
    """The options of a Prefect task that is tried again, at most so often."""
    return {"retries": retries, "retry_delay_seconds": RETRY_DELAYS_S[: max(1, retries)]}


async def _is_ledger_unreachable(_task: Any, _run: Any, state: State) -> bool:
    """Its server may be starting again; any other error would only come again."""
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, LedgerError) and error.unreachable


def stage_task(name: str, run_name: str | None = None) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task whose results Prefect does not keep: `perform` decides what is reused."""
    options = retried(len(RETRY_DELAYS_S)) | {"retry_condition_fn": _is_ledger_unreachable}
    made = task(name=name, task_run_name=run_name or name, cache_policy=NO_CACHE, **options)
    return lambda work: made(hiding_row_text()(work))


@contextmanager
def hiding_row_text() -> Iterator[None]:
    """Around what a Prefect task or flow does: how it ends stands in states, events and messages.

    Of an exception that is none of ours these have type and place alone; the terminal has all of
    it.
    """
    for name in ("flow_runs", "task_runs", "flow_engine", "task_engine"):
        logging.getLogger(f"prefect.{name}").addFilter(_in_short)
    try:
        yield
    except QinglanError:
        raise
    except Exception as error:
        get_run_logger().error("unexpected", exc_info=True, extra={"send_to_api": False})
        place = extract_tb(error.__traceback__)[-1]
        hint = "its text may quote a row, and is in the terminal or the worker's log alone"
        raise UnexpectedError(
            f"{type(error).__name__} at {place.filename}:{place.lineno}; {hint}"
        ) from error


def _in_short(record: logging.LogRecord) -> bool:
    """A user's mistake is one line in the log; only a bug deserves a traceback.

    Prefect says of every task that it finished; a stage says so itself, and batches need not.
    """
    if record.exc_info and isinstance(record.exc_info[1], QinglanError):
        record.msg, record.args = first_line(record.exc_info[1]), ()
        record.exc_info = record.exc_text = None
    return not record.getMessage().startswith(
        ("Finished in state Completed", "Finished in state Failed")
    )


def perform(
    run: Run,
    name: str,
    depends_on: dict[str, Any],
    work: Callable[[Stage], Outcome],
    *,
    code: Sequence[str],
    has_checkpoints: bool = False,
) -> StageResult:
    """Run a stage, or return what an earlier run of it left.

    Args:
        depends_on: everything that the result depends on, JSON-able: digests of inputs, config
            sections.
        code: the modules and packages whose code can change the result; `recipe` stands for the
            profile's recipe.
        has_checkpoints: the work continues from what an interrupted attempt left in the stage's
            directory.
    """
    log = get_run_logger()
    with explain_full_disk(name, run.profile):
        wanted = _key_of(
            run, name, hash_of(name, depends_on), digests_of(run.profile, code), has_checkpoints
        )
        tracker = tracker_of(run.profile)
        with removal_lock(
            run.directory.parent
        ):  # what is found is saved in this run, so that clean-up keeps its files
            found = find_stage(run, name, wanted.key)
            if found and wanted.continued_anyway:
                details = found.details | {CONTINUED_ANYWAY: wanted.continued_anyway}
                found = found.model_copy(update={"details": details})
            found = found and save_stage(run, found)
        if found:
            log.info(
                "%s: nothing changed; reusing run %s (%s of work)",
                name,
                found.run_id,
                duration(found.seconds),
            )
            _finish_tracking(run, tracker, found, depends_on)
            _show(found, run)
            _warn_of_rows(found, run)
            return found
        require_disk_space(name, run.profile, run.directory / name, 0)
        directory, clock = _begin(run, name, wanted, tracker)
        try:
            stage = Stage(name, run, directory, tracker, clock)
            try:
                outcome = work(stage)
            finally:
                tracker.log_traces(stage.mlflow_run_id, stage.traced)
        except BaseException:
            tracker.end_run(clock.started.mlflow_run_id, failed=True)
            with suppress(OSError):  # the error itself matters more where the disk is full
                clock.keep(tracked=True)
            raise
        clock.keep()
        if wanted.continued_anyway:
            outcome.details[CONTINUED_ANYWAY] = wanted.continued_anyway
        result = StageResult(
            stage=name, key=wanted.key, run_id=run.id, seconds=clock.seconds, **vars(outcome)
        )
        save_stage(run, result)
        _finish_tracking(run, tracker, result, depends_on)
        _show(result, run)
        rows = f", {result.rows_in:,} rows in, {result.rows_out:,} out" if result.rows_out else ""
        log.info("%s: done in %s%s", name, duration(result.seconds), rows)
        _warn_of_rows(result, run)
        return result


def digests_of(profile: Profile, code: Sequence[str]) -> dict[str, str]:
    """The digest of each package in a stage's `code`."""
    return {
        each: _recipe_digest(profile, each) if each.split(".")[0] == RECIPE else code_digest(each)
        for each in code
    }


def _recipe_digest(profile: Profile, name: str) -> str:
    # The content of a recipe outside of the package is in its key; here are the classes that it is
    # derived from.
    classes = {each.__module__ for each in type(get_recipe(profile.recipe)).__mro__}
    modules = sorted(each for each in classes if each.startswith("qinglan.recipes."))
    part = name.partition(".")[2]
    others = [
        method for other, methods in RECIPE_PARTS.items() if other != part for method in methods
    ]
    return code_digest(*modules, within="qinglan.recipes", without=tuple(others))


def _key_of(
    run: Run, name: str, inputs: str, code: dict[str, str], has_checkpoints: bool
) -> Started:
    """The key to search for and to work under, with what it is made of.

    An attempt of other code that is continued on the user's request gets a key of its own: its
    result is the result of neither code, so no other run may reuse it.
    """
    new = Started(key=hash_of(inputs, code), inputs=inputs, code=code)
    directory = run.directory / name
    left = Started.read(directory)
    if left is None or left.inputs != inputs:
        return new
    if left.code == code:
        return left
    if not (run.continue_anyway and has_checkpoints):
        return new
    changed = _changed(left.code, code)
    what = f"{name}: the code of {', '.join(changed)} changed since the last attempt"
    get_run_logger().warning("%s; it continues all the same, as --continue-anyway was given", what)
    key = left.key if (directory / MANIFEST).exists() else hash_of(new.key, left.key)
    over = sorted({*left.continued_anyway, *changed})
    continued = left.model_copy(update={"key": key, "code": code, "continued_anyway": over})
    continued.write(directory)
    return continued


def _changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def tracker_of(profile: Profile) -> Tracker:
    return Tracker(profile.tracking_uri, profile.tracking, profile.paths.state)


def flow_run_id() -> str:
    """The Prefect flow run's id, empty outside of one."""
    context = FlowRunContext.get()
    return str(context.flow_run.id) if context and context.flow_run else ""


def _begin(run: Run, name: str, wanted: Started, tracker: Tracker) -> tuple[Path, Clock]:
    """The stage's directory and clock: those of an interrupted attempt with the same key, else new
    ones."""
    directory = run.stage_directory(name)
    manifest = directory / MANIFEST
    left = Started.read(directory)
    if (directory / STARTED).exists() and (left is None or left.key != wanted.key):
        if left and left.mlflow_run_id and not left.tracked:
            tracker.end_run(left.mlflow_run_id, failed=True)
        _set_aside(directory, left, wanted)
        directory, left = run.stage_directory(name), None
    interrupted = left if left and left.mlflow_run_id and not manifest.exists() else None
    (directory / PROGRESS_FILE).unlink(missing_ok=True)
    manifest.unlink(
        missing_ok=True
    )  # its files were damaged, or it was reused from elsewhere for other inputs
    tags = {"stage": name, "qinglan.run_id": run.id, "prefect.flow_run_id": flow_run_id()}
    if wanted.continued_anyway:
        tags["qinglan.continued_anyway"] = ", ".join(wanted.continued_anyway)
        tracker.set_tags(
            run.mlflow_run_id,
            {f"qinglan.continued_anyway.{name}": tags["qinglan.continued_anyway"]},
        )
    if interrupted and tracker.resume_run(interrupted.mlflow_run_id):
        tracker.set_tags(interrupted.mlflow_run_id, tags)
        child, seconds = interrupted.mlflow_run_id, interrupted.seconds
    else:
        child = tracker.start_run(f"{run.id} {name}", tags, parent=run.mlflow_run_id)
        seconds = interrupted.seconds if interrupted else 0.0
    started = wanted.model_copy(
        update={"mlflow_run_id": child, "seconds": seconds, "tracked": False}
    )
    started.write(directory)
    return directory, Clock(directory, started)


def _set_aside(directory: Path, left: Started | None, wanted: Started) -> None:
    """Keep what was made of other inputs or by other code: it may hold hours of training."""
    number = 1
    while (aside := directory.with_name(f"{directory.name}.superseded-{number}")).exists():
        number += 1
    directory.rename(aside)
    same_inputs = left is not None and left.inputs == wanted.inputs
    what = (
        f"the code of {', '.join(_changed(left.code, wanted.code))}"
        if left and same_inputs
        else "its inputs"
    )
    hint = "delete it when you don't need it"
    if same_inputs:
        how = f"stop this run, rename that folder to {directory.name} and run again with --continue-anyway"
        hint = f"to continue with it all the same, {how}; else delete it"
    text = "%s: %s changed since the last attempt, so it starts anew; what that attempt left is now in %s; %s"
    get_run_logger().warning(text, directory.name, what, aside, hint)


def _finish_tracking(
    run: Run, tracker: Tracker, result: StageResult, depends_on: dict[str, Any]
) -> None:
    """Report the end to MLflow, once; also where the process was killed after it wrote the
    manifest."""
    directory = run.stage_directory(result.stage)
    started = Started.read(directory)
    if started is None or started.key != result.key or started.tracked or result.run_id != run.id:
        return
    tracker.log_params(started.mlflow_run_id, depends_on)
    counts = {"rows_in": result.rows_in, "rows_out": result.rows_out, "seconds": result.seconds}
    dropped = {f"dropped/{reason}": float(n) for reason, n in result.dropped.items()}
    tracker.log_metrics(started.mlflow_run_id, counts | dropped | result.metrics)
    for name, artifact in result.artifacts.items():
        tracker.log_artifact(started.mlflow_run_id, name, artifact)
    known = {MANIFEST, STARTED, *(artifact.path.name for artifact in result.artifacts.values())}
    for path in sorted(
        directory.glob("*.*")
    ):  # logs, samples, alarms, what the engine was told: they may quote rows
        if path.suffix in (".json", ".jsonl", ".log") and path.name not in known:
            tracker.log_artifact(started.mlflow_run_id, path.stem, Artifact.of(path), refer=True)
    tracker.end_run(started.mlflow_run_id)
    started.model_copy(update={"tracked": True}).write(directory)


def _show(result: StageResult, run: Run) -> None:
    what = f"{result.rows_in:,} → {result.rows_out:,} rows in {duration(result.seconds)}"
    create_markdown_artifact(stage_markdown(result, run), key=slug(result.stage), description=what)


def _warn_of_rows(result: StageResult, run: Run) -> None:
    """Where the profile's `targets` plan more or fewer; a comparison of teachers asks about a
    sample."""
    if result.stage in run.profile.targets.rows and run.flow != "compare":
        rows = {"ingest": stage_of(run.directory, "ingest").rows_out, result.stage: result.rows_out}
        for line in row_lines(rows, run.profile.targets):
            if line.is_met is False:
                get_run_logger().warning(
                    "targets.rows: %s %g; it is %.3f", line.label.en, line.planned, line.found
                )


def stage_markdown(result: StageResult, run: Run) -> str:
    """A stage as Prefect shows it: what came in, what came out, why rows were dropped, and the
    files."""
    lines = [f"## {result.stage}", ""]
    if result.run_id != run.id:
        lines += [f"Nothing changed: reused from run `{result.run_id}`.", ""]
    lines += [
        f"{duration(result.seconds)} · {result.rows_in:,} rows in · {result.rows_out:,} rows out",
        "",
    ]
    dropped = [(f"`{reason}`", f"{n:,}") for reason, n in sorted(result.dropped.items())]
    figures = [(name, f"{value:.4g}") for name, value in result.metrics.items()]
    files = [
        (name, "" if a.rows is None else f"{a.rows:,}", f"`{a.sha256[:12]}`", f"`{a.path}`")
        for name, a in result.artifacts.items()
    ]
    tables = {("Why rows were dropped", "Rows"): dropped, ("Figure", "Value"): figures}
    for heads, rows in (tables | {("Artifact", "Rows", "SHA-256", "Path"): files}).items():
        lines += [markdown_table(heads, rows, " r"), ""] if rows else []
    return "\n".join(lines)


def emit_run_event(event: str, run: Run, payload: dict[str, Any], **labels: str) -> None:
    """Emit `qinglan.EVENT` for automations, those of qinglan/ops/prefect/automations.py and the
    users' own.

    Prefect adds flow run, flow and deployment as related resources.
    """
    about = {"profile": run.profile.name, "tenant": run.profile.tenant.id} | labels
    emit_event(
        f"qinglan.{event}",
        resource={"prefect.resource.id": f"qinglan.run.{run.id}", "prefect.resource.name": run.id}
        | {f"qinglan.{label}": value for label, value in about.items()},
        payload=payload,
    )
