"""How a stage runs an engine: started again where it died, not where that can't help, here and on a cluster."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from fake_ray import FakeRay
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Cancelling, Running, State

from qinglan.config import Profile
from qinglan.errors import EngineError, StageError
from qinglan.runs import launcher
from qinglan.runs.back_off import BackOff
from qinglan.runs.launcher import AttemptFailedError, Command
from qinglan.runs.run import note_flow_run, open_run
from qinglan.tasks import engine
from qinglan.tasks.engine import is_cancelled, run_engine, stop_jobs
from qinglan.tasks.stage import Stage
from qinglan.training.engines import attempts, ray_jobs
from qinglan.training.engines.attempts import run_attempts

# Counts its attempts in a file, and dies in all but the last.
DIES = """
import pathlib, sys
path = pathlib.Path("count")
count = int(path.read_text()) + 1 if path.exists() else 1
path.write_text(str(count))
sys.exit(0 if count == int(sys.argv[1]) else 1)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_S", 0.02)
    monkeypatch.setattr(ray_jobs, "POLL_S", 0.01)
    monkeypatch.setattr(ray_jobs, "_BACK_OFF", BackOff(0.01, 30.0))


class Attempts:
    """What a launcher does: an outcome for each attempt, an exception or None."""

    def __init__(self, folder: Path, *outcomes: Exception | None) -> None:
        self.folder, self.outcomes, self.said = folder, list(outcomes), list[str]()
        self.step = 0

    def run(self, max_restarts: int = 2, *, resumable: bool = True, steps: int = 0) -> None:
        def attempt() -> None:
            self.step += steps
            if outcome := self.outcomes.pop(0):
                raise outcome

        run_attempts(
            attempt,
            name="verl",
            folder=self.folder,
            progress=(lambda: self.step) if resumable else None,
            max_restarts=max_restarts,
            say=self.said.append,
        )


def died(seconds: float = 600.0) -> AttemptFailedError:
    return AttemptFailedError("verl ended with status 137; full log: x\n    Killed", seconds)


def test_an_engine_that_died_is_started_again(tmp_path: Path):
    attempts = Attempts(tmp_path, died(), died(), None)
    attempts.run()
    assert attempts.said[1] == (
        "verl ended with status 137; full log: x; starting it again from its newest checkpoint, 2 of 2 restarts"
    )
    Attempts(tmp_path, died(5), died(5), None).run(steps=1)  # quick deaths, but with progress
    (tmp_path / "stopped.json").write_text('{"reason": "nothing better since step 40", "failed": false}')
    Attempts(tmp_path, None).run()


@pytest.mark.parametrize(
    ("outcomes", "options", "message"),
    [
        ([died()], {"max_restarts": 0}, "status 137"),
        ([died()], {"resumable": False}, "status 137"),
        ([died(), died(), died()], {}, r"after 2 restarts, trainer\.max_restarts"),
        (
            [died(5), died(5)],
            {"max_restarts": 10},
            r"twice in a row .* is a setting wrong\? verl ended",
        ),
        ([StageError("too many rows left out")], {}, "too many rows"),
    ],
)
def test_a_restart_that_cannot_help_is_not_tried(
    tmp_path: Path, outcomes: list[Exception], options: dict[str, Any], message: str
):
    attempts = Attempts(tmp_path, *outcomes, None)
    with pytest.raises((EngineError, StageError), match=message):
        attempts.run(**options)
    assert attempts.outcomes == [None]


@pytest.mark.parametrize("outcome", [died(), None])
def test_an_engine_that_gave_up_is_not_started_again(tmp_path: Path, outcome: Exception | None):
    (tmp_path / "stopped.json").write_text('{"reason": "12% of the samples were not scored", "failed": true}')
    with pytest.raises(StageError, match="verl gave up: 12% of the samples were not scored"):
        Attempts(tmp_path, outcome, None).run()


def stage_of(profile: Profile, directory: Path) -> tuple[Stage, list[str]]:
    said: list[str] = []
    run = SimpleNamespace(id="run-1", profile=profile)
    fake = SimpleNamespace(run=run, name="rl", key="abcdefghijk", directory=directory, say=said.append)
    return cast(Stage, fake), said


def test_a_process_here_is_started_again_with_a_new_command(
    tmp_path: Path, profile_of: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    stage, said = stage_of(profile_of(), tmp_path)
    made: list[int] = []

    def command() -> Command:
        made.append(len(made))
        return Command([sys.executable, "-c", DIES, "3"])

    monkeypatch.setattr(attempts, "EARLY_S", 0.0)
    run_engine(stage, command, name="verl", log="rl.log", progress=lambda: None)
    assert (len(made), len(said)) == (3, 2)


def test_a_job_is_submitted_again_under_the_next_number(
    tmp_path: Path, profile_of: Callable[..., Profile], ray: FakeRay
):
    stage, _ = stage_of(profile_of(trainer={"ray_dashboard_url": ray.url}), tmp_path)

    def end_it() -> None:
        *earlier, newest = ray.jobs
        if ray.jobs[newest]["status"] == "RUNNING":
            ray.end(newest, "SUCCEEDED" if earlier else "FAILED", "the node is gone")

    run_engine(stage, Command(["true"]), name="verl", log="rl.log", on_poll=end_it, progress=lambda: None)
    assert list(ray.jobs) == ["qinglan-run-1-rl-verl-abcdefgh-1", "qinglan-run-1-rl-verl-abcdefgh-2"]


class FakePrefect:
    """A Prefect client that knows one flow run's state."""

    def __init__(self, state: State[Any] | None) -> None:
        self._state = state

    def __enter__(self) -> "FakePrefect":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_flow_run(self, flow_run_id: UUID) -> Any:
        if self._state is None:
            raise httpx.ConnectError("no route to Prefect")
        return SimpleNamespace(id=flow_run_id, state=self._state)


@pytest.mark.parametrize(
    ("state", "expected"), [(Cancelling(), True), (Cancelled(), True), (Running(), False), (None, False)]
)
def test_the_cancellation_hook_stops_the_jobs_of_a_cancelled_run(
    tmp_path: Path,
    profile_of: Callable[..., Profile],
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    state: State[Any] | None,
    expected: bool,
):
    profile, flow_run = profile_of(trainer={"ray_dashboard_url": ray.url}), uuid4()
    with open_run(profile, "train") as run:
        note_flow_run(run, str(flow_run))
    job = f"qinglan-{run.id}-rl-verl-abcdefgh-1"
    ray.jobs[job] = {"submission_id": job, "status": "RUNNING"}
    monkeypatch.setattr(engine, "get_client", lambda **_: FakePrefect(state))
    monkeypatch.setattr(engine, "load_profile", lambda *_: profile)
    monkeypatch.setattr(engine, "flow_run_logger", lambda _: logging.getLogger("test"))
    stop_jobs(cast(Any, None), FlowRun(id=flow_run, flow_id=uuid4(), parameters={"profile": "p"}), Cancelling())
    assert ray.stopped() == ([job] if expected else [])
    assert is_cancelled(str(flow_run)) is expected
    assert not is_cancelled(""), "outside of a flow run nothing is cancelled"
