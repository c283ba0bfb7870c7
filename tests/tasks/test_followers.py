"""A stage's view of an engine that runs: metrics, alarms, and the rows that are left out."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles import raising
from fake_stage import FakeStage

from qinglan.config import Profile
from qinglan.errors import StageError
from qinglan.tasks import followers
from qinglan.tasks import stage as stage_module
from qinglan.tasks.followers import AlarmFollower, Follower, LeftOut
from qinglan.tasks.sft import _swift_line
from qinglan.training.alarms import Alarm
from qinglan.training.engines import swift, verl
from qinglan.training.engines.progress import ALARMS_FILE


@pytest.fixture
def stage(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = FakeStage(profile, tmp_path)
    monkeypatch.setattr(followers, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(stage_module, "emit_event", fake.emit_event)
    monkeypatch.setattr(followers, "create_markdown_artifact", fake.create_markdown_artifact)
    return fake


def log_steps(path: Path, *steps: tuple[int, str, float]) -> None:
    with path.open("a") as stream:
        for step, name, value in steps:
            stream.write(json.dumps({name: value, "global_step/max_steps": f"{step}/9"}) + "\n")


def test_a_step_that_was_trained_twice_counts_once(stage: Any, tmp_path: Path):
    log = tmp_path / swift.LOGGING_FILE
    log_steps(log, (1, "loss", 9.0), (2, "loss", 8.0), (2, "eval_loss", 7.0), (3, "loss", 99.0))
    follow = Follower(stage, log, _swift_line)
    follow()
    log_steps(log, (2, "loss", 6.0), (3, "loss", 5.0))
    follow()
    assert follow.curve("loss") == [(1, 9.0), (2, 6.0), (3, 5.0)]
    assert follow.curve("eval_loss") == [(2, 7.0)]
    assert follow.last_step == 3
    assert [step for step, _ in stage.sent] == [1, 2, 3], "sent once, after both were read"


def dataset_line(rows: int) -> str:
    return f"Dataset({{\n    features: ['lengths'],\n    num_rows: {rows}\n}})\n"


def swift_lines(train_rows: int) -> str:
    """Lines of ms-swift's log about the rows that it keeps."""
    train = dataset_line(train_rows)
    return f"[INFO:swift] train_dataset: {train}[INFO:swift] val_dataset: {dataset_line(9)}"


def test_rows_that_are_left_out_are_counted_once_over_all_attempts(stage: Any, tmp_path: Path):
    log = tmp_path / "sft.log"
    log.write_text(
        "noise\n" * 3
        + "[INFO:swift] Dataset filtered, origin length: 100, filtered dataset length: 9\n"
    )
    watch = LeftOut(stage, log, 100, partial(swift.left_out, 100), "sft.max_length = 64")
    watch()
    assert watch.dropped == {}, "those may be dev rows"
    log.write_text(log.read_text() + 2 * swift_lines(80))
    watch()
    assert watch.count == 20
    assert watch.dropped == {"prompt_too_long": 20}
    assert stage.said == [
        "20 of 100 training rows are longer than sft.max_length = 64 tokens and left out"
    ]


@pytest.mark.parametrize(
    ("train_rows", "least", "message"),
    [
        (79, 0, r"rl: 21 of 100 .* sft.max_length = 64 tokens, more than 20%; raise it"),
        (90, 96, r"rl: 10 of 100 .*; the others fill no batch of 96; add questions"),
    ],
)
def test_too_many_rows_that_are_left_out_stop_the_engine(
    stage: Any, tmp_path: Path, train_rows: int, least: int, message: str
):
    log = tmp_path / "sft.log"
    log.write_text(swift_lines(train_rows))
    count = partial(swift.left_out, 100)
    watch = LeftOut(stage, log, 100, count, "sft.max_length = 64", least)
    with pytest.raises(StageError, match=message):
        watch()


def test_verls_two_lines_may_come_apart(stage: Any, tmp_path: Path):
    log = tmp_path / "rl.log"
    watch = LeftOut(stage, log, 1998, verl.left_out, "rl.max_prompt_length = 256")
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
    alarms = [
        Alarm.model_validate(
            {
                "step": step,
                "name": "reward_down",
                "action": "warn",
                "code": "alarm_reward_down",
                "values": values,
            }
        )
        for step in steps
    ]
    lines = [alarm.model_dump_json() + "\n" for alarm in alarms]
    (folder / ALARMS_FILE).write_text("".join(lines), encoding="utf-8")


def test_a_new_alarm_is_reported_once_and_earlier_ones_only_count(tmp_path: Path, stage: Any):
    # Of an earlier attempt.
    write_alarms(tmp_path, 21)
    follow = AlarmFollower(stage)
    follow()
    assert stage.events == []
    # A resumed attempt sees the second one again.
    for steps in ((21, 40), (21,), (21, 40), (21, 40, 41)):
        write_alarms(tmp_path, *steps)
        follow()
        follow()
    assert [payload["step"] for _, _, payload in stage.events] == [40, 41]
    event, resource, payload = stage.events[0]
    assert payload["message"].startswith("the mean reward fell from 0.300 in steps 1–5 to 0.100")
    assert event == "qinglan.alarm.reward_down"
    assert resource["prefect.resource.id"] == "qinglan.run.run-1"
    labels = {"qinglan.stage": "rl", "qinglan.alarm": "reward_down", "qinglan.action": "warn"}
    assert labels.items() <= resource.items()
    assert stage.metrics == [
        ("child", {"alarms/reward_down": 2}, 40),
        ("child", {"alarms/reward_down": 3}, 41),
    ]
    assert stage.tags == {"alarm.reward_down": "step 21, 40, 41"}
    assert "| 41 | `reward_down` | warn | the mean reward fell" in stage.markdown["rl-alarms"]


def test_a_prefect_server_that_is_away_costs_no_training(
    tmp_path: Path, stage: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    follow = AlarmFollower(stage)
    refuse = raising(httpx.ConnectError("connection refused"))
    with monkeypatch.context() as patched:
        patched.setattr(followers, "create_markdown_artifact", refuse)
        write_alarms(tmp_path, 21)
        follow()
    assert caplog.messages[-1] == "rl: Prefect did not take the table of alarms: connection refused"
    assert stage.tags == {"alarm.reward_down": "step 21"}
    write_alarms(tmp_path, 21, 40)
    follow()
    assert "| 21 |" in stage.markdown["rl-alarms"]
    assert "| 40 |" in stage.markdown["rl-alarms"]
