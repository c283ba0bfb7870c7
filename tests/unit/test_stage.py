"""The frame around a stage and a session, without Prefect: what is shown, what is kept, what is found again."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinglan.artifacts import Artifact, StageResult, write_jsonl
from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError, StageError
from qinglan.runs import Run, open_run, save_stage
from tasks import stage as stage_module
from tasks.session import Session, _inputs, _ShortUserErrors, stages_of
from tasks.stage import STARTED, Outcome, Stage, perform, sources_digest, stage_markdown

ProfileOf = Callable[..., Profile]


class Tracker:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.ended: list[bool] = []
        self.metrics: dict[str, float] = {}

    def start_run(self, name: str, tags: dict[str, str], parent: str | None = None) -> str:
        return "child"

    def log_metrics(self, run_id: str, metrics: dict[str, float]) -> None:
        self.metrics = metrics

    def log_params(self, *_: Any) -> None:
        pass

    def log_artifact(self, *_: Any) -> None:
        pass

    def end_run(self, run_id: str, *, failed: bool = False) -> None:
        self.ended.append(failed)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A stage's surroundings, with neither Prefect nor MLflow."""
    made = Tracker()
    monkeypatch.setattr(stage_module, "get_run_logger", lambda: logging.getLogger("test"))
    monkeypatch.setattr(stage_module, "create_markdown_artifact", lambda *_, **__: None)
    monkeypatch.setattr(stage_module, "tracker_of", lambda _: made)
    return made


@pytest.fixture
def run(profile_of: ProfileOf) -> Run:
    with open_run(profile_of(), "pipeline") as opened:
        return opened


def rows(stage: Stage) -> Outcome:
    artifact = write_jsonl(stage.directory / "rows.jsonl", [{"n": 1}])
    return Outcome(3, 1, {"empty_query": 2}, {"rows": artifact}, {"top1": 0.5})


def boom(_: Stage) -> Outcome:
    raise StageError("boom")


def never(_: Stage) -> Outcome:
    raise AssertionError("was not to be run again")


def test_a_finished_stage_is_not_run_again(run: Run, tracker: Tracker):
    first = perform(run, "ingest", {"a": 1}, rows)
    assert perform(run, "ingest", {"a": 1}, never) == first
    assert tracker.ended == [False]
    assert tracker.metrics == {
        "rows_in": 3,
        "rows_out": 1,
        "seconds": first.seconds,
        "dropped/empty_query": 2.0,
        "top1": 0.5,
    }


def test_other_inputs_start_from_an_empty_folder(run: Run, tracker: Tracker):
    with pytest.raises(StageError):
        perform(run, "ingest", {"a": 1}, boom)
    (run.directory / "ingest" / "half.txt").write_text("of other inputs")
    perform(run, "ingest", {"a": 2}, rows)
    assert sorted(path.name for path in (run.directory / "ingest").iterdir()) == [
        "manifest.json",
        "rows.jsonl",
        STARTED,
    ]


def test_a_failed_stage_keeps_its_files_for_the_next_attempt(run: Run, tracker: Tracker):
    with pytest.raises(StageError):
        perform(run, "sft", {"a": 1}, boom)
    (run.directory / "sft" / "checkpoint").write_text("half way")
    perform(run, "sft", {"a": 1}, lambda stage: Outcome(rows_in=(stage.directory / "checkpoint").stat().st_size))
    assert tracker.ended == [True, False]


def test_a_changed_artifact_is_made_again(run: Run, tracker: Tracker):
    path = perform(run, "ingest", {}, rows).path("rows")
    path.write_text("tampered")
    assert perform(run, "ingest", {}, rows).path("rows").read_text() == '{"n": 1}\n'


def test_the_code_is_part_of_every_key(run: Run, tracker: Tracker, monkeypatch: pytest.MonkeyPatch):
    first = perform(run, "ingest", {}, rows)
    monkeypatch.setattr(stage_module, "sources_digest", lambda: "other code")
    assert perform(run, "ingest", {}, rows).key != first.key
    assert len(sources_digest()) == 64


def test_progress_is_shown_now_and_then(run: Run, tracker: Tracker, monkeypatch: pytest.MonkeyPatch):
    shown: list[float] = []
    monkeypatch.setattr(stage_module, "create_progress_artifact", lambda percent, *_: shown.append(percent))
    stage = Stage("distill", run, run.directory, tracker, "child")  # type: ignore[arg-type]
    for done in range(101):
        stage.progress(done, 100, "rows")
    assert shown == [100.0]


def test_a_stage_for_people(run: Run):
    artifact = Artifact(path=Path("/r/rows.jsonl"), sha256="ab" * 32, rows=1234)
    result = StageResult(
        stage="select", key="k", run_id="earlier", seconds=2, rows_in=2000, rows_out=1234,
        dropped={"below_threshold": 766}, artifacts={"rows": artifact}, metrics={"top1": 0.81234},
    )  # fmt: skip
    text = stage_markdown(result, run)
    assert "reused from run `earlier`" in text
    assert "2,000 rows in · 1,234 rows out" in text
    assert "| `below_threshold` | 766 |" in text
    assert "| rows | 1,234 | `abababababab` | `/r/rows.jsonl` |" in text


def session(profile: Profile) -> Session:
    with open_run(profile, "train", fresh=True) as opened:
        return Session(opened, SimpleNamespace(), Path(), None)  # type: ignore[arg-type]


def finished(profile: Profile, *names: str) -> Run:
    with open_run(profile, "refresh", fresh=True) as opened:
        for name in names:
            artifact = write_jsonl(opened.stage_directory(name) / "rows.jsonl", [{"n": 1}])
            save_stage(opened, StageResult(stage=name, key="k", run_id=opened.id, seconds=1, artifacts={"r": artifact}))
        return opened


def test_stages_of_the_newest_run_that_has_them(profile_of: ProfileOf):
    complete = finished(profile_of(), "dataset", "sft")
    finished(profile_of(), "dataset")
    finished(profile_of(name="someone else's"), "dataset", "sft")
    assert [r.run_id for r in stages_of(session(profile_of()), None, ["dataset", "sft"])] == [complete.id] * 2


def test_stages_of_a_named_run(profile_of: ProfileOf):
    run = finished(profile_of(name="other"), "dataset")
    assert stages_of(session(profile_of()), run.id, ["dataset"])[0].run_id == run.id
    with pytest.raises(ConfigError, match=f"no finished rl in {run.id}; run `qinglan run refresh`"):
        stages_of(session(profile_of()), run.id, ["rl"])


def test_stages_that_were_tampered_with(profile_of: ProfileOf):
    run = finished(profile_of(), "dataset")
    (run.directory / "dataset" / "rows.jsonl").write_text("x")
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        stages_of(session(profile_of()), None, ["dataset"])


def test_own_inputs_need_no_sample(profile_of: ProfileOf, tmp_path: Path):
    profile = profile_of(data={"workbook": "/w.xlsx"}, rag={"knowledge_base": "/kb.jsonl"})
    assert _inputs(profile) == (Path("/w.xlsx"), Path("/kb.jsonl"))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("error", "kept"), [(StageError("one line"), False), (KeyError("bug"), True)])
def test_only_a_bug_shows_a_traceback(error: Exception, kept: bool):
    info = (type(error), error, None)
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "Encountered an exception", (), info)
    assert _ShortUserErrors().filter(record)
    assert (record.exc_info is not None) is kept
    assert record.getMessage() == ("Encountered an exception" if kept else "one line")
