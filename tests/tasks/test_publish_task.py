"""Publishing in the frame of a stage, and the start of a training.

There is neither Prefect's server nor MLflow.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fixture_types import ProfileOf
from question_rows import row
from run_stages import stage_result

from qinglan.config import Profile
from qinglan.data.versions import find_version, last_training, pinned_splits, versions_of
from qinglan.ops.prefect.deployments import Deployment
from qinglan.ops.prefect.server import PrefectServer
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.runs.run import Run, open_run
from qinglan.tasks import publish
from qinglan.tasks import stage as stage_module
from qinglan.tasks import trigger_training as trigger_module
from qinglan.tasks.publish import note_training, publish_dataset
from qinglan.tasks.trigger_training import trigger_training


class Server:
    """Prefect's, as far as it is asked here."""

    def __init__(self) -> None:
        self.markdown: dict[str, str] = {}
        self.started: list[tuple[str, dict[str, Any]]] = []
        self.deployments = [Deployment("d1", "train/train", "embedded", paused=False)]
        self.events: list[tuple[str, dict[str, Any]]] = []

    def emit(self, event: str, _run: Run, payload: dict[str, Any]) -> None:
        self.events.append((event, payload))

    def show(self, markdown: str, key: str, **_: str) -> None:
        self.markdown[key] = markdown

    def run_deployment(self, name: str, **options: Any) -> SimpleNamespace:
        self.started.append((name, options))
        return SimpleNamespace(id="flow-run", name="brave-fox")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tracker: Any) -> Server:
    fake = Server()
    for module in (stage_module, publish, trigger_module):
        monkeypatch.setattr(module, "get_run_logger", lambda: logging.getLogger("test"))
        monkeypatch.setattr(module, "tracker_of", lambda _: tracker, raising=False)
        monkeypatch.setattr(module, "create_markdown_artifact", fake.show, raising=False)
    monkeypatch.setattr(trigger_module, "run_deployment", fake.run_deployment)
    prefect = PrefectServer("http://test/api", "a test")
    monkeypatch.setattr(trigger_module, "find_server", lambda _: prefect)
    monkeypatch.setattr(trigger_module, "deployments_of", lambda _: fake.deployments)
    monkeypatch.setattr(trigger_module, "emit_run_event", fake.emit)
    return fake


def refreshed(profile: Profile, count: int) -> tuple[Run, StageResult]:
    """A run, and its dataset of so many good training rows."""
    rows = [row(f"问{n}", answer=f"词{n}", split="train") for n in range(count)]
    with open_run(profile, "refresh", fresh=True) as run:
        artifacts = {"rows": write_jsonl(run.stage_directory("dataset") / "rows.jsonl", rows)}
    details = {
        "inputs": f"in-{count}",
        "pins": "",
        "augmented": {"emoji": {"sft": 61, "rl": 0, "left_out": 2}},
    }
    return run, stage_result("dataset", run.id, artifacts=artifacts, details=details)


def test_a_dataset_is_published_shown_and_logged(
    profile_of: ProfileOf, server: Server, tracker: Any
):
    run, dataset = refreshed(profile_of(), 3)
    published = publish_dataset.fn(run, dataset)
    version = find_version(run.profile, "latest")
    assert published.details == {"version": version.id, "parent": ""}
    assert published.path("card") == version.directory / "DATA_CARD.md"
    assert server.markdown["data-card"].startswith(f"# Dataset {version.id}")
    assert "| emoji | 61 | 0 | 2 |" in server.markdown["data-card"]
    assert "问" not in server.markdown["data-card"], "whose examples Prefect must not have"
    assert tracker.datasets == [
        ("child-1", "default", version.id, "published"),
        (run.mlflow_run_id, "default", version.id, "published"),
    ]
    ids = [row(f"问{n}").id for n in range(3)]
    assert pinned_splits(run.profile, "in-3") == ("", dict.fromkeys(ids, "train"))
    assert publish_dataset.fn(run, dataset) == published
    assert len(versions_of(run.profile)) == 1
    note_training.fn(run, dataset)
    assert tracker.datasets[-1] == (run.mlflow_run_id, "default", version.id, "training")
    later = publish_dataset.fn(*refreshed(profile_of(), 5))
    assert {"drift_new/vocabulary", "drift_all/length"} <= set(later.metrics)


def test_enough_new_rows_start_a_training_once(profile_of: ProfileOf, server: Server):
    server.deployments.append(Deployment("d2", "train/train-test", "test", paused=False))
    profile = profile_of(refresh={"train_at_new_rows": 3})
    run, dataset = refreshed(profile, 3)
    published = publish_dataset.fn(run, dataset)
    assert trigger_training.fn(run, published) == "flow-run"
    assert trigger_training.fn(run, published) is None
    ((name, options),) = server.started
    assert name == "train/train-test", "a profile's own deployment comes first"
    assert options["timeout"] == 0
    assert options["parameters"] == {"profile": "test", "overrides": [], "source": run.id}
    training = last_training(run.profile)
    assert training is not None
    assert training.version == published.details["version"]


@pytest.mark.parametrize("trouble", ["missing", "paused"])
def test_a_training_that_cannot_start_costs_one_line(
    profile_of: ProfileOf, server: Server, caplog: pytest.LogCaptureFixture, trouble: str
):
    run, dataset = refreshed(profile_of(refresh={"train_at_new_rows": 1}), 2)
    published = publish_dataset.fn(run, dataset)
    deployments = server.deployments
    server.deployments = []
    if trouble == "paused":
        server.deployments = [deployments[0]._replace(paused=True)]
    assert trigger_training.fn(run, published) is None
    advice = {
        "missing": f"start it with `qinglan run train --profile test --from {run.id}`",
        "paused": "`train/train` is paused, as after an alarm: resume it in Prefect's UI",
    }
    assert advice[trouble] in caplog.text
    assert last_training(run.profile) is None
    server.deployments = deployments
    assert trigger_training.fn(run, published) == "flow-run"


def test_too_few_new_rows_wait_for_more(
    profile_of: ProfileOf, server: Server, caplog: pytest.LogCaptureFixture
):
    profile = profile_of(refresh={"train_at_new_rows": 3})
    run, dataset = refreshed(profile, 4)
    publish_dataset.fn(run, dataset)
    note_training.fn(run, dataset)
    for count, starts in ((6, 0), (7, 1)):
        later, dataset = refreshed(profile, count)
        with caplog.at_level(logging.INFO):
            trigger_training.fn(later, publish_dataset.fn(later, dataset))
        assert len(server.started) == starts
    assert "2 good training rows came in since the last training; it starts at 3" in caplog.text


def test_no_training_unless_it_is_asked_for(profile_of: ProfileOf, server: Server):
    run, dataset = refreshed(profile_of(), 9)
    published = publish_dataset.fn(run, dataset)
    assert trigger_training.fn(run, published) is None
    assert server.started == []
    payload = {
        "version": published.details["version"],
        "new_training_rows": 9,
        "train_at_new_rows": None,
    }
    assert server.events == [("refresh.ready", payload)]


def test_a_training_gets_the_refreshs_settings(
    profile_of: ProfileOf, server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    refresh = {"profile": "p.yaml", "overrides": ("data.limit=9",), "fresh": False}
    monkeypatch.setattr(trigger_module, "flow_run", SimpleNamespace(parameters=refresh))
    run, dataset = refreshed(profile_of(refresh={"train_at_new_rows": 1}), 2)
    trigger_training.fn(run, publish_dataset.fn(run, dataset))
    parameters = server.started[0][1]["parameters"]
    assert parameters == {
        "profile": str(tmp_path / "p.yaml"),
        "overrides": ["data.limit=9"],
        "source": run.id,
    }
