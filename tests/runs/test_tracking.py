"""MLflow on SQLite: runs and their children, batches, and a server that is away."""

import logging
import math
from pathlib import Path
from typing import Any, Literal

import pytest
from doubles import raising
from mlflow import MlflowClient

from qinglan.config import Tracking
from qinglan.errors import ConfigError
from qinglan.runs.artifacts import Artifact
from qinglan.runs.traces import CallSample
from qinglan.runs.tracking import Tracker


@pytest.fixture(scope="module")
def tracker(database: str, tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    return Tracker(database, Tracking(), tmp_path_factory.mktemp("state"))


@pytest.fixture
def client(database: str) -> MlflowClient:
    return MlflowClient(database)


def test_a_child_run_with_parameters_metrics_and_tags(tracker: Tracker, client: MlflowClient):
    parent = tracker.start_run("run", {"profile": "p"})
    child = tracker.start_run("sft", {}, parent=parent)
    tracker.log_params(
        child,
        {"sft": {"lr": 1e-3, "extra": {}}, "note": "x" * 9000, "prices": {"a@b:c": 1}, "none": ""},
    )
    tracker.log_metrics(child, {"dropped/空": 2.0, "loss (dev)": 0.5, "text": "no"})  # type: ignore[dict-item]
    tracker.end_run(child)
    data = client.get_run(child).data
    assert data.tags["mlflow.parentRunId"] == parent
    assert data.params["sft.lr"] == "0.001"
    assert data.params["prices.a_b_c"] == "1"
    assert len(data.params["note"]) == 500
    assert data.metrics == {"dropped/空": 2.0, "loss _dev_": 0.5}
    assert client.get_run(child).info.status == "FINISHED"
    rewards = [float(step) for step in range(1000)]
    rewards[3] = math.nan
    tracker.log_steps(parent, [(step, {"reward": reward}) for step, reward in enumerate(rewards)])
    assert len(client.get_metric_history(parent, "reward")) == 1000


@pytest.mark.parametrize(
    ("rows", "files"),
    [
        ("copy", ["decision.json", "report.html", "rl.log.reference.json", "rows.jsonl"]),
        (
            "path",
            [
                "decision.json",
                "report.html.reference.json",
                "rl.log.reference.json",
                "rows.jsonl.reference.json",
            ],
        ),
    ],
)
def test_a_file_is_kept_and_a_folder_referred_to_and_so_are_rows_unless_they_may_be_copied(
    client: MlflowClient, tmp_path: Path, rows: Literal["path", "copy"], files: list[str]
):
    tracker = Tracker(client.tracking_uri, Tracking(rows=rows), tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.bin").write_bytes(b"1")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    run = tracker.start_run("data", {})
    for name in ("decision.json", "report.html", "rl.log"):
        (tmp_path / name).write_text("{}")
    artifact = Artifact.of(tmp_path / "rows.jsonl", 1)
    tracker.log_artifact(run, "rows", artifact)
    tracker.log_artifact(run, "decision", Artifact.of(tmp_path / "decision.json"))
    tracker.log_artifact(run, "report_html", Artifact.of(tmp_path / "report.html"))
    tracker.log_artifact(run, "model", Artifact.of(tmp_path / "model"))
    tracker.log_artifact(run, "rl", Artifact.of(tmp_path / "rl.log"), refer=True)
    tags = client.get_run(run).data.tags
    assert [file.path for file in client.list_artifacts(run)] == files
    logged = Path(client.download_artifacts(run, files[-1], str(tmp_path / "model"))).read_text()
    if rows == "copy":
        assert logged == "{}\n"
    else:
        assert Artifact.model_validate_json(logged) == artifact
    assert tags["artifact.rows.rows"] == "1"
    assert tags["artifact.model.path"] == str(tmp_path / "model")


def test_a_run_is_continued(tracker: Tracker, client: MlflowClient):
    run = tracker.start_run("sft", {})
    tracker.end_run(run, failed=True)
    assert tracker.resume_run(run)
    assert client.get_run(run).info.status == "RUNNING"
    tracker.end_run(run)
    assert client.get_run(run).info.status == "FINISHED"
    assert not tracker.resume_run("no-such-run")


def test_losses_on_the_way_are_said_not_raised(
    tracker: Tracker,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    file = tmp_path / "sft.log"
    file.write_text("x")
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as store:
            # The proxy's requests.HTTPError is an OSError, too.
            refusal = OSError("413 Request Entity Too Large")
            store.setattr(MlflowClient, "log_artifact", raising(refusal))
            tracker.log_artifact(tracker.start_run("run", {}), "log", Artifact.of(file))
        last_line = caplog.records[-1].message
        assert last_line == "MLflow did not take sft.log: 413 Request Entity Too Large"
        caplog.clear()
        tracker.log_metrics("no-such-run", {"loss": 1.0})
        tracker.set_tags("no-such-run", {"a": "b"})
        tracker.end_run("no-such-run", failed=True)
    assert [record.message.split("no-such-run")[0] for record in caplog.records] == [
        "MLflow did not take a batch for run ",
        "MLflow did not take a batch for run ",
        "MLflow did not close run ",
    ]


def test_a_server_that_is_away_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match="MLflow can't be reached"):
        Tracker(uri, Tracking(uri=uri), tmp_path).start_run("run", {})


def test_an_experiment_that_another_run_makes_first(
    tracker: Tracker, client: MlflowClient, monkeypatch: Any
):
    tracker.start_run("first", {})
    experiment = client.get_experiment_by_name("qinglan")
    answers = iter([None, experiment])
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *_: next(answers))
    run = Tracker(client.tracking_uri, Tracking(), Path()).start_run("second", {})
    assert client.get_run(run).info.experiment_id == experiment.experiment_id


def test_the_dataset_of_a_run(
    tracker: Tracker, client: MlflowClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = tracker.start_run("train", {})
    # Once more changes nothing.
    for _ in range(2):
        tracker.log_dataset(run, "租户", "0123456789ab", tmp_path, "training", {"rows": 3})
    (dataset_input,) = client.get_run(run).inputs.dataset_inputs
    assert dataset_input.dataset.name == "租户"
    assert dataset_input.dataset.digest == "0123456789ab"
    assert str(tmp_path) in dataset_input.dataset.source
    assert [tag.value for tag in dataset_input.tags] == ["training"]
    tracker.log_dataset("no-such-run", "t", "d", tmp_path, "training", {})
    assert "MLflow did not take dataset d" in caplog.text


def note(sample: CallSample, key: int, answer: str | None = "答", **attributes: Any) -> None:
    inputs = {"messages": [{"role": "user", "content": key}]}
    sample.add(str(key), "teacher", "CHAT_MODEL", inputs, answer, **attributes)


def test_the_same_calls_are_traced_in_whatever_order_and_are_found_at_their_run(
    client: MlflowClient,
):
    tracker = Tracker(client.tracking_uri, Tracking(rows="copy", traces_per_stage=5), Path())
    first = tracker.new_sample()
    second = tracker.new_sample()
    for number in range(40):
        note(first, number, model="m", latency_ms=812.0, cost_usd=0.5)
        note(second, 39 - number)
    inputs = [call.inputs for call in first.calls()]
    assert [call.inputs for call in second.calls()] == inputs
    run = tracker.start_run("distill", {})
    tracker.log_traces(run, first)
    experiment = client.get_run(run).info.experiment_id
    traces = client.search_traces(locations=[experiment], run_id=run)
    spans = [span for trace in traces for span in trace.data.spans]
    assert sorted(str(span.inputs) for span in spans) == sorted(map(str, inputs))
    assert spans[0].name == "teacher"
    assert spans[0].outputs == "答"
    assert traces[0].info.execution_duration == 812
    attributes = {"model": "m", "cost_usd": 0.5, "latency_ms": 812.0, "attempt": 1, "status": "ok"}
    assert attributes.items() <= spans[0].attributes.items()


def test_no_call_is_traced_where_mlflow_gets_no_rows_and_lost_traces_are_said_once(
    tracker: Tracker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    without_rows = tracker.new_sample()
    note(without_rows, 1)
    assert without_rows.calls() == []
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    away = Tracker("http://127.0.0.1:9", Tracking(rows="copy"), Path())
    sample = away.new_sample()
    for key in range(2):
        note(sample, key, None, failure="teacher_timeout")
    away.log_traces("r", sample)
    records = [record for record in caplog.records if record.name == "qinglan.runs.tracking"]
    problems = [record.message.split(": ")[0] for record in records]
    assert problems == ["MLflow did not take the traces of run r"]
