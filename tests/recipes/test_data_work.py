"""Distilling and validating one row."""

from typing import Any

import pytest

from qinglan.clients.chat import Answer
from qinglan.clients.roles import Clients
from qinglan.config import Tenant
from qinglan.errors import RetrievalError, TeacherError
from qinglan.recipes import query_rewrite
from qinglan.rows import Retrieved, Row

GOOD, BAD = Retrieved(ids=("g", "x"), scores=(0.9, 0.5)), Retrieved(ids=("x", "g"), scores=(0.6, 0.5))
REWRITER = query_rewrite.RECIPE
ROW = Row(id="1", tenant="t", query="它咋吃", history="上轮问了虾青素", source="f!A1")


class SimulatedModel:
    """Stands in for a chat client: says one thing, remembers what it was asked."""

    def __init__(self, text: str) -> None:
        self.text, self.asked = text, []

    async def ask(self, messages: Any, parse: Any, schema: Any = None) -> Answer[Any]:
        self.asked.append(messages)
        return Answer(parse(self.text), "hash", False, 0.5, 12.0)


class Library:
    """Stands in for the RAG: one answer for questions, one for rewrites."""

    def __init__(self, original: Retrieved, rewritten: Retrieved | Exception) -> None:
        self.original, self.rewritten = original, rewritten

    async def retrieve(self, query: str, rewritten_query: str | None = None) -> Retrieved:
        found = self.original if rewritten_query is None else self.rewritten
        if isinstance(found, Exception):
            raise found
        return found


def clients(teacher: str = "", judge: str = '{"score": 4}', rewritten: Any = GOOD) -> Clients:
    return Clients(SimulatedModel(teacher), SimulatedModel(judge), Library(BAD, rewritten))  # type: ignore[arg-type]


async def test_distilling_keeps_what_it_cost():
    teacher = clients("“虾青素  服用方法”")
    done = await REWRITER.distill(ROW, teacher, Tenant(domain="保健品"))
    assert (done.answer, done.answer_request) == ("虾青素 服用方法", "hash")
    assert (done.answer_cost_usd, done.answer_latency_ms) == (0.5, 12.0)
    assert "保健品" in teacher.teacher.asked[0][0]["content"]


async def test_an_empty_rewrite_never_becomes_the_question():
    with pytest.raises(TeacherError) as caught:
        await REWRITER.distill(ROW, clients(" ``` "), Tenant())
    assert caught.value.reason == "empty_answer"


async def test_validating():
    found = clients()
    done = await REWRITER.validate(ROW.model_copy(update={"answer": "虾青素 服用方法"}), found, Tenant(), judge=True)
    assert (done.original_retrieved, done.answer_retrieved, done.judge_score) == (BAD, GOOD, 4.0)
    assert found.judge.asked[0][1]["content"].endswith("当前问题：它咋吃\n改写：虾青素 服用方法")


async def test_the_judge_may_stay_unasked():
    found = clients()
    done = await REWRITER.validate(ROW.model_copy(update={"answer": "x"}), found, Tenant(), judge=False)
    assert (done.judge_score, found.judge.asked) == (None, [])


@pytest.mark.parametrize(
    "text", ["great!", '{"score": 7}', '{"score": NaN}', '{"score": null}', "{}", '{"score": "x"}']
)
async def test_an_unreadable_judgement_is_no_score(text: str):
    with pytest.raises(TeacherError) as caught:
        await REWRITER.validate(ROW.model_copy(update={"answer": "x"}), clients(judge=text), Tenant(), judge=True)
    assert (caught.value.reason, caught.value.transient) == ("judge_unreadable", False)


async def test_a_failed_retrieval_is_no_score():
    gone = RetrievalError("down", "rag_unavailable", transient=True)
    with pytest.raises(RetrievalError):
        await REWRITER.validate(ROW.model_copy(update={"answer": "x"}), clients(rewritten=gone), Tenant(), judge=False)
