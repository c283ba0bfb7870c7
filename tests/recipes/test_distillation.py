"""Distilling and validating one row: which models are asked, what is kept, and when it can be done in bulk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel

from qinglan.clients.roles import Clients, key_salt
from qinglan.config import Profile, Tenant
from qinglan.errors import ConfigError, RetrievalError, TeacherError
from qinglan.recipes import get_recipe, query_rewrite
from qinglan.recipes.kinds.distillation import distill_requests, require_teacher_alone, teacher_requests
from qinglan.rows import Retrieved, Row

SUPPORT = Path(__file__).parents[1] / "support"
CAPITALS, JUDGING = (str(SUPPORT / name) for name in ("capitals_recipe.py", "judging_recipe.py"))
CAPITAL = Row(id="1", tenant="t", query="法国的首都", inputs={"hint": "塞纳河"}, source="f:1")
ROW = Row(id="1", tenant="t", query="它咋吃", history="上轮问了虾青素", source="f!A1")
ANSWERED = ROW.model_copy(update={"answer": "虾青素 服用方法"})
REWRITER = query_rewrite.RECIPE
GOOD, BAD = Retrieved(ids=("g", "x"), scores=(0.9, 0.5)), Retrieved(ids=("x", "g"), scores=(0.6, 0.5))
ProfileOf = Callable[..., Profile]


class FakeRag:
    """`BAD` for questions, another answer for rewrites."""

    def __init__(self, rewritten: Retrieved | Exception) -> None:
        self.rewritten = rewritten

    async def retrieve(self, query: str, rewritten_query: str | None = None) -> Retrieved:
        found = BAD if rewritten_query is None else self.rewritten
        if isinstance(found, Exception):
            raise found
        return found


def clients(teacher: str = "", judge: str = '{"score": 4}', rewritten: Any = GOOD) -> Clients:
    return Clients({"teacher": FakeModel(teacher), "judge": FakeModel(judge)}, FakeRag(rewritten))  # type: ignore[arg-type]


async def test_distilling_keeps_what_it_cost():
    asked = clients("“虾青素  服用方法”")
    done = await REWRITER.distill(ROW, asked, Tenant(domain="保健品"))
    assert (done.answer, done.answer_request) == ("虾青素 服用方法", "hash of “虾青素  服用方法”")
    assert (done.answer_cost_usd, done.answer_latency_ms) == (0.5, 12.0)
    assert "保健品" in asked.teacher.asked[0][0]["content"]  # type: ignore[attr-defined]


async def test_an_empty_rewrite_never_becomes_the_question():
    with pytest.raises(TeacherError) as caught:
        await REWRITER.distill(ROW, clients(" ``` "), Tenant())
    assert caught.value.reason == "empty_answer"


async def test_a_weak_models_answer_is_judged_and_the_thoughts_are_kept():
    weak, teacher = FakeModel("里昂"), FakeModel("错误", "首都是巴黎")
    both = Clients({"teacher": teacher, "answerer": weak})  # type: ignore[arg-type]
    done = await get_recipe(JUDGING).distill(CAPITAL, both, Tenant())
    assert (done.answer, done.answer_request) == ("<think>首都是巴黎</think>错误", "hash of 错误")
    assert teacher.asked[0][-1] == {"role": "assistant", "content": "里昂"}


def test_what_is_asked_is_known_by_role(profile_of: ProfileOf):
    profile = profile_of(recipe=JUDGING, answerer={"model": "small", "base_url": "http://weak/v1"})
    asked = distill_requests(profile)(CAPITAL)
    assert {role: request.body["model"] for role, request in asked.items()} == {"answerer": "small", "teacher": "big"}
    assert key_salt(profile, "answerer") != key_salt(profile, "teacher")


async def test_a_row_that_brings_its_answer_asks_no_model(profile_of: ProfileOf):
    own = CAPITAL.model_copy(update={"inputs": CAPITAL.inputs | {"given": " 巴黎 它是首都"}})
    done = await get_recipe(CAPITALS).distill(own, Clients(), Tenant())
    assert (done.answer, done.answer_request, done.answer_cost_usd) == ("巴黎", None, None)
    asked = teacher_requests(profile_of(recipe=CAPITALS))
    assert asked(own) is None and asked(CAPITAL) is not None


def test_only_the_teacher_alone_can_be_asked_in_bulk(profile_of: ProfileOf):
    answerer, by_batch = {"model": "small"}, {"mode": "batch_api"}
    require_teacher_alone(profile_of(recipe=CAPITALS, distill=by_batch))
    require_teacher_alone(profile_of(recipe=JUDGING, answerer=answerer))
    with pytest.raises(ConfigError, match=r"distill\.mode: batch_api .*asks answerer and teacher .*; set it"):
        require_teacher_alone(profile_of(recipe=JUDGING, answerer=answerer, distill=by_batch))


async def test_validating_retrieves_twice_and_asks_the_judge():
    asked = clients()
    done = await REWRITER.validate(ANSWERED, asked, Tenant(), judge=True)
    assert (done.original_retrieved, done.answer_retrieved, done.judge_score) == (BAD, GOOD, 4.0)
    assert asked.judge.asked[0][1]["content"].endswith("当前问题：它咋吃\n改写：虾青素 服用方法")  # type: ignore[attr-defined]
    unjudged = await REWRITER.validate(ANSWERED, asked, Tenant(), judge=False)
    assert (unjudged.judge_score, len(asked.judge.asked)) == (None, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failing", "error", "reason"),
    [
        (clients(judge="great!"), TeacherError, "judge_unreadable"),
        (clients(rewritten=RetrievalError("down", "rag_unavailable")), RetrievalError, "rag_unavailable"),
    ],
)
async def test_a_failed_call_is_no_score(failing: Clients, error: type[TeacherError | RetrievalError], reason: str):
    with pytest.raises(error) as caught:
        await REWRITER.validate(ANSWERED, failing, Tenant(), judge=True)
    assert caught.value.reason == reason
