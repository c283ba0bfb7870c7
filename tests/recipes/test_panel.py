"""The blind panel: all texts at once and twice, order without names, and a failed call leaves
nobody judged."""

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
    """Knows what each text is worth, and favours the first by half a point; some of its calls
    fail."""
    calls = count(1)

    def answer(prompt: str) -> str | Exception:
        if next(calls) in failing:
            return TeacherError("no scores", "judge_unreadable")
        first, *others = (WORTH[text] for text in texts_in(prompt))
        return f'{{"scores": {[first - 0.5, *others]}}}'

    return FakeModel(answer)


def texts_in(prompt: str) -> list[str]:
    return re.findall("改写[0-9]+：(.*)", prompt)


def rows(count: int = 1) -> list[Row]:
    return [Row(id=f"{n:03}", tenant="t", query=f"问题{n}", source="f!A1") for n in range(count)]


def arm(text: str | None, count: int = 1, **more: Any) -> list[ArmRow]:
    return [ArmRow(row_id=f"{n:03}", text=text, retrieved=HIT, **more) for n in range(count)]


async def judged(
    judge: FakeModel, arms: Mapping[str, Sequence[ArmRow]], rows: Sequence[Row]
) -> Measured:
    return await judge_by_panel(arms, rows, RECIPE.grader.panel, Clients({"judge": judge}), PROFILE)  # type: ignore[dict-item]


async def test_every_distinct_text_is_read_in_both_orders_and_scored_by_the_mean():
    judge = favouring_judge()
    done, _ = await judged(
        judge, {"sft": arm("好"), "base": arm("好"), "rl": arm("中", requests=("t",))}, rows()
    )
    first, second = map(texts_in, judge.questions)
    assert sorted(first) == ["中", "好"] and second == first[::-1]
    assert done.pop("base") == done["sft"], "the same text is the same score"
    assert {
        name: (entries[0].judge_score, sorted(entries[0].judge_scores))
        for name, entries in done.items()
    } == {
        "sft": (4.75, [4.5, 5.0]),
        "rl": (2.75, [2.5, 3.0]),
    }
    assert panel_consistency(done["rl"]) == 0.5
    assert done["rl"][0].requests[0] == "t" and len(done["rl"][0].requests) == 3


async def test_one_text_alone_is_read_once_and_none_is_not():
    judge = favouring_judge()
    done, _ = await judged(
        judge, {"teacher": arm("好"), "rl": arm("好"), "base": arm(None, reason="x")}, rows()
    )
    assert (len(judge.asked), done["rl"][0].judge_score, done["rl"][0].judge_scores) == (
        1,
        4.5,
        (4.5,),
    )
    assert done["base"][0].judge_score is None
    assert panel_consistency(done["rl"]) is None


@pytest.mark.parametrize(("failing", "score"), [((), 0.0), ((1,), None)])
async def test_an_empty_text_scores_lowest_unless_the_question_is_unjudged(
    failing: Sequence[int], score: float | None
):
    arms, judge = (
        {"rl": arm(None, 40, reason="empty_answer"), "sft": arm("好", 40)},
        favouring_judge(*failing),
    )
    done, _ = await judged(judge, arms, rows(40))
    assert [entry.judge_score for entry in done["rl"]] == [score, *[0.0] * 39]
    assert {entry.reason for entry in done["rl"]} == {"empty_answer"} and len(judge.asked) == 40


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_failed_pass_leaves_the_question_unjudged_for_all(failing: int):
    arms = {"teacher": arm("中", 40, judge_score=4.0), "rl": arm("好", 40)}
    # The fake answers at once, so that the first two calls are the first question's two passes.
    done, unjudged = await judged(favouring_judge(failing), arms, rows(40))
    assert unjudged == {"judge_unreadable": 1}
    lost = [{e.row_id for e in entries if e.judge_score is None} for entries in done.values()]
    assert lost[0] == lost[1] and len(lost[0]) == 1
    summary = summarise(done["teacher"], rows(40), CONFIG, RECIPE)
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
    done, _ = await judged(favouring_judge(), {"rl": lost, "sft": arm("中")}, rows())
    assert scores_of(done["rl"], rows(), RECIPE)["quality"] == {"000": None}


def test_the_order_depends_on_the_row_and_says_nothing_of_the_arms():
    orders = [shuffle_texts(["好", "中", "坏"], str(n), seed=0) for n in range(200)]
    assert shuffle_texts(["坏", "好", "中", "好"], "0", seed=0) == orders[0]
    places = [sum(order[0] == text for order in orders) for text in WORTH]
    assert all(40 < count < 95 for count in places)
    assert [shuffle_texts(["好", "中", "坏"], str(n), seed=1) for n in range(200)] != orders
