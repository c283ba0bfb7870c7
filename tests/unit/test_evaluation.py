"""Arms: a failure is no score, judge and RAG fail apart, comparisons are paired."""

from typing import Any

import pytest

from qinglan.chat import Answer
from qinglan.clients import Clients
from qinglan.config import Evaluate, Tenant
from qinglan.errors import RetrievalError, StageError, TeacherError
from qinglan.evaluation import (
    ArmRow,
    arm_scores,
    compare_arms,
    examples,
    groups_of,
    original_rows,
    retrieve_and_judge,
    shared_between,
    summarise,
    teacher_rows,
)
from qinglan.recipes import query_rewrite
from qinglan.rows import Retrieved, Row

CONFIG = Evaluate(bootstrap_resamples=200)
HIT, MISS = Retrieved(ids=("g", "x"), scores=(0.9, 0.5)), Retrieved(ids=("x", "g"), scores=(0.6, 0.5))


def row(number: int, gold: str | None = "g", **update: Any) -> Row:
    made = Row(id=f"{number:03}", tenant="t", query=f"问题{number}", gold_id=gold, source="f!A1", split="test")
    return made.model_copy(update=update)


ROWS = [row(n) for n in range(40)]


def arm(*found: Retrieved | None, **update: Any) -> list[ArmRow]:
    return [ArmRow(row_id=f"{n:03}", text="改写", retrieved=r, **update) for n, r in enumerate(found)]


class Judge:
    def __init__(self, failing: int = 0) -> None:
        self.failing, self.asked = failing, 0

    async def ask(self, messages: Any, parse: Any, schema: Any) -> Answer[float]:
        self.asked += 1
        if self.asked <= self.failing:
            raise TeacherError("no score", "judge_unreadable")
        return Answer(4.0, "h", False, 0.1, 1.0)


class Library:
    def __init__(self, failing: int = 0) -> None:
        self.failing, self.asked = failing, []

    async def retrieve(self, query: str, rewritten_query: str | None = None) -> Retrieved:
        self.asked.append((query, rewritten_query))
        if len(self.asked) <= self.failing:
            raise RetrievalError("down", "rag_unavailable", transient=True)
        return HIT


def clients(judge: Judge, rag: Library) -> Clients:
    return Clients(Judge(), judge, rag)  # type: ignore[arg-type]


def test_teacher_and_original_from_the_data_stages():
    rows = [
        row(0, rewrite="改写", rewrite_retrieved=HIT, original_retrieved=MISS, judge_score=4.5, rewrite_cost_usd=0.1),
        row(1, status="failed", reason="teacher_refused"),
    ]
    taught, typed = teacher_rows(rows), original_rows(rows)
    assert (taught[0].text, taught[0].reason, taught[0].judge_score, taught[0].cost_usd) == ("改写", None, 4.5, 0.1)
    assert (taught[1].text, taught[1].reason, taught[1].retrieved) == (None, "teacher_refused", None)
    assert (typed[0].text, typed[0].retrieved, typed[0].cost_usd) == ("问题0", MISS, 0.0)


async def test_only_what_is_missing_is_asked_for():
    judge, rag = Judge(), Library()
    known = [ArmRow(row_id="000", text="改写", retrieved=MISS, judge_score=2.0), ArmRow(row_id="001", text="新")]
    done = await retrieve_and_judge(known, ROWS, query_rewrite, clients(judge, rag), Tenant())
    assert (done[0].retrieved, done[0].judge_score) == (MISS, 2.0)
    assert (done[1].retrieved, done[1].judge_score) == (HIT, 4.0)
    assert (judge.asked, rag.asked) == (1, [("问题1", "新")])


async def test_an_arm_without_a_text_keeps_its_reason():
    nothing = [ArmRow(row_id="000", reason="empty_rewrite")]
    assert await retrieve_and_judge(nothing, ROWS, query_rewrite, clients(Judge(), Library()), Tenant()) == nothing


async def test_a_failed_judge_takes_nothing_from_retrieval():
    done = await retrieve_and_judge(
        arm(*[None] * 40), ROWS, query_rewrite, clients(Judge(failing=1), Library()), Tenant()
    )
    assert (done[0].retrieved, done[0].judge_score, done[0].reason) == (HIT, None, "judge_unreadable")
    assert summarise(done, ROWS, CONFIG).failed == 0


async def test_a_failed_retrieval_is_no_score():
    done = await retrieve_and_judge(
        arm(*[None] * 40), ROWS, query_rewrite, clients(Judge(), Library(failing=2)), Tenant()
    )
    summary = summarise(done, ROWS, CONFIG)
    assert (summary.n, summary.failed, summary.top1) == (40, 2, 1.0)
    assert done[0].reason == "rag_unavailable"


@pytest.mark.parametrize(("judge", "rag"), [(3, 0), (0, 3)])
async def test_too_many_failures_are_no_evaluation(judge: int, rag: int):
    with pytest.raises(StageError, match="calls failed for 3 of 40 questions"):
        await retrieve_and_judge(arm(*[None] * 40), ROWS, query_rewrite, clients(Judge(judge), Library(rag)), Tenant())


def test_scores_of_one_arm():
    scores = arm_scores("a", arm(HIT, MISS, None, Retrieved()), ROWS).scores
    assert list(scores["top1"].values()) == [1.0, 0.0, None, 0.0]
    assert list(scores["mrr10"].values()) == [1.0, 0.5, None, 0.0]
    assert list(scores["mean_top1_score"].values()) == [0.9, 0.6, None, 0.0]


def test_unlabelled_rows_have_no_top1():
    summary = summarise(arm(HIT), [row(0, gold=None)], CONFIG)
    assert (summary.top1, summary.mrr10, summary.mean_top1_score) == (None, None, 0.9)


def test_cost_and_latency_where_measured():
    entries = [*arm(HIT, HIT, cost_usd=0.002), ArmRow(row_id="002", text="x", retrieved=HIT, latency_ms=10.0)]
    summary = summarise(entries, ROWS, CONFIG)
    assert (summary.cost_per_1000_usd, summary.latency_p50_ms) == (2.0, 10.0)
    assert summarise(arm(HIT), ROWS, CONFIG).cost_per_1000_usd is None


def test_comparisons_are_paired():
    arms = {"rl": arm(*[HIT] * 20, *[None] * 20), "teacher": arm(*[MISS] * 40)}
    found = {c.metric: c for c in compare_arms(arms, ROWS, CONFIG)}  # type: ignore[arg-type]
    assert found["top1"].n == 20
    assert set(found) == {"top1", "mrr10", "mean_top1_score"}


def test_groups():
    assert groups_of([row(0), row(1), row(2, gold=None)]) == {"000": "g", "001": "g", "002": "002"}


def test_examples_spread_over_groups():
    rows = [row(n, gold=f"g{n % 5}") for n in range(20)]
    chosen = examples({"rl": arm(*[HIT] * 20)}, rows, count=3)  # type: ignore[arg-type]
    assert len({example.gold_id for example in chosen}) == len(chosen) == 3
    assert chosen[0].arms["rl"].retrieved.ids == ("g", "x")


def test_an_example_names_its_gold_document_where_an_arm_found_it():
    titled = HIT.model_copy(update={"ids": ("x", "g"), "titles": ("别的", "标准")})
    (named,) = examples({"teacher": arm(MISS), "rl": arm(titled)}, [row(0)])  # type: ignore[arg-type]
    (unnamed,) = examples({"rl": arm(titled)}, [row(0, gold="h")])  # type: ignore[arg-type]
    assert (named.gold_title, unnamed.gold_title) == ("标准", None)


def test_overlap_of_train_and_test():
    shared = {s.what: (s.in_train, s.test) for s in shared_between([row(0), row(1)], [row(1), row(2, gold="h")])}
    assert shared["row ids"] == (1, 2)
    assert shared["gold documents"] == (1, 2)
