"""How a stage runs an engine: started again where it died, not where that can't help, here and on a
cluster; what it sees of the engine's metrics, alarms, and rows that are left out."""

import json
import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import httpx
import pytest
from doubles import raising
from fake_ray import FakeRay
from fixture_types import ProfileOf
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Cancelling, Running, State
from run_stages import stage_result

from qinglan.config import Profile, Trainer
from qinglan.errors import ConfigError, EngineError, StageError
from qinglan.ops.prefect import crash_recovery
from qinglan.runs import launcher
from qinglan.runs.artifacts import Artifact, StageResult
from qinglan.runs.launcher import AttemptFailedError, Command
from qinglan.runs.run import note, open_run
from qinglan.tasks import engine, followers
from qinglan.tasks import stage as stage_module
from qinglan.tasks.attempts import STARTED
from qinglan.tasks.engine import is_cancelled, run_attempts, run_engine, stop_jobs
from qinglan.tasks.followers import AlarmFollower, Follower, LeftOut
from qinglan.tasks.sft import _swift_line, require_enough_rows
from qinglan.training.alarms import Alarm
from qinglan.training.engines import swift, verl
from qinglan.training.engines.progress import ALARMS_FILE


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "POLL_S", 0.02)


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

        run = SimpleNamespace(profile=SimpleNamespace(trainer=Trainer(max_restarts=max_restarts)))
        stage: Any = SimpleNamespace(run=run, directory=self.folder, say=self.said.append)
        run_attempts(
            stage, attempt, name="verl", progress=(lambda: self.step) if resumable else None
        )


def died(seconds: float = 600.0) -> AttemptFailedError:
    return AttemptFailedError("verl ended with status 137; full log: x", seconds, "    Killed")


def test_an_engine_that_died_is_started_again(tmp_path: Path):
    attempts = Attempts(tmp_path, died(), died(), None)
    attempts.run()
    assert attempts.said[1] == (
        "verl ended with status 137; full log: x; starting it again from its newest checkpoint, 2 of 2 restarts"
    )
    Attempts(tmp_path, died(5), died(5), None).run(steps=1)  # quick deaths, but with progress
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


class Seen:
    """A stage and its tracker: what users, Prefect and MLflow get of a training run."""

    def __init__(self, profile: Profile, folder: Path) -> None:
        self.name, self.directory, self.mlflow_run_id, self.tracker = "rl", folder, "child", self
        self.key, self.run = "abcdefghijk", SimpleNamespace(id="run-1", profile=profile)
        self.sent: list[tuple[int, Mapping[str, float]]] = []
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.markdown: dict[str, str] = {}
        self.metrics: list[tuple[str, dict[str, float], int]] = []
        self.tags: dict[str, str] = {}

    def log_steps(self, _: str, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        self.sent += steps

    def progress(self, *_: Any) -> None:
        """Nobody looks."""

    def say(self, text: str, **_: Any) -> None:
        self.said.append(text)

    def emit_event(self, event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        self.events.append((event, resource, payload))

    def create_markdown_artifact(self, markdown: str, key: str, description: str) -> None:
        self.markdown[key] = markdown

    def log_metrics(self, run_id: str, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((run_id, metrics, step))

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags |= tags


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
    stage: Any = Seen(
        profile_of(trainer={"stalled_after_s": 2}, reward={"max_outage_s": 1}), tmp_path
    )

    def say(text: str) -> None:
        stage.said.append(text)
        (tmp_path / STARTED).write_text(
            text
        )  # as a stage keeps its time, and so its folder changes

    monkeypatch.setattr(stage, "say", say)
    made: list[int] = []

    def command() -> Command:  # a new one for each attempt
        made.append(len(made))
        return Command([sys.executable, "-c", STALLS])

    run_engine(stage, command, name="verl", log="rl.log", progress=lambda: None)
    first, again = stage.said
    assert len(made) == 2
    assert first.startswith("verl wrote nothing for ") and "(last file: metrics.1.jsonl)" in first
    assert "trainer.stalled_after_s" in again and again.endswith("1 of 2 restarts")
    assert "wait_for_a_lost_sample" in (tmp_path / "rl.log").read_text()


def test_an_engine_without_checkpoints_is_ended_where_its_log_grows_no_more(
    tmp_path: Path, profile_of: ProfileOf
):
    stage: Any = Seen(
        profile_of(trainer={"stalled_after_s": 1}, reward={"max_outage_s": 0.5}), tmp_path
    )
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
    stage: Any = Seen(
        profile_of(trainer={"ray_dashboard_url": ray.url if on_ray else None}), tmp_path
    )
    (stop := tmp_path / "stopped.json").write_text(
        '{"reason": "nothing better since step 40", "failed": false}'
    )
    for progress in (None, list):  # an export, a training
        watchers: list[Any] = [lambda: [ray.end(each, "SUCCEEDED") for each in ray.jobs]]
        run_engine(
            stage,
            Command(["true"]),
            name="verl",
            log="rl.log",
            watchers=watchers,
            progress=progress,
        )
        assert stop.exists() is (progress is None)


def test_a_run_sees_the_gpus_alone_that_it_has_locked(
    tmp_path: Path, profile_of: ProfileOf, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    stage: Any = Seen(profile_of(trainer={"device": "cuda"}), tmp_path)
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

    profile, flow_run = profile_of(trainer={"ray_dashboard_url": ray.url}), uuid4()
    prefect = SimpleNamespace(read_flow_run=read_flow_run)
    with open_run(profile, "train") as run:
        note(run, flow_run_id=str(flow_run))
    job = f"qinglan-{run.id}-rl-verl-abcdefgh-1"
    ray.jobs[job] = {"submission_id": job, "status": "RUNNING"}
    monkeypatch.setattr(engine, "get_client", lambda **_: nullcontext(prefect))
    monkeypatch.setattr(crash_recovery, "load_profile", lambda *_: profile)
    monkeypatch.setattr(engine, "flow_run_logger", lambda _: logging.getLogger("test"))
    stop_jobs(
        cast(Any, None),
        FlowRun(id=flow_run, flow_id=uuid4(), parameters={"profile": "p"}),
        Cancelling(),
    )
    assert ray.stopped() == ([job] if expected else [])
    assert is_cancelled(str(flow_run)) is expected
    assert not is_cancelled(""), "outside of a flow run nothing is cancelled"


@pytest.mark.parametrize("cancelled", [True, False])
def test_sigterm_stops_the_job_of_a_cancelled_run_alone(
    tmp_path: Path,
    profile_of: ProfileOf,
    ray: FakeRay,
    monkeypatch: pytest.MonkeyPatch,
    cancelled: bool,
):
    stage: Any = Seen(profile_of(trainer={"ray_dashboard_url": ray.url}), tmp_path)
    monkeypatch.setattr(engine, "flow_run_id", lambda: "f1")
    monkeypatch.setattr(engine, "is_cancelled", lambda run: cancelled and run == "f1")
    terminate = raising(TerminationSignal(SIGTERM))  # as Prefect does, and no Exception
    with pytest.raises(TerminationSignal):
        run_engine(stage, Command(["true"]), name="verl", log="rl.log", watchers=[terminate])
    assert bool(ray.stopped()) == cancelled


def test_rows_that_fill_no_batch_are_told_of_before_training(profile_of: ProfileOf):
    def dataset(rows: int) -> StageResult:
        files = {"rl_train": Artifact(path=Path("rl.parquet"), sha256="0" * 64, rows=rows)}
        return stage_result("dataset", artifacts=files)

    with open_run(profile_of(), "train") as run:
        require_enough_rows(run, dataset(64))
        with pytest.raises(
            ConfigError, match=r"train_batch_size \(64\) is more than the 63 RL training rows"
        ):
            require_enough_rows(run, dataset(63))


@pytest.fixture
def seen(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Seen(profile, tmp_path)
    monkeypatch.setattr(followers, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(stage_module, "emit_event", made.emit_event)
    monkeypatch.setattr(followers, "create_markdown_artifact", made.create_markdown_artifact)
    return made


def log_steps(path: Path, *steps: tuple[int, str, float]) -> None:
    with path.open("a") as stream:
        for step, name, value in steps:
            stream.write(json.dumps({name: value, "global_step/max_steps": f"{step}/9"}) + "\n")


def test_a_step_that_was_trained_twice_counts_once(seen: Any, tmp_path: Path):
    log = tmp_path / swift.LOGGING_FILE
    log_steps(log, (1, "loss", 9.0), (2, "loss", 8.0), (2, "eval_loss", 7.0), (3, "loss", 99.0))
    follow = Follower(seen, log, _swift_line)
    follow()
    log_steps(log, (2, "loss", 6.0), (3, "loss", 5.0))
    follow()
    assert follow.curve("loss") == [(1, 9.0), (2, 6.0), (3, 5.0)]
    assert follow.curve("eval_loss") == [(2, 7.0)]
    assert follow.last_step == 3
    assert [step for step, _ in seen.sent] == [1, 2, 3], "sent once, after both were read"


def swift_kept(rows: int) -> str:
    train, dev = (
        f"Dataset({{\n    features: ['lengths'],\n    num_rows: {count}\n}})\n"
        for count in (rows, 9)
    )
    return f"[INFO:swift] train_dataset: {train}[INFO:swift] val_dataset: {dev}"


def test_rows_that_are_left_out_are_counted_once_over_all_attempts_until_they_are_too_many(
    seen: Any, tmp_path: Path
):
    log = tmp_path / "sft.log"
    log.write_text(
        "noise\n" * 3
        + "[INFO:swift] Dataset filtered, origin length: 100, filtered dataset length: 9\n"
    )
    watch = LeftOut(seen, log, 100, partial(swift.left_out, 100), "sft.max_length = 64")
    watch()
    assert watch.dropped == {}, "those may be dev rows"
    log.write_text(log.read_text() + 2 * swift_kept(80))
    watch()
    assert (watch.count, watch.dropped) == (20, {"prompt_too_long": 20})
    assert seen.said == [
        "20 of 100 training rows are longer than sft.max_length = 64 tokens and left out"
    ]
    log.write_text(swift_kept(79))
    watch = LeftOut(seen, log, 100, partial(swift.left_out, 100), "sft.max_length = 64")
    with pytest.raises(
        StageError, match=r"rl: 21 of 100 .* sft.max_length = 64 tokens, more than 20%; raise it"
    ):
        watch()
    log.write_text(swift_kept(90))
    watch = LeftOut(seen, log, 100, partial(swift.left_out, 100), "rl.max_prompt_length = 64", 96)
    with pytest.raises(
        StageError, match=r"rl: 10 of 100 .*; the others fill no batch of 96; add questions"
    ):
        watch()


def test_verls_two_lines_may_come_apart(seen: Any, tmp_path: Path):
    log = tmp_path / "rl.log"
    watch = LeftOut(seen, log, 1998, verl.left_out, "rl.max_prompt_length = 256")
    for text, count in (
        ("dataset len: 1998\n", 0),
        ("(TaskRunner pid=7) filter dataset len: 1990\n", 8),
    ):
        with log.open("a") as stream:
            stream.write(text)
        watch()
        assert watch.count == count


def write_alarms(folder: Path, *steps: int) -> None:
    values = {"first": 1, "last": 5, "reward_before": 0.3, "reward_now": 0.1}
    known = {"name": "reward_down", "action": "warn", "code": "alarm_reward_down", "values": values}
    lines = [
        Alarm.model_validate({"step": step} | known).model_dump_json() + "\n" for step in steps
    ]
    (folder / ALARMS_FILE).write_text("".join(lines), encoding="utf-8")


def test_a_new_alarm_is_reported_once_and_earlier_ones_only_count(tmp_path: Path, seen: Any):
    write_alarms(tmp_path, 21)  # of an earlier attempt
    follow = AlarmFollower(seen)
    follow()
    assert seen.events == []
    for steps in (
        (21, 40),
        (21,),
        (21, 40),
        (21, 40, 41),
    ):  # a resumed attempt sees the second one again
        write_alarms(tmp_path, *steps)
        follow()
        follow()
    assert [payload["step"] for _, _, payload in seen.events] == [40, 41]
    event, resource, payload = seen.events[0]
    assert payload["message"].startswith("the mean reward fell from 0.300 in steps 1–5 to 0.100")
    assert (event, resource["prefect.resource.id"]) == (
        "qinglan.alarm.reward_down",
        "qinglan.run.run-1",
    )
    assert {
        "qinglan.stage": "rl",
        "qinglan.alarm": "reward_down",
        "qinglan.action": "warn",
    }.items() <= resource.items()
    assert seen.metrics == [
        ("child", {"alarms/reward_down": 2}, 40),
        ("child", {"alarms/reward_down": 3}, 41),
    ]
    assert seen.tags == {"alarm.reward_down": "step 21, 40, 41"}
    assert "| 41 | `reward_down` | warn | the mean reward fell" in seen.markdown["rl-alarms"]


def test_a_prefect_server_that_is_away_costs_no_training(
    tmp_path: Path, seen: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    follow = AlarmFollower(seen)
    with monkeypatch.context() as patched:
        patched.setattr(
            followers, "create_markdown_artifact", raising(httpx.ConnectError("connection refused"))
        )
        write_alarms(tmp_path, 21)
        follow()
    assert caplog.messages[-1] == "rl: Prefect did not take the table of alarms: connection refused"
    assert seen.tags == {"alarm.reward_down": "step 21"}
    write_alarms(tmp_path, 21, 40)
    follow()
    assert "| 21 |" in seen.markdown["rl-alarms"] and "| 40 |" in seen.markdown["rl-alarms"]
