"""The evaluate stage: which retrievals it may take over, and what its result depends on."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qinglan.artifacts import StageResult, write_jsonl
from qinglan.config import Profile
from qinglan.rows import Retrieved, Row
from qinglan.runs import Run
from tasks import evaluation

ProfileOf = Callable[..., Profile]
FOUND = Retrieved(ids=("g",), scores=(0.9,))
ROW = Row(
    id="1", tenant="t", query="问", source="f!A1", gold_id="g", split="test",
    rewrite="改写", original_retrieved=FOUND, rewrite_retrieved=FOUND, judge_score=4.0,
)  # fmt: skip
Evaluated = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def evaluated(profile_of: ProfileOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluated:
    """The arms before any call is made, and what the stage depends on."""
    rows = write_jsonl(tmp_path / "rows.jsonl", [ROW])

    def run_it(rag_url: str, dataset_run: str, knowledge_base_sha256: str = "") -> tuple[Any, Any]:
        seen: dict[str, Any] = {}

        async def complete(_run: Any, _services: Any, arms: Any, _rows: Any) -> Any:
            seen["arms"] = arms
            return arms, {}

        def perform(run: Run, name: str, depends_on: Any, work: Callable[[Any], Any]) -> StageResult:
            seen["depends_on"] = depends_on
            work(SimpleNamespace(run=run, directory=tmp_path / name, say=lambda _: None))
            return StageResult(stage=name, key="k", run_id=run.id, seconds=0)

        monkeypatch.setattr(evaluation, "_generate", lambda *_: {})
        monkeypatch.setattr(evaluation, "_complete", complete)
        monkeypatch.setattr(evaluation, "perform", perform)
        profile = profile_of(rag={"url": rag_url})
        run = Run(id="now", flow="evaluate", profile=profile, directory=tmp_path)
        run = run.model_copy(update={"knowledge_base_sha256": knowledge_base_sha256})
        dataset = StageResult(
            stage="dataset", key="k", run_id=dataset_run, seconds=0, artifacts={"test": rows, "rows": rows}
        )
        evaluation.evaluate_arms.fn(run, SimpleNamespace(), dataset, {})  # type: ignore[arg-type]
        return seen["arms"], seen["depends_on"]

    return run_it


@pytest.mark.parametrize(
    ("url", "dataset_run", "kept"),
    [("http://live/q", "earlier", False), ("http://live/q", "now", True), ("embedded", "earlier", True)],
)
def test_a_live_service_is_asked_for_all_arms_again(evaluated: Evaluated, url: str, dataset_run: str, kept: bool):
    arms, _ = evaluated(url, dataset_run)
    assert [arm[0].retrieved is not None for arm in arms.values()] == [kept, kept]
    assert arms["teacher"][0].judge_score == 4.0


def test_another_knowledge_base_is_another_evaluation(evaluated: Evaluated):
    keys = [evaluated("embedded", "now", digest)[1]["knowledge_base"] for digest in ("a", "b")]
    assert keys == ["a", "b"]
    assert evaluated("http://live/q", "now")[1]["knowledge_base"] == "now"
