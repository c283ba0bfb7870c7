"""Running a stage's engine, here and on a cluster; it is started again where that can help."""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from doubles import raising
from fake_ray import FakeRay
from fake_stage import FakeStage
from fixture_types import ProfileOf
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Cancelling, Running, State

from qinglan.config import Trainer
from qinglan.errors import EngineError, StageError
from qinglan.ops.prefect import crash_recovery
from qinglan.runs import launcher
from qinglan.runs.launcher import AttemptFailedError, Command
from qinglan.runs.run import note, open_run
from qinglan.tasks import engine
from qinglan.tasks.attempts import STARTED
from qinglan.tasks.engine import is_cancelled, run_attempts, run_engine, stop_jobs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_S", 0.02)


class Attempts:
    """Attempts of an engine, each with its outcome: an exception, or None where it succeeds."""

    def __init__(self, folder: Path, *outcomes: Exception | None) -> None:
        self.folder = folder
        self.outcomes = list(outcomes)
        self.said: list[str] = []
        self.step = 0

    def run(self, max_restarts: int = 2, *, resumable: bool = True, steps: int = 0) -> None:
        def attempt() -> None:
            self.step += steps
            outcome = self.outcomes.pop(0)
            if outcome:
                raise outcome

        def current_step() -> int:
            return self.step

        run = SimpleNamespace(profile=SimpleNamespace(trainer=Trainer(max_restarts=max_restarts)))
        stage: Any = SimpleNamespace(run=run, directory=self.folder, say=self.said.append)
        progress = current_step if resumable else None
        run_attempts(stage, attempt, name="verl", progress=progress)


def died(seconds: float = 600.0) -> AttemptFailedError:
    return AttemptFailedError("verl ended with status 137; full log: x", seconds, "    Killed")


def test_an_engine_that_died_is_started_again(tmp_path: Path):
    attempts = Attempts(tmp_path, died(), died(), None)
    attempts.run()
    assert attempts.said[1] == (
        "verl ended with status 137; full log: x; "
        "starting it again from its newest checkpoint, 2 of 2 restarts"
    )
    # Quick deaths, but with progress.
    Attempts(tmp_path, died(5), died(5), None).run(steps=1)
    (tmp_path / "stopped.json").write_text(
        '{"reason": "nothing better since step 40", "failed": false}'
    )
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
def test_no_restart_where_none_helps(
    tmp_path: Path, outcomes: list[Exception], options: dict[str, Any], message: str
):
    attempts = Attempts(tmp_path, *outcomes, None)
    with pytest.raises((EngineError, StageError), match=message):
        attempts.run(**options)
    assert attempts.outcomes == [None]


@pytest.mark.parametrize("outcome", [died(), None])
def test_an_engine_that_gave_up_is_not_started_again(tmp_path: Path, outcome: Exception | None):
    (tmp_path / "stopped.json").write_text(
        '{"reason": "12% of the samples were not scored", "failed": true}'
    )
    with pytest.raises(StageError, match="verl gave up: 12% of the samples were not scored"):
        Attempts(tmp_path, outcome, None).run()


STALLS = """
import pathlib, time
def wait_for_a_lost_sample():
    time.sleep(600)
path = pathlib.Path("metrics.1.jsonl")
if path.exists():
    raise SystemExit
path.write_text("{}")
wait_for_a_lost_sample()
"""


def test_a_process_that_stalls_is_started_again(
    tmp_path: Path, profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    profile = profile_of(trainer={"stalled_after_s": 2}, reward={"max_outage_s": 1})
    stage: Any = FakeStage(profile, tmp_path)

    def say(text: str) -> None:
        stage.said.append(text)
        # As a stage keeps its time, and so its folder changes.
        (tmp_path / STARTED).write_text(text)

    monkeypatch.setattr(stage, "say", say)
    commands: list[Command] = []

    def next_command() -> Command:
        commands.append(Command([sys.executable, "-c", STALLS]))
        return commands[-1]

    run_engine(stage, next_command, name="verl", log="rl.log", progress=lambda: None)
    warning, restart = stage.said
    assert len(commands) == 2, "a new one for each attempt"
    assert warning.startswith("verl wrote nothing for ")
    assert "(last file: metrics.1.jsonl)" in warning
    assert "trainer.stalled_after_s" in restart
    assert restart.endswith("1 of 2 restarts")
    assert "wait_for_a_lost_sample" in (tmp_path / "rl.log").read_text()


def test_an_engine_without_checkpoints_is_ended_where_its_log_grows_no_more(
    tmp_path: Path, profile_of: ProfileOf
):
    profile = profile_of(trainer={"stalled_after_s": 1}, reward={"max_outage_s": 0.5})
    stage: Any = FakeStage(profile, tmp_path)
    stalls = Command(
        ["sh", "-c", "for each in 1 2 3 4 5; do sleep 0.3; echo $each; done; sleep 600"]
    )
    with pytest.raises(EngineError, match=r"generation 1 wrote nothing .*generate\.log"):
        run_engine(stage, stalls, name="generation 1", log="generate.log")
    assert (tmp_path / "generate.log").read_text().startswith("1\n2\n3\n4\n5\n")


@pytest.mark.parametrize("on_ray", [False, True])
def test_a_stop_is_known_until_training_begins_again(
    tmp_path: Path, profile_of: ProfileOf, ray: FakeRay, on_ray: bool
):
    profile = profile_of(trainer={"ray_dashboard_url": ray.url if on_ray else None})
    stage: Any = FakeStage(profile, tmp_path)
    stop = tmp_path / "stopped.json"
    stop.write_text('{"reason": "nothing better since step 40", "failed": false}')

    def end_jobs() -> None:
        for job in ray.jobs:
            ray.end(job, "SUCCEEDED")

    for progress in (None, list):  # an export, a training
        run_engine(
            stage,
            Command(["true"]),
            name="verl",
            log="rl.log",
            watchers=[end_jobs],
            progress=progress,
        )
        assert stop.exists() is (progress is None)


def test_a_run_sees_the_gpus_alone_that_it_has_locked(
    tmp_path: Path, profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    stage: Any = FakeStage(profile_of(trainer={"device": "cuda"}), tmp_path)
    program = "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] != '3')"
    run_engine(stage, Command([sys.executable, "-c", program]), name="ms-swift SFT", log="sft.log")


@pytest.mark.parametrize(
    ("state", "expected"),
    [(Cancelling(), True), (Cancelled(), True), (Running(), False), (None, False)],
)
def test_the_cancellation_hook_stops_the_jobs_of_a_cancelled_run(
    profile_of: ProfileOf,
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    state: State[Any] | None,
    expected: bool,
):
    def read_flow_run(_: UUID) -> Any:
        if state is None:
            raise httpx.ConnectError("no route to Prefect")
        return SimpleNamespace(state=state)

    profile = profile_of(trainer={"ray_dashboard_url": ray.url})
    flow_run = FlowRun(id=uuid4(), flow_id=uuid4(), parameters={"profile": "p"})
    prefect = SimpleNamespace(read_flow_run=read_flow_run)
    with open_run(profile, "train") as run:
        note(run, flow_run_id=str(flow_run.id))
    job = f"qinglan-{run.id}-rl-verl-abcdefgh-1"
    ray.jobs[job] = {"submission_id": job, "status": "RUNNING"}
    monkeypatch.setattr(engine, "get_client", lambda **_: nullcontext(prefect))
    monkeypatch.setattr(crash_recovery, "load_profile", lambda *_: profile)
    monkeypatch.setattr(engine, "flow_run_logger", lambda _: logging.getLogger("test"))
    stop_jobs(cast(Any, None), flow_run, Cancelling())
    assert ray.stopped() == ([job] if expected else [])
    assert is_cancelled(str(flow_run.id)) is expected
    assert not is_cancelled(""), "outside of a flow run nothing is cancelled"


@pytest.mark.parametrize("cancelled", [True, False])
def test_sigterm_stops_the_job_of_a_cancelled_run_alone(
    tmp_path: Path,
    profile_of: ProfileOf,
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    cancelled: bool,
):
    stage: Any = FakeStage(profile_of(trainer={"ray_dashboard_url": ray.url}), tmp_path)
    monkeypatch.setattr(engine, "flow_run_id", lambda: "f1")
    monkeypatch.setattr(engine, "is_cancelled", lambda run: cancelled and run == "f1")
    # Prefect raises it so, and it is no Exception.
    terminate = raising(TerminationSignal(SIGTERM))
    with pytest.raises(TerminationSignal):
        run_engine(stage, Command(["true"]), name="verl", log="rl.log", watchers=[terminate])
    assert bool(ray.stopped()) == cancelled
