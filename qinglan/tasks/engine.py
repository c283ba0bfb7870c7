"""Runs a stage's engine: here or as a Ray job, and again where it died.

Where the flow run was cancelled, its jobs are stopped too.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.logging.loggers import flow_run_logger

from qinglan.errors import EngineError, StageError
from qinglan.ops.prefect.crash_recovery import stop_cancelled
from qinglan.runs.launcher import ROW_CACHE, AttemptFailedError, Command, launch
from qinglan.runs.locks import device_lock
from qinglan.tasks.stage import Stage, flow_run_id
from qinglan.tasks.watchdog import Watchdog
from qinglan.training.engines.progress import STOPPED_FILE, read_stop
from qinglan.training.engines.ray_jobs import JobSeries, RayJobs

EARLY_S = 60.0
"""Seconds within which a death is an early one.

An engine that dies early twice in a row and without progress has a wrong setting.
"""


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
        command: the engine's command, or a function that makes it anew for each attempt; the
            function is not called for a job that is still running from before this flow's process
            was killed.
        name: the engine's name, another one for each that a stage runs.
        log: name of the log file in the stage's folder.
        watchers: functions to call again and again while the engine runs, and once after.
        progress: gives something that changes with each checkpoint, for engines that go on from
            one. They are started again where they die, up to `trainer.max_restarts` times. If
            None, a failure is final.

    Raises:
        EngineError: the engine failed; with the end of its log.
        StageError: the engine gave up by itself.
        Exception: whatever a watcher raises; the process or, for a `QinglanError`, the job has
            ended then.
    """
    has_checkpoints = progress is not None
    engine = _Engine(stage, command, name, stage.directory / log, watchers, has_checkpoints)
    trainer = stage.run.profile.trainer
    if trainer.ray_dashboard_url is None:
        run_attempts(stage, engine.run_here, name=name, progress=progress)
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
        run_job = partial(engine.run_as_job, series, cancelled)
        run_attempts(stage, run_job, name=name, progress=progress)


@dataclass(frozen=True)
class _Engine:
    """An engine that a stage runs; the methods that run it make one attempt."""

    stage: Stage
    command: Command | Callable[[], Command]
    name: str
    log: Path
    watchers: Sequence[Callable[[], None]]
    has_checkpoints: bool

    def run_here(self) -> None:
        """Run it as a process of this machine, on the GPUs that this run locks."""
        with device_lock(self.stage.run.profile, self.stage.say) as devices:
            command = self._next_command()
            if devices:
                # Other runs may hold the machine's other GPUs.
                own_devices = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
                command = replace(command, env=command.env | own_devices)
            launch(command, name=self.name, log=self.log, on_poll=self._watch())

    def run_as_job(self, series: JobSeries, cancelled: Callable[[], bool]) -> None:
        """Run it as the next job of the series, or follow the one that is still running."""
        series.run(
            self._next_command,
            name=self.name,
            log_file=self.log,
            on_poll=self._watch(),
            is_cancelled=cancelled,
        )

    def _next_command(self) -> Command:
        """The command of the next attempt."""
        if self.has_checkpoints:
            # It is of an earlier attempt. An export leaves it, as the stage still needs it then.
            (self.stage.directory / STOPPED_FILE).unlink(missing_ok=True)
        if isinstance(self.command, Command):
            return self.command
        return self.command()

    def _watch(self) -> Callable[[], None]:
        """A function that calls all watchers, and a watchdog that is new for each attempt."""
        watchdog = Watchdog(self.stage, self.name, self.log, trains=self.has_checkpoints)
        watchers: list[Callable[[], None]] = [*self.watchers, watchdog]

        def call_watchers() -> None:
            for watcher in watchers:
                watcher()

        return call_watchers


def run_attempts(
    stage: Stage, attempt: Callable[[], None], *, name: str, progress: Callable[[], object] | None
) -> None:
    """Run attempt after attempt until one succeeds, unless another one can't help.

    An engine that gives up by itself writes `STOPPED_FILE`, whose reason is raised as a StageError.
    """
    max_restarts = stage.run.profile.trainer.max_restarts
    early_deaths = 0
    for restarts in count():
        progress_before = progress() if progress else None
        failure = _failure_of(attempt)
        # An engine that gave up may have ended well or badly. Early stopping is no failure.
        stop = read_stop(stage.directory)
        if stop and stop.failed:
            raise StageError(f"{name} gave up: {stop.reason}") from failure
        if failure is None:
            # Other attempts would have used it again.
            shutil.rmtree(stage.directory / ROW_CACHE, ignore_errors=True)
            return
        if progress is None or not max_restarts:
            raise failure
        is_early = failure.seconds < EARLY_S and progress() == progress_before
        early_deaths = early_deaths + 1 if is_early else 0
        if early_deaths == 2:
            raise EngineError(
                f"{name} died twice in a row within {EARLY_S:.0f} s and without progress, "
                f"so it is not started again; is a setting wrong? {failure}",
                failure.said,
            ) from failure
        if restarts == max_restarts:
            raise EngineError(
                f"{failure} (after {restarts} restarts, trainer.max_restarts)", failure.said
            ) from failure
        stage.say(
            f"{failure}; starting it again from its newest checkpoint, "
            f"{restarts + 1} of {max_restarts} restarts"
        )


def _failure_of(attempt: Callable[[], None]) -> AttemptFailedError | None:
    """Run an attempt; the error with which the engine ended, None where it succeeded."""
    try:
        attempt()
    except AttemptFailedError as error:
        return error
    return None


def stop_jobs(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """Stop the jobs of a cancelled flow run; flows have it as `on_cancellation`.

    The worker calls it even where the flow's process had to be killed. Prefect calls it as well
    where a runner is only shut down, so what counts is what the flow run's state says.
    """
    if is_cancelled(str(flow_run.id)):
        stop_cancelled(flow_run.model_dump(mode="json"), flow_run_logger(flow_run).warning)


def is_cancelled(prefect_id: str) -> bool:
    """Tell whether this flow run was cancelled.

    False where Prefect can't say, so that a job is left running.
    """
    if not prefect_id:
        return False
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(prefect_id)).state
    except (httpx.HTTPError, ObjectNotFound):
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())
