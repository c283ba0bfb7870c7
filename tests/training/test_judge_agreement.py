"""The local judge's agreement with the judge: how it is measured, on which rows, and when it is too
low."""

import asyncio
import re
from typing import Any

import pytest
from fake_model import FakeModel, FakeRag
from fixture_types import ProfileOf

from qinglan.config import LocalJudge, Profile
from qinglan.errors import RetrievalError, StageError, TeacherError
from qinglan.recipes.passage_judge import verdict_recipe
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import Retrieved, Row
from qinglan.training import judge_agreement
from qinglan.training.judge_agreement import (
    JudgeAgreement,
    JudgedPassage,
    measure_agreement,
    require_agreement,
)

GOOD, BAD = "虾青素有，正确", "虾青素无，错误"
ENOUGH = JudgeAgreement(
    pairs=100, unreadable=2, failed=0, share=0.9, kappa=0.8, kappa_low=0.6, kappa_high=0.95
)


def row(number: int, answer: str = "虾青素 服用方法", **fields: Any) -> Row:
    values = {"tenant": "t", "query": "虾青素咋吃", "source": "x", "split": "dev"} | fields
    return Row(id=f"r{number:02}", answer=answer, **values)


def rag(**more_passages: str) -> FakeRag:
    """Finds by the text: the question itself finds 丙."""
    passages = {"虾青素 服用方法": "甲", "服用方法": "乙"} | more_passages

    def find(_: str, text: str | None) -> Retrieved | Exception:
        passage = passages.get(text or "", "丙")
        if passage == "down":
            return RetrievalError("rag", "rag_unavailable", transient=True)
        return Retrieved(ids=("g",), scores=(0.9,), first_passage=passage)

    return FakeRag(find)


def chat(**answers: str) -> FakeModel:
    """Answers by the last words of what it is asked."""

    def answer(question: str) -> str | Exception:
        text = next(answer for end, answer in answers.items() if question.endswith(end))
        if text == "down":
            return TeacherError("judge", "teacher_timeout", transient=True)
        return text

    return FakeModel(answer)


def compare(
    profile: Profile, fake_rag: FakeRag, local: FakeModel, judge: FakeModel, *rows: Row
) -> list[JudgedPassage]:
    verdicts = verdict_recipe("passage_judge")
    judges = judge_agreement.JudgeComparison(
        profile,
        RECIPE,
        RECIPE.grader,
        verdicts,
        local,
        judge,
        fake_rag,  # type: ignore[arg-type]
    )
    return asyncio.run(judges.compare(rows))


def test_both_are_asked_about_every_passage_the_teachers_own_too(profile_of: ProfileOf):
    local = chat(甲=BAD, 乙=GOOD, 丙=BAD)
    judge = chat(甲='{"score": 2}', 乙='{"score": 4}', 丙='{"score": 1}')
    pairs = compare(profile_of(), rag(), local, judge, row(1))
    assert [(pair.passage, pair.local, pair.judge) for pair in pairs] == [
        ("甲", 0, 2),
        ("丙", 0, 1),
        ("乙", 5, 4),
    ]
    measured = measure_agreement(pairs, 3.0)
    assert (measured.pairs, measured.share, measured.kappa) == (3, 1, 1)


def test_a_failed_call_is_no_opinion_and_an_unreadable_verdict_is_a_wrong_one(
    profile_of: ProfileOf,
):
    local = chat(甲=GOOD, 乙="随便", 丙="down")
    judge = chat(甲='{"score": 5}', 乙='{"score": 4}', 丙='{"score": 1}')
    pairs = compare(profile_of(), rag(), local, judge, row(1))
    measured = measure_agreement(pairs, 3.0)
    assert (measured.pairs, measured.failed, measured.unreadable) == (2, 1, 1)
    assert measured.share == 0.5
    assert judge_agreement.count_retryable(pairs) == 1
    judge_agreement.require_answers(pairs, 0.05)
    with pytest.raises(StageError, match=r"calls failed for 1 of 3 passages \(teacher_timeout 1\)"):
        judge_agreement.require_answers(pairs, 0)


def test_a_question_that_the_rag_fails_counts_as_failed(profile_of: ProfileOf):
    pairs = compare(profile_of(), rag(服用方法="down"), chat(), chat(), row(1))
    reasons = [pair.failed for pair in pairs]
    assert reasons == ["rag_unavailable"] * 4, "as many as it would have had"
    assert measure_agreement(pairs, 3.0).pairs == 0


def test_dev_rows_are_drawn_by_their_ids():
    rows = [row(3), row(1), row(2, split="train"), row(4, status="failed"), row(0, answer="")]
    assert [chosen.id for chosen in judge_agreement.choose_rows(rows, 5)] == ["r01", "r03"]
    assert [chosen.id for chosen in judge_agreement.choose_rows(rows, 1)] == ["r01"]


def pair(number: int, local: float | None, judge: float) -> JudgedPassage:
    return JudgedPassage(
        row_id=f"{number}", group=f"{number}", question="问", passage="乙", local=local, judge=judge
    )


def test_a_judge_that_always_says_the_same_agrees_by_chance_alone():
    judge_scores = [0.0, 5.0, 5.0] * 10
    pairs = [pair(number, 0.0, score) for number, score in enumerate(judge_scores)]
    measured = measure_agreement(pairs, 3.0)
    assert measured.share == pytest.approx(1 / 3)
    assert measured.kappa == pytest.approx(0)
    assert measured.right == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"kappa_low": 0.59},
            r"κ 0\.80 \(95% 0\.59 to 0\.95\) on 100 .* "
            r"begin at judge\.local\.min_agreement = 0\.6 ",
        ),
        (
            {"kappa_low": 0.59},
            r"ask about more dev questions \(judge\.local\.agreement_rows = 200\)",
        ),
        ({"kappa": 0.3, "kappa_low": 0.1}, "train the local judge on passages"),
        ({"kappa_low": None, "kappa_high": None}, r"κ 0\.80 \(no interval: "),
        ({"kappa": None, "kappa_low": None}, "both said the same "),
        ({"pairs": 0, "share": None, "kappa": None}, "no pair "),
        (
            {"pairs": 99, "kappa": 0.3},
            r"on 99 .*fewer than judge\.local\.min_agreement_pairs = 100; ",
        ),
    ],
)
def test_agreement_that_is_too_low_or_hardly_known_stops_the_run(
    changes: dict[str, Any], expected: str
):
    measured = ENOUGH.model_copy(update=changes)
    settings = LocalJudge(model="m")
    with pytest.raises(StageError, match=expected + r".*leave judge\.local out"):
        require_agreement(measured, settings, pytest.fail)
    warnings = list[str]()
    goes_on = settings.model_copy(update={"when_below": "go_on"})
    require_agreement(measured, goes_on, warnings.append)
    assert re.search(expected, warnings[0])


@pytest.mark.parametrize("settings", [{}, {"min_agreement": 0.7, "min_agreement_pairs": 99}])
def test_enough_pairs_whose_interval_lies_above_the_limit_go_on(settings: dict[str, Any]):
    enough = ENOUGH.model_copy(update={"kappa_low": settings.get("min_agreement", 0.6)})
    require_agreement(enough, LocalJudge(model="m", **settings), pytest.fail)


def test_the_report_has_the_table():
    pairs = [pair(number, 5.0 * (number % 2), 4.0 * (number % 2)) for number in range(8)]
    measured = measure_agreement(pairs, 3.0)
    table = judge_agreement.agreement_finding(measured)
    assert [len(line.values) for line in table.rows] == [len(table.columns)] * len(table.rows)
    assert "8" in table.rows[0].label.en
    assert judge_agreement.describe_agreement(measured).startswith("agreement 100%, κ 1.00")
