"""What the flow makes of the trainer's alarms; neither Prefect's server nor MLflow."""

import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from qinglan.tasks import alarms as module
from qinglan.tasks import stage as stage_module
from qinglan.tasks.alarms import AlarmFollower
from qinglan.training.alarms import Alarm
from qinglan.training.engines.trainer_settings import ALARMS_FILE


class Told:
    """Remembers what Prefect and MLflow were told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.markdown: dict[str, str] = {}
        self.metrics: list[tuple[str, dict[str, float], int]] = []
        self.tags: dict[str, str] = {}

    def emit_event(self, event: str, resource: dict[str, str], payload: dict[str, Any]) -> None:
        self.events.append((event, resource, payload))

    def create_markdown_artifact(self, markdown: str, key: str, description: str) -> None:
        self.markdown[key] = markdown

    def log_metrics(self, run_id: str, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((run_id, metrics, step))

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.tags |= tags


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    made = Told()
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(stage_module, "emit_event", made.emit_event)
    monkeypatch.setattr(module, "create_markdown_artifact", made.create_markdown_artifact)
    return made


def follower(folder: Path, told: Told) -> AlarmFollower:
    profile = SimpleNamespace(name="embedded", tenant=SimpleNamespace(id="sample"))
    run = SimpleNamespace(id="run-1", profile=profile)
    return AlarmFollower(SimpleNamespace(name="rl", directory=folder, run=run, tracker=told, mlflow_run_id="child"))  # type: ignore[arg-type]


def write(folder: Path, step: int, name: str = "reward_down") -> None:
    alarm = Alarm.model_validate({"step": step, "name": name, "action": "warn", "message": "what was seen"})
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as stream:
        stream.write(alarm.model_dump_json() + "\n")


def test_a_new_alarm_is_told_everywhere_once(tmp_path: Path, told: Told, caplog: pytest.LogCaptureFixture):
    follow = follower(tmp_path, told)
    follow()
    assert told.events == []
    write(tmp_path, 21)
    follow()
    follow()
    ((event, resource, payload),) = told.events
    assert event == "qinglan.alarm.reward_down"
    assert resource["prefect.resource.id"] == "qinglan.run.run-1"
    about = {key.removeprefix("qinglan."): value for key, value in resource.items() if key.startswith("qinglan.")}
    assert about == {
        "profile": "embedded",
        "tenant": "sample",
        "stage": "rl",
        "alarm": "reward_down",
        "action": "warn",
    }
    assert payload["step"] == 21
    assert told.metrics == [("child", {"alarms/reward_down": 1}, 21)]
    assert told.tags == {"alarm.reward_down": "step 21"}
    assert "| 21 | `reward_down` | warn | what was seen |" in told.markdown["rl-alarms"]
    assert [record.getMessage() for record in caplog.records] == ["rl: step 21: alarm reward_down: what was seen"]


def test_what_an_earlier_attempt_left_counts_but_is_not_told_again(tmp_path: Path, told: Told):
    write(tmp_path, 21)
    follow = follower(tmp_path, told)
    follow()
    assert told.events == []
    write(tmp_path, 40)
    write(tmp_path, 41, "kl_runaway")
    follow()
    assert Counter(alarm.name for alarm in follow.alarms) == {"reward_down": 2, "kl_runaway": 1}
    assert told.tags["alarm.reward_down"] == "step 21, 40"


def test_what_a_resumed_attempt_sees_again_is_not_told_again(tmp_path: Path, told: Told):
    follow = follower(tmp_path, told)
    for step in (21, 40, 21, 41):
        write(tmp_path, step)
        follow()
    assert [payload["step"] for _, _, payload in told.events] == [21, 40, 41]
    assert Counter(alarm.name for alarm in follow.alarms) == {"reward_down": 2}


def test_a_prefect_server_that_is_away_costs_no_training(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def away(*_: object, **__: object) -> None:
        raise httpx.ConnectError("connection refused")

    follow = follower(tmp_path, told)
    with monkeypatch.context() as patched:
        patched.setattr(module, "create_markdown_artifact", away)
        write(tmp_path, 21)
        follow()
    assert caplog.messages[-1] == "rl: Prefect did not take the table of alarms: connection refused"
    assert told.tags == {"alarm.reward_down": "step 21"}
    write(tmp_path, 40)
    follow()
    assert "| 21 |" in told.markdown["rl-alarms"] and "| 40 |" in told.markdown["rl-alarms"]


def test_half_a_line_of_a_killed_attempt_is_skipped(tmp_path: Path, told: Told):
    follow = follower(tmp_path, told)
    (tmp_path / ALARMS_FILE).write_text('{"step": 3\n{"step": 4}\n', encoding="utf-8")
    write(tmp_path, 5)
    follow()
    assert [alarm.step for alarm in follow.alarms] == [5]
