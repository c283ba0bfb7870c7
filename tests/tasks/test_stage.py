"""The frame around a stage and a session, without Prefect: shown, kept and found again."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from doubles import KilledError, raising
from fixture_types import ProfileOf
from run_stages import end_stage, end_stage_with, stage_result

from qinglan.config import Profile
from qinglan.errors import ArtifactError, ConfigError, StageError
from qinglan.recipes.keys import scoring_digest
from qinglan.runs.artifacts import PROGRESS_FILE, Artifact, StageResult, write_jsonl
from qinglan.runs.run import Run, find_run, finish_run, open_run, read_run
from qinglan.tasks import session as session_module
from qinglan.tasks import stage as stage_module
from qinglan.tasks.attempts import STARTED
from qinglan.tasks.session import Session, stages_of
from qinglan.tasks.stage import Outcome, Stage, stage_markdown

Resolve = Callable[..., list[StageResult]]
perform = stage_module.perform
never = raising(AssertionError("was not to be run again"))


@pytest.fixture
def run(profile_of: ProfileOf) -> Run:
    with open_run(profile_of(), "pipeline") as opened:
        return opened


def rows(stage: Stage) -> Outcome:
    artifact = write_jsonl(stage.directory / "rows.jsonl", [{"n": 1}])
    return Outcome(3, 1, {"empty_query": 2}, {"rows": artifact}, {"top1": 0.5})


def killed(
    run: Run, name: str, depends_on: dict[str, Any], work: Callable[[Stage], Outcome]
) -> None:
    """Perform a stage whose process dies in its work: neither MLflow nor the clock hears of it."""

    def dying(stage: Stage) -> Outcome:
        work(stage)
        patch.setattr(stage.tracker, "end_run", lambda *_, **__: None)
        patch.setattr(stage._clock, "keep", lambda *_, **__: None)
        raise KilledError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KilledError):
        perform(run, name, depends_on, dying)


def test_a_finished_stage_is_not_run_again(run: Run, tracker: Any):
    first = perform(run, "ingest", {"a": 1}, rows)
    assert perform(run, "ingest", {"a": 1}, never) == first
    assert tracker.ended == [False]
    counts = {"rows_in": 3, "rows_out": 1, "seconds": first.seconds}
    assert tracker.metrics == counts | {"dropped/empty_query": 2.0, "top1": 0.5}


def test_a_stage_warns_of_rows_beyond_its_band(
    profile_of: ProfileOf, tracker: Any, caplog: pytest.LogCaptureFixture
):
    warning = "targets.rows: share of rows after distill, at least 0.9; it is 0.800"
    # The second run reuses the stages, the third draws a sample.
    for flow, warnings in (("refresh", 1), ("refresh", 2), ("compare", 2)):
        with open_run(profile_of(targets={"rows": {"distill": (0.9, 1.0)}}), flow) as opened:
            perform(opened, "ingest", {}, lambda _: Outcome(10, 10))
            perform(opened, "distill", {}, lambda _: Outcome(10, 8))
            finish_run(opened)
        assert caplog.messages.count(warning) == warnings


def test_a_failed_stage_keeps_its_files_for_its_inputs_alone(
    run: Run, tracker: Any, caplog: pytest.LogCaptureFixture
):
    def half(stage: Stage) -> Outcome:
        (stage.directory / "checkpoint").write_text("half way")
        raise StageError("boom")

    def rest(stage: Stage) -> Outcome:
        return Outcome(rows_in=(stage.directory / "checkpoint").stat().st_size)

    with pytest.raises(StageError):
        perform(run, "sft", {"a": 1}, half)
    perform(run, "sft", {"a": 1}, rest)
    assert tracker.ended == [True, False]
    perform(run, "sft", {"a": 2}, rows)
    assert sorted(path.name for path in (run.directory / "sft").iterdir()) == [
        "manifest.json",
        "rows.jsonl",
        STARTED,
    ]
    aside = run.directory / "sft.superseded-1"
    assert (aside / "checkpoint").read_text() == "half way"
    assert str(aside) in caplog.text


def test_a_killed_stage_keeps_its_files_mlflow_run_and_clock(
    run: Run, tracker: Any, monkeypatch: pytest.MonkeyPatch
):
    now = 100.0
    monkeypatch.setattr(stage_module.time, "monotonic", lambda: now)

    def half(stage: Stage) -> Outcome:
        nonlocal now
        (stage.directory / "checkpoint").write_text("half way")
        for units in (1, 2):
            now += 30
            stage.progress(units, 4)
        assert (stage.directory / PROGRESS_FILE).read_text() == "2/4, 1 min 00 s left"
        # These are lost: the process dies before the next progress.
        now += 3
        return Outcome()

    def rest(stage: Stage) -> Outcome:
        nonlocal now
        assert (stage.directory / "checkpoint").exists()
        assert not (stage.directory / "progress.txt").exists()
        now += 40
        return Outcome()

    killed(run, "sft", {"a": 1}, half)
    assert tracker.running == {"child-1"}
    result = perform(run, "sft", {"a": 1}, rest)
    assert (result.seconds, tracker.started, tracker.running) == (100, 1, set())


def test_a_killed_stage_of_other_inputs_does_not_stay_running(run: Run, tracker: Any):
    killed(run, "sft", {"a": 1}, lambda _: Outcome())
    perform(run, "sft", {"a": 2}, rows)
    assert (tracker.ended, tracker.running) == ([True, False], set())


def test_a_kill_between_manifest_and_mlflow_is_made_good(
    run: Run, tracker: Any, monkeypatch: pytest.MonkeyPatch
):
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(tracker, "log_params", raising(KilledError()))
        perform(run, "ingest", {}, rows)
    assert tracker.running == {"child-1"}
    perform(run, "ingest", {}, never)
    assert (tracker.running, tracker.metrics["top1"]) == (set(), 0.5)


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_server_that_takes_no_progress_costs_nothing(
    run: Run,
    tracker: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_a_loop: bool,
):
    percents: list[float] = []

    async def away(percent: float, *_: object) -> None:
        percents.append(percent)
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(stage_module, "acreate_progress_artifact", away)

    def work(stage: Stage) -> Outcome:
        async def in_loop() -> None:
            show()
            await asyncio.sleep(0)

        def show() -> None:
            for rows_done in range(101):
                stage.progress(rows_done, 100, "rows")

        if in_a_loop:
            asyncio.run(in_loop())
        else:
            show()
        return Outcome()

    perform(run, "distill", {}, work)
    assert percents == [100.0], "it is shown now and then"
    assert "distill: Prefect did not take the progress: refused" in caplog.text


def test_a_stage_is_shown(run: Run):
    artifacts = {"r": Artifact(path=Path("/r/rows.jsonl"), sha256="ab" * 32, rows=1234)}
    dropped = {"below_threshold": 766}
    text = stage_markdown(stage_result("select", "old", dropped=dropped, artifacts=artifacts), run)
    assert "reused from run `old`" in text
    assert "| `below_threshold` | 766 |" in text
    assert "| r | 1,234 | `abababababab` | `/r/rows.jsonl` |" in text


@pytest.fixture
def resolve(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """`stages_of` in a new or continued run of a flow."""
    monkeypatch.setattr(session_module, "get_run_logger", lambda: logging.getLogger("test"))

    def stages(
        profile: Profile,
        *names: str,
        flow: str = "evaluate",
        source: str | None = None,
        finish: bool = True,
    ) -> list[StageResult]:
        with open_run(profile, flow, source=source) as opened:
            session = Session(opened, never, Path(), source is not None)
            results = stages_of(session, names)
            if finish:
                finish_run(opened)
            return results

    return stages


def finished(profile: Profile, *names: str, flow: str = "pipeline") -> Run:
    with open_run(profile, flow) as opened:
        for name in names:
            details = {"scored_with": scoring_digest(opened)} if name == "dataset" else {}
            end_stage_with(opened, name, [{"n": 1}], details=details)
        finish_run(opened)
        return opened


def test_stages_of_the_newest_run_that_has_them(profile_of: ProfileOf, resolve: Resolve):
    old = finished(profile_of(), "dataset", "sft")
    finished(profile_of(name="someone else's"), "dataset", "sft")
    finished(profile_of(rag={"top_k": 3}), "dataset", "sft")
    finished(profile_of(), "dataset")
    results = resolve(profile_of(), "dataset", "sft")
    assert [result.run_id for result in results] == [old.id] * 2


def test_evaluate_finds_what_train_used_and_made(profile_of: ProfileOf, resolve: Resolve):
    data = finished(profile_of(), "dataset", flow="refresh")
    (dataset,) = resolve(profile_of(), "dataset", flow="train")
    trained = end_stage(read_run(find_run(profile_of().paths.runs, "latest")), "rl")
    assert resolve(profile_of(), "dataset", "rl") == [dataset, trained]
    assert resolve(profile_of(), "dataset", "rl", source=trained.run_id) == [dataset, trained]
    assert dataset.run_id == data.id


def test_stages_of_a_run_that_was_stopped_before_all_were_made_again(
    profile_of: ProfileOf, resolve: Resolve
):
    names = ("dataset", "rl", "evaluate")
    for ended_stages in (names, names[:1]):
        with open_run(profile_of(), "pipeline") as run:
            for name in ended_stages:
                end_stage(run, name)
    message = f"run {run.id}: its rl and evaluate may be of other rows or models"
    for source in (run.id, None):
        with pytest.raises(ConfigError, match=message):
            resolve(profile_of(), *names, source=source)
    finished(profile_of(), *names)
    assert {result.run_id for result in resolve(profile_of(), *names)} == {run.id}


def test_stages_of_a_named_run(profile_of: ProfileOf, resolve: Resolve):
    run = finished(profile_of(name="other"), "dataset")
    assert resolve(profile_of(), "dataset", source=run.id)[0].run_id == run.id
    assert resolve(profile_of(), "dataset", source="latest")[0].run_id == run.id
    with pytest.raises(
        ConfigError, match=f"run {run.id}: has no finished rl; run `qinglan run refresh`"
    ):
        resolve(profile_of(), "rl", source=run.id)


@pytest.mark.parametrize("source", [None, "latest"])
def test_a_continued_run_keeps_its_source(
    profile_of: ProfileOf, resolve: Resolve, source: str | None
):
    first = finished(profile_of(), "dataset")
    assert resolve(profile_of(), "dataset", source=source, finish=False)[0].run_id == first.id
    newer = first.directory.with_name("99990101-000000-aaaa")
    finished(profile_of(), "dataset").directory.rename(newer)
    assert resolve(profile_of(), "dataset", source=source, finish=False)[0].run_id == first.id


@pytest.mark.parametrize(
    "change", [{"rag": {"top_k": 3}}, {"judge": {"model": "big"}}, {"tenant": {"id": "x"}}]
)
def test_a_dataset_scored_otherwise_is_refused(
    profile_of: ProfileOf, resolve: Resolve, change: dict[str, Any]
):
    run = finished(profile_of(), "dataset")
    with pytest.raises(
        ConfigError, match="was scored with another tenant, RAG, knowledge base or judge"
    ):
        resolve(profile_of(**change), "dataset", source=run.id)
    with pytest.raises(
        ConfigError,
        match=f"no run of test .* the newest: run {run.id}: its dataset was scored with",
    ):
        resolve(profile_of(**change), "dataset")
    other_knowledge_base = run.model_copy(update={"knowledge_base_sha256": "ab"})
    assert scoring_digest(run) != scoring_digest(other_knowledge_base)


def test_what_cannot_be_started_from_is_one_line(profile_of: ProfileOf, resolve: Resolve):
    with pytest.raises(
        ConfigError, match="has what `train` needs \\(dataset\\); run `qinglan run refresh`"
    ):
        resolve(profile_of(), "dataset", flow="train")
    run = finished(profile_of(), "dataset")
    (run.directory / "dataset" / "rows.jsonl").write_text("x")
    with pytest.raises(ArtifactError, match="was changed after it was written"):
        resolve(profile_of(), "dataset")
    (run.directory / "dataset" / "manifest.json").write_text('{"stage": "dataset"}')
    with pytest.raises(
        ConfigError, match=r"^[^\n]*not of this version of Qinglan \(`key`: Field required\)[^\n]*$"
    ):
        resolve(profile_of(), "dataset", source=run.id)
