"""Advice on the threshold: the rows that another one would keep, and the one setting to change."""

import pytest
from question_rows import row
from run_stages import stage_result

from qinglan.config import Select
from qinglan.data.dataset.thresholds import SelectedScores, findings_of
from qinglan.recipes import get_recipe
from qinglan.recipes.selection import select
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import write_jsonl

RECIPE = get_recipe("query_rewrite")
CONFIG = Select(min_top1_score=0.6)


def scored(score: float, original: float = 0.1, answer: str = "鱼油 用量") -> Row:
    return row(
        f"问题{score}{original}",
        answer=answer,
        original_retrieved=Retrieved(ids=("a",), scores=(original,), titles=("",)),
        answer_retrieved=Retrieved(ids=("a",), scores=(score,), titles=("",)),
    )


def of(rows: list[Row]) -> SelectedScores:
    return SelectedScores(select(rows, RECIPE.grader, CONFIG), RECIPE, CONFIG)


def test_a_threshold_keeps_its_share_of_the_questions():
    rows = [scored(n / 100 + 0.005) for n in range(11, 31)]
    selected = of([*rows, row("").failed("empty_query")])
    thresholds = [selected.threshold(share) for share in (0.1, 0.3, 0.6, 1.0)]
    assert thresholds == [0.29, 0.25, 0.19, 0.11]
    assert selected.setting() == "select.min_top1_score=0.25"
    scores, shares = selected.findings()
    assert [line.values for line in shares.rows] == [(0.29, 0.1), (0.25, 0.3), (0.19, 0.6)]
    assert scores.rows[1].values == pytest.approx((0.135, 0.205, 0.285))
    assert "try --set select.min_top1_score=0.25" in shares.title.en


@pytest.mark.parametrize(
    ("selected", "least", "few"), [(2, 0, True), (3, 0, False), (3, 0.4, True), (2, 0.1, False)]
)
def test_they_are_shown_where_few_rows_were_selected(profile_of, tmp_path, selected, least, few):
    profile = profile_of(targets={"rows": {"select": (least, 1.0)}} if least else {})
    rows = {"rows": write_jsonl(tmp_path / "rows.jsonl", [scored(0.5)])}
    stages = [
        stage_result("ingest", rows_out=10),
        stage_result("select", rows_out=selected, artifacts=rows),
    ]
    assert len(findings_of(stages, RECIPE, profile)) == 2, "the run ended there"
    assert bool(findings_of([*stages, stage_result("dataset")], RECIPE, profile)) == few


def test_rows_that_another_rule_drops_need_another_setting():
    selected = of([scored(0.3, 0.5), scored(0.2, 0.5), scored(0.25), scored(0.4, answer="好的，")])
    assert [selected.threshold(share) for share in (0.1, 0.3, 0.6)] == [0.25, 0.25, None]
    _, shares = selected.findings()
    assert shares.rows[2].values == (None, None)
    assert of([scored(0.7, 0.9)] * 3).setting() == "select.not_worse_than_original=false"
    assert of([scored(0.9)] * 3).setting() is None
    assert of([]).setting() is None


def test_rows_that_were_graded_by_rule_need_no_advice():
    selected = of([row("问题", answer="回答").failed("bad_format")] * 30)
    assert selected.findings() == []
    assert selected.setting() is None
