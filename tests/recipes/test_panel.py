"""The blind panel: all texts at once and twice, without names; a failed call judges nobody."""

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest
from fake_model import FakeModel
from fake_service import SIMULATED

from qinglan.clients.roles import Clients
from qinglan.config import Evaluate, Profile
from qinglan.errors import StageError, TeacherError
from qinglan.evaluation.arms import panel_consistency
from qinglan.evaluation.figures import scores_of, summarise
from qinglan.evaluation.measuring import Measured, judge_by_panel
from qinglan.grading.panel import shuffle_texts
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import ArmRow, Retrieved, Row

HIT = Retrieved(ids=("g",), scores=(0.9,))
CONFIG = Evaluate(bootstrap_resamples=200)
PROFILE = Profile.model_validate({"name": "t", "evaluate": CONFIG} | SIMULATED)
WORTH = {"好": 5.0, "中": 3.0, "坏": 1.0}


def favouring_judge(*failing: int) -> FakeModel:
    """A judge that knows what each text is worth, and disfavours the first by half a point.

    Args:
        failing: the numbers of the calls that fail.
    """
    calls = count(1)

    def answer(prompt: str) -> str | Exception:
        if next(calls) in failing:
            return TeacherError("no scores", "judge_unreadable")
        scores = [WORTH[text] for text in texts_in(prompt)]
        scores[0] -= 0.5
        return f'{{"scores": {scores}}}'

    return FakeModel(answer)


def texts_in(prompt: str) -> list[str]:
    return re.findall("改写[0-9]+：(.*)", prompt)


def rows(count: int = 1) -> list[Row]:
    return [
        Row(id=f"{number:03}", tenant="t", query=f"问题{number}", source="f!A1")
        for number in range(count)
    ]


def arm(text: str | None, count: int = 1, **more: Any) -> list[ArmRow]:
    return [
        ArmRow(row_id=f"{number:03}", text=text, retrieved=HIT, **more) for number in range(count)
    ]


async def judged(
    judge: FakeModel, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]
) -> Measured:
    clients = Clients({"judge": judge})  # type: ignore[dict-item]
    return await judge_by_panel(arms, rows, RECIPE.grader.panel, clients, PROFILE)


async def test_every_distinct_text_is_read_in_both_orders_and_scored_by_the_mean():
    judge = favouring_judge()
    arms = {"sft": arm("好"), "base": arm("好"), "rl": arm("中", requests=("t",))}
    scored, _ = await judged(judge, arms, rows())
    assert scored.keys() == arms.keys()
    first, second = map(texts_in, judge.questions)
    assert sorted(first) == ["中", "好"]
    assert second == first[::-1]
    assert scored["base"] == scored["sft"], "the same text is the same score"
    (sft,) = scored["sft"]
    (rl,) = scored["rl"]
    assert (sft.judge_score, sorted(sft.judge_scores)) == (4.75, [4.5, 5.0])
    assert (rl.judge_score, sorted(rl.judge_scores)) == (2.75, [2.5, 3.0])
    assert panel_consistency(scored["rl"]) == 0.5
    assert rl.requests[0] == "t"
    assert len(rl.requests) == 3


async def test_one_text_alone_is_read_once_and_none_is_not():
    judge = favouring_judge()
    arms = {"teacher": arm("好"), "rl": arm("好"), "base": arm(None, reason="x")}
    scored, _ = await judged(judge, arms, rows())
    assert len(judge.asked) == 1
    (rl,) = scored["rl"]
    assert (rl.judge_score, rl.judge_scores) == (4.5, (4.5,))
    assert scored["base"][0].judge_score is None
    assert panel_consistency(scored["rl"]) is None


@pytest.mark.parametrize(("failing", "score"), [((), 0.0), ((1,), None)])
async def test_an_empty_text_scores_lowest_unless_the_question_is_unjudged(
    failing: Sequence[int], score: float | None
):
    arms = {"rl": arm(None, 40, reason="empty_answer"), "sft": arm("好", 40)}
    judge = favouring_judge(*failing)
    scored, _ = await judged(judge, arms, rows(40))
    assert [entry.judge_score for entry in scored["rl"]] == [score, *[0.0] * 39]
    assert {entry.reason for entry in scored["rl"]} == {"empty_answer"}
    assert len(judge.asked) == 40


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_failed_pass_leaves_the_question_unjudged_for_all(failing: int):
    arms = {"teacher": arm("中", 40, judge_score=4.0), "rl": arm("好", 40)}
    # The fake answers at once, so that the first two calls are the first question's two passes.
    scored, unjudged = await judged(favouring_judge(failing), arms, rows(40))
    assert unjudged == {"judge_unreadable": 1}
    unjudged_ids = [entry.row_id for entry in scored["rl"] if entry.judge_score is None]
    assert len(unjudged_ids) == 1
    assert unjudged_ids == [
        entry.row_id for entry in scored["teacher"] if entry.judge_score is None
    ]
    summary = summarise(scored["teacher"], rows(40), CONFIG, RECIPE)
    assert (summary.failed, summary.mean("quality")) == (0, pytest.approx(2.75))


async def test_too_many_failures_are_no_evaluation_and_the_error_says_what_to_change():
    message = (
        r"3 of 40 questions \(judge_unreadable 3\).* judge\.model or evaluate\.seed must change"
    )
    with pytest.raises(StageError, match=message):
        await judged(
            favouring_judge(1, 2, 3), {"sft": arm("中", 40), "rl": arm("好", 40)}, rows(40)
        )


async def test_a_text_that_was_not_retrieved_with_has_no_quality():
    lost = [ArmRow(row_id="000", text="好", reason="rag_unavailable")]
    scored, _ = await judged(favouring_judge(), {"rl": lost, "sft": arm("中")}, rows())
    assert scores_of(scored["rl"], rows(), RECIPE)["quality"] == {"000": None}


def test_the_order_depends_on_the_row_and_says_nothing_of_the_arms():
    orders = [shuffle_texts(["好", "中", "坏"], str(row), seed=0) for row in range(200)]
    assert shuffle_texts(["坏", "好", "中", "好"], "0", seed=0) == orders[0]
    for text in WORTH:
        first_places = sum(order[0] == text for order in orders)
        assert 40 < first_places < 95, text
    assert [shuffle_texts(["好", "中", "坏"], str(row), seed=1) for row in range(200)] != orders
