"""The dataset stage in its frame: its metrics, and the red team in its key."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_types import ProfileOf
from question_rows import random_rows
from run_stages import stage_result

from qinglan.config import Profile
from qinglan.rows import Retrieved
from qinglan.runs.artifacts import StageResult, write_jsonl
from qinglan.runs.run import open_run
from qinglan.tasks import dataset as dataset_module
from qinglan.tasks.dataset import build_dataset

Make = Callable[[Profile], StageResult]
RETRIEVED = Retrieved(ids=("a",), scores=(0.9,), titles=("",))


@pytest.fixture
def built(tmp_path: Path, tracker: Any, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The stage's result, from 30 rows in each split."""
    monkeypatch.setattr(dataset_module, "get_run_logger", lambda: logging.getLogger("test"))
    answer = {"answer": "改写", "answer_retrieved": RETRIEVED}
    rows = [
        *random_rows(30, 0, split="train", **answer),
        *random_rows(30, 1, split="dev", **answer),
        *random_rows(30, 2, split="test", **answer),
    ]
    artifacts = {"rows": write_jsonl(tmp_path / "rows.jsonl", rows)}

    def make(profile: Profile) -> StageResult:
        with open_run(profile, "refresh", fresh=True) as run:
            return build_dataset.fn(run, stage_result("select", run.id, artifacts=artifacts))

    return make


def test_questions_with_noise_are_no_rows_of_the_stage(built: Make, profile_of: ProfileOf) -> None:
    result = built(profile_of(dataset={"augment": {"story": 1.0}}))
    assert (result.rows_in, result.rows_out, result.artifacts["sft_train"].rows) == (90, 90, 60)
    assert (result.metrics["rows_train"], result.metrics["augmented_sft/story"]) == (30, 30)
    assert result.details["augmented"] == {"story": {"sft": 30, "rl": 0, "left_out": 0}}


def test_another_red_team_is_another_key(
    built: Make, profile_of: ProfileOf, tmp_path: Path
) -> None:
    cases = tmp_path / "cases.jsonl"
    query = random_rows(1)[0].query + "呢"
    case = {"id": "own", "name": "一例", "kind": "own", "query": query}
    cases.write_text(json.dumps(case))
    first = built(profile_of())
    second = built(profile_of(evaluate={"red_team": str(cases)}))
    assert first.key != second.key
    assert second.dropped == {"near_duplicate_of_evaluation": 1}
