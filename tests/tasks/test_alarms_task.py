"""What the flow makes of the trainer's alarms; neither Prefect's server nor MLflow."""

import logging
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


class Reported:
    """Remembers what Prefect and MLflow received."""

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
def reported(monkeypatch: pytest.MonkeyPatch) -> Reported:
    made = Reported()
    monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(stage_module, "emit_event", made.emit_event)
    monkeypatch.setattr(module, "create_markdown_artifact", made.create_markdown_artifact)
    return made


def follower(folder: Path, reported: Reported) -> AlarmFollower:
    profile = SimpleNamespace(name="embedded", tenant=SimpleNamespace(id="sample"))
    run = SimpleNamespace(id="run-1", profile=profile)
    return AlarmFollower(SimpleNamespace(name="rl", directory=folder, run=run, tracker=reported, mlflow_run_id="child"))  # type: ignore[arg-type]


def write(folder: Path, step: int) -> None:
    alarm = Alarm.model_validate({"step": step, "name": "reward_down", "action": "warn", "message": "what was seen"})
    with (folder / ALARMS_FILE).open("a", encoding="utf-8") as stream:
        stream.write(alarm.model_dump_json() + "\n")


def test_a_new_alarm_is_reported_once_and_earlier_ones_only_count(tmp_path: Path, reported: Reported):
    write(tmp_path, 21)  # of an earlier attempt
    follow = follower(tmp_path, reported)
    follow()
    assert reported.events == []
    for step in (40, 21, 41):  # a resumed attempt sees the first one again
        write(tmp_path, step)
        follow()
        follow()
    assert [payload["step"] for _, _, payload in reported.events] == [40, 41]
    event, resource, _ = reported.events[0]
    assert (event, resource["prefect.resource.id"]) == ("qinglan.alarm.reward_down", "qinglan.run.run-1")
    assert {"qinglan.stage": "rl", "qinglan.alarm": "reward_down", "qinglan.action": "warn"}.items() <= resource.items()
    assert reported.metrics == [("child", {"alarms/reward_down": 2}, 40), ("child", {"alarms/reward_down": 2}, 41)]
    assert reported.tags == {"alarm.reward_down": "step 21, 41"}
    assert "| 41 | `reward_down` | warn | what was seen |" in reported.markdown["rl-alarms"]


def test_a_prefect_server_that_is_away_costs_no_training(
    tmp_path: Path, reported: Reported, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def away(*_: object, **__: object) -> None:
        raise httpx.ConnectError("connection refused")

    follow = follower(tmp_path, reported)
    with monkeypatch.context() as patched:
        patched.setattr(module, "create_markdown_artifact", away)
        write(tmp_path, 21)
        follow()
    assert caplog.messages[-1] == "rl: Prefect did not take the table of alarms: connection refused"
    assert reported.tags == {"alarm.reward_down": "step 21"}
    write(tmp_path, 40)
    follow()
    assert "| 21 |" in reported.markdown["rl-alarms"] and "| 40 |" in reported.markdown["rl-alarms"]
