"""How a stage runs an engine: here or as a Ray job, again where it died; follows its metrics and
alarms, and counts the rows that it leaves out."""

import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Flow
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.logging import get_run_logger
from prefect.logging.loggers import flow_run_logger

from qinglan.errors import EngineError, StageError
from qinglan.evaluation.reasons import alarm_words
from qinglan.ops.prefect.crash_recovery import stop_cancelled
from qinglan.runs.artifacts import PROGRESS_FILE
from qinglan.runs.launcher import (
    ROW_CACHE,
    AttemptFailedError,
    Command,
    JsonlTail,
    LineTail,
    StalledError,
    launch,
)
from qinglan.runs.locks import device_lock
from qinglan.tasks.attempts import STARTED
from qinglan.tasks.stage import Stage, emit_run_event, flow_run_id
from qinglan.text import markdown_table, slug
from qinglan.training.alarms import read_alarms
from qinglan.training.engines.progress import ALARMS_FILE, STOPPED_FILE, read_stop
from qinglan.training.engines.ray_jobs import JobSeries, RayJobs

Metrics = dict[str, Any]
MAX_LEFT_OUT_SHARE = 0.2
"""An engine that leaves out more of the training rows is stopped: its length limit is not what was
meant."""
LOOK_EVERY_S = 15.0
EARLY_S = 60.0
"""An engine that dies twice in a row within this time and without progress has a wrong setting."""
_SIZE_LINE = re.compile(rb"[Dd]ataset|num_rows|random samples")


def run_engine(
    stage: Stage,
    command: Command | Callable[[], Command],
    *,
    name: str,
    log: str,
    watchers: Sequence[Callable[[], None]] = (),
    progress: Callable[[], object] | None = None,
) -> None:
    """Run an engine to its end: a process here, or a job of the cluster that
    `trainer.ray_dashboard_url` names.

    Args:
        command: what to run, or what makes it anew for each attempt; not called for a job that is
            still running from before this flow's process was killed.
        name: of the engine, another one for each that a stage runs.
        watchers: called again and again while it runs, and once after.
        progress: for engines that go on from a checkpoint: something that changes with it. They are
            started again where they die, up to `trainer.max_restarts` times. If None, a failure is
            final.

    Raises:
        EngineError: it failed; with the end of its log.
        StageError: it gave up by itself.
        Exception: whatever a watcher raises; the process or, for a `QinglanError`, the job has
            ended then.
    """
    trainer, path = stage.run.profile.trainer, stage.directory / log

    def make() -> Command:
        if progress:
            (stage.directory / STOPPED_FILE).unlink(
                missing_ok=True
            )  # of an earlier attempt; an export needs it
        return command if isinstance(command, Command) else command()

    def polled() -> Callable[[], None]:
        """For one attempt."""
        called: list[Callable[[], None]] = [
            *watchers,
            Watchdog(stage, name, path, trains=progress is not None),
        ]

        def poll() -> None:
            for each in called:
                each()

        return poll

    def run_here() -> None:
        with device_lock(stage.run.profile, stage.say) as devices:
            made = make()
            own = (
                {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
            )  # others may hold the machine's others
            launch(replace(made, env=made.env | own), name=name, log=path, on_poll=polled())

    if trainer.ray_dashboard_url is None:
        run_attempts(stage, run_here, name=name, progress=progress)
        return
    with RayJobs(trainer) as jobs:
        series = JobSeries(
            jobs,
            run_id=stage.run.id,
            stage=stage.name,
            engine=name,
            key=stage.key,
            directory=stage.directory,
            retry_s=trainer.dashboard_retry_s,
            say=stage.say,
        )
        cancelled = partial(is_cancelled, flow_run_id())

        def run_job() -> None:
            series.run(make, name=name, log_file=path, on_poll=polled(), is_cancelled=cancelled)

        run_attempts(stage, run_job, name=name, progress=progress)


def run_attempts(
    stage: Stage, attempt: Callable[[], None], *, name: str, progress: Callable[[], object] | None
) -> None:
    """Run attempt after attempt until one succeeds, unless another one can't help.

    An engine that gives up by itself writes `STOPPED_FILE`, whose reason is raised as a StageError.
    """
    early_deaths, max_restarts = 0, stage.run.profile.trainer.max_restarts
    for restarts in count():
        before, failed = progress() if progress else None, None
        try:
            attempt()
        except AttemptFailedError as error:
            failed = error
        if (stopped := read_stop(stage.directory)) and stopped[1]:
            raise StageError(f"{name} gave up: {stopped[0]}") from failed
        if failed is None:
            shutil.rmtree(stage.directory / ROW_CACHE, ignore_errors=True)
            return
        if progress is None or not max_restarts:
            raise failed
        early_deaths = early_deaths + 1 if failed.seconds < EARLY_S and progress() == before else 0
        if early_deaths == 2:
            problem = f"died twice in a row within {EARLY_S:.0f} s and without progress, so it is not started again"
            raise EngineError(
                f"{name} {problem}; is a setting wrong? {failed}", failed.said
            ) from failed
        if restarts == max_restarts:
            raise EngineError(
                f"{failed} (after {restarts} restarts, trainer.max_restarts)", failed.said
            ) from failed
        stage.say(
            f"{failed}; starting it again from its newest checkpoint, {restarts + 1} of {max_restarts} restarts"
        )


def stop_jobs(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """What flows have as `on_cancellation`: the worker calls it even where the flow's process had
    to be killed.

    Prefect calls it as well where a runner is only shut down, so what counts is what the flow run's
    state says.
    """
    if is_cancelled(str(flow_run.id)):
        stop_cancelled(flow_run.model_dump(mode="json"), flow_run_logger(flow_run).warning)


def is_cancelled(prefect_id: str) -> bool:
    """Was this flow run cancelled? False where Prefect can't say, so that a job is left running."""
    if not prefect_id:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(prefect_id)).state
    except (httpx.HTTPError, ObjectNotFound):
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


class Watchdog:
    """Ends an engine that writes nothing, or in training only its log: verl waits for ever for a
    lost sample."""

    def __init__(self, stage: Stage, name: str, log: Path, *, trains: bool) -> None:
        self._stage, self._name, self._log = stage, name, log
        self._not_its_own = {STARTED, PROGRESS_FILE, *([log.name] if trains else [])}
        self._limit_s = stage.run.profile.trainer.stalled_after_s
        self._started_s = self._changed_s = self._looked_s = time.monotonic()
        self._newest, self._said = (0, ""), False

    def __call__(self) -> None:
        """Look at the stage's files, while the process runs; StalledError where none changed for so
        long."""
        now_s = time.monotonic()
        if now_s - self._looked_s < min(LOOK_EVERY_S, self._limit_s / 10):
            return
        self._looked_s = now_s
        if (newest := self._newest_file()) != self._newest:
            self._newest, self._changed_s, self._said = newest, now_s, False
            return
        silent_s, last = now_s - self._changed_s, self._newest[1] or "none yet"
        silent = f"{self._name} wrote nothing for {silent_s / 60:.1f} minutes (last file: {last})"
        if silent_s > self._limit_s:
            where = f"where its processes waited stands at the end of {self._log}, of a job on Ray's dashboard"
            raise StalledError(
                f"{silent}, trainer.stalled_after_s; {where}", now_s - self._started_s
            )
        if silent_s > self._limit_s / 3 and not self._said:
            self._said = True
            self._stage.say(f"{silent}; it is ended after {self._limit_s / 60:.0f}")

    def _newest_file(self) -> tuple[int, str]:
        """The newest file's time of change and name."""
        found = (0, "")
        for path in self._stage.directory.rglob("*"):
            if path.name not in self._not_its_own:
                with suppress(OSError):  # an old checkpoint is being removed
                    found = max(found, (path.stat().st_mtime_ns, path.name))
        return found


class Follower:
    """Hands new metrics of a training process to MLflow and to the people who wait.

    The path's name may be a pattern, where each attempt has a file of its own.
    """

    def __init__(
        self,
        stage: Stage,
        path: Path,
        read: Callable[[Metrics], tuple[int, int, str, Metrics] | None],
    ) -> None:
        self._stage, self._read, self._tail = stage, read, JsonlTail(path)
        self.last_step, self._flushed_at = 0, time.monotonic()
        self._points: dict[int, Metrics] = {}
        self._unsent: dict[int, Metrics] = {}

    def __call__(self) -> None:
        """Look for new lines; called while the process runs and once after."""
        for entry in self._tail.new():
            if (found := self._read(entry)) is None:
                continue
            step, total, text, metrics = found
            self.last_step = max(self.last_step, step)
            self._points.setdefault(step, {}).update(metrics)
            self._unsent.setdefault(step, {}).update(metrics)
            if total:
                self._stage.progress(step, total, text)
        if self._unsent and time.monotonic() - self._flushed_at > 5:
            self.flush()

    def flush(self) -> None:
        self._stage.tracker.log_steps(self._stage.mlflow_run_id, self._unsent.items())
        self._unsent, self._flushed_at = {}, time.monotonic()

    def curve(self, key: str) -> list[tuple[int, float]]:
        """Values of one metric by step; where a step was measured twice, the later one counts."""
        self.flush()
        return [
            (step, float(metrics[key]))
            for step, metrics in sorted(self._points.items())
            if key in metrics
        ]


class AlarmFollower:
    """Reports the alarms of a training run to users and to Prefect's automations, as the trainer
    writes them.

    What earlier attempts of the stage left in its `alarms.jsonl` counts, but is not reported again.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._log = get_run_logger()
        self.alarms = read_alarms(stage.directory / ALARMS_FILE)
        """In the order in which they came."""
        self._reported = list(self.alarms)
        """Also those of steps that a resume discarded, which come again if they do."""

    def __call__(self) -> None:
        stage = self._stage
        self.alarms = read_alarms(stage.directory / ALARMS_FILE)
        for alarm in [each for each in self.alarms if each not in self._reported]:
            self._reported.append(alarm)
            message = alarm_words(alarm).en
            self._log.warning(
                "%s: step %d: alarm %s: %s", stage.name, alarm.step, alarm.name, message
            )
            labels = {"stage": stage.name, "alarm": alarm.name, "action": alarm.action}
            known = alarm.model_dump(mode="json")
            emit_run_event(f"alarm.{alarm.name}", stage.run, known | {"message": message}, **labels)
            steps = [seen.step for seen in self.alarms if seen.name == alarm.name]
            stage.tracker.log_metrics(
                stage.mlflow_run_id, {f"alarms/{alarm.name}": len(steps)}, alarm.step
            )
            stage.tracker.set_tags(
                stage.mlflow_run_id, {f"alarm.{alarm.name}": f"step {', '.join(map(str, steps))}"}
            )
            last = self.alarms[-1]
            text = f"{len(self.alarms)} so far, the last: {last.name} at step {last.step}"
            key = slug(f"{stage.name}-alarms")
            rows = [
                (f"{each.step:,}", f"`{each.name}`", each.action, alarm_words(each).en)
                for each in self.alarms
            ]
            table = markdown_table(("Step", "Alarm", "Action", "What was seen"), rows, "r")
            try:
                create_markdown_artifact(f"{table}\n", key=key, description=text)
            except (
                httpx.HTTPError
            ) as error:  # a server that is away for a while must not cost a training run
                self._log.warning(
                    "%s: Prefect did not take the table of alarms: %s", stage.name, error
                )


class LeftOut:
    """The rows that an engine leaves out as too long, by what it writes to its log: the same in
    every attempt."""

    def __init__(
        self,
        stage: Stage,
        log: Path,
        rows: int,
        count: Callable[[str], int],
        setting: str,
        least: int = 0,
    ) -> None:
        self.rows, self.count, self._least = rows, 0, least
        self.dropped: dict[str, int] = {}
        self._stage, self._lines, self._read, self._setting = stage, LineTail(log), count, setting
        self._sizes = ""

    def __call__(self) -> None:
        """Look for new lines; StageError where more than `MAX_LEFT_OUT_SHARE` of the rows are left
        out."""
        self._sizes += "".join(
            line.decode(errors="replace") for line in self._lines.new() if _SIZE_LINE.search(line)
        )
        if (count := self._read(self._sizes)) == self.count:
            return
        self.count, self.dropped = count, {"prompt_too_long": count}
        what = f"{count:,} of {self.rows:,} training rows are longer than {self._setting} tokens"
        if count > MAX_LEFT_OUT_SHARE * self.rows:
            raise StageError(
                f"{self._stage.name}: {what}, more than {MAX_LEFT_OUT_SHARE:.0%}; raise it"
            )
        if self.rows - count < self._least:
            raise StageError(
                f"{self._stage.name}: {what}; the others fill no batch of {self._least}; add questions"
            )
        self._stage.say(f"{what} and left out")


def first_and_last(name: str, points: list[tuple[int, float]]) -> dict[str, float]:
    """First and last value of a curve, each averaged over a tenth of it against noise."""
    values = [value for _, value in points]
    if not values:
        return {}
    width = max(1, len(values) // 10)
    return {
        f"{name}_first": sum(values[:width]) / width,
        f"{name}_last": sum(values[-width:]) / width,
    }
