"""What another threshold would keep, and the one setting that is advised."""

import pytest
from question_rows import row
from run_stages import stage_result

from qinglan.config import Select
from qinglan.data.dataset.thresholds import SelectedScores, findings_of
from qinglan.recipes import get_recipe
from qinglan.recipes.selection import select
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import write_jsonl

RECIPE, CONFIG = get_recipe("query_rewrite"), Select(min_top1_score=0.6)


def scored(score: float, original: float = 0.1, answer: str = "鱼油 用量") -> Row:
    found = [Retrieved(ids=("a",), scores=(each,), titles=("",)) for each in (original, score)]
    return row(
        f"问题{score}{original}",
        answer=answer,
        original_retrieved=found[0],
        answer_retrieved=found[1],
    )


def of(rows: list[Row]) -> SelectedScores:
    return SelectedScores(select(rows, RECIPE.grader, CONFIG), RECIPE, CONFIG)


def test_a_threshold_keeps_its_share_of_the_questions():
    found = of([*(scored(n / 100 + 0.005) for n in range(11, 31)), row("").failed("empty_query")])
    assert [found.threshold(share) for share in (0.1, 0.3, 0.6, 1.0)] == [0.29, 0.25, 0.19, 0.11]
    assert found.setting() == "select.min_top1_score=0.25"
    scores, kept = found.findings()
    assert [row.values for row in kept.rows] == [(0.29, 0.1), (0.25, 0.3), (0.19, 0.6)]
    assert scores.rows[1].values == pytest.approx((0.135, 0.205, 0.285))
    assert "try --set select.min_top1_score=0.25" in kept.title.en


@pytest.mark.parametrize(
    ("kept", "least", "few"), [(2, 0, True), (3, 0, False), (3, 0.4, True), (2, 0.1, False)]
)
def test_they_are_shown_where_few_rows_were_selected(profile_of, tmp_path, kept, least, few):
    profile = profile_of(targets={"rows": {"select": (least, 1.0)}} if least else {})
    rows = {"rows": write_jsonl(tmp_path / "rows.jsonl", [scored(0.5)])}
    stages = [
        stage_result("ingest", rows_out=10),
        stage_result("select", rows_out=kept, artifacts=rows),
    ]
    assert len(findings_of(stages, RECIPE, profile)) == 2, "the run ended there"
    assert bool(findings_of([*stages, stage_result("dataset")], RECIPE, profile)) == few


def test_rows_that_another_rule_drops_need_another_setting():
    found = of([scored(0.3, 0.5), scored(0.2, 0.5), scored(0.25), scored(0.4, answer="好的，")])
    assert [found.threshold(share) for share in (0.1, 0.3, 0.6)] == [0.25, 0.25, None]
    assert [row.values for row in found.findings()[1].rows][2] == (None, None)
    assert of([scored(0.7, 0.9)] * 3).setting() == "select.not_worse_than_original=false"
    assert of([scored(0.9)] * 3).setting() is None
    assert of([]).setting() is None
