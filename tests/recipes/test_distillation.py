"""Distillation by the recipe: whom it asks, what it keeps, and when it can be done in bulk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qinglan.clients.chat import Answer
from qinglan.clients.roles import Clients, key_salt
from qinglan.config import Profile, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.recipes.kinds.distillation import distill_requests, require_teacher_alone, teacher_requests
from qinglan.rows import Row

SUPPORT = Path(__file__).parents[1] / "support"
CAPITALS, JUDGING = (str(SUPPORT / name) for name in ("capitals_recipe.py", "judging_recipe.py"))
ROW = Row(id="1", tenant="t", query="法国的首都", inputs={"hint": "塞纳河"}, source="f:1")
OWN = ROW.model_copy(update={"inputs": {"hint": "塞纳河", "given": "巴黎"}})
ProfileOf = Callable[..., Profile]


class SimulatedModel:
    """Stands in for a chat client: says one thing, remembers what it was asked."""

    def __init__(self, text: str, reasoning: str | None = None) -> None:
        self.text, self.reasoning, self.asked = text, reasoning, list[Any]()

    async def ask(self, messages: Any, parse: Any, schema: Any = None) -> Answer[Any]:
        self.asked.append(messages)
        return Answer(parse(self.text), f"hash of {self.text}", False, 0.5, 12.0, self.reasoning)


async def test_a_weak_models_answer_is_judged_and_the_thoughts_are_kept():
    weak, teacher = SimulatedModel("里昂"), SimulatedModel("错误", "首都是巴黎")
    clients = Clients(teacher=teacher, answerer=weak)  # type: ignore[arg-type]
    done = await get_recipe(JUDGING).distill(ROW, clients, Tenant())
    assert (done.answer, done.answer_request) == ("<think>首都是巴黎</think>错误", "hash of 错误")
    assert teacher.asked[0][-1] == {"role": "assistant", "content": "里昂"}


def test_what_is_asked_is_known_by_role(profile_of: ProfileOf):
    profile = profile_of(recipe=JUDGING, answerer={"model": "small", "base_url": "http://weak/v1"})
    asked = distill_requests(profile)(ROW)
    assert {role: request.body["model"] for role, request in asked.items()} == {"answerer": "small", "teacher": "big"}
    assert key_salt(profile, "answerer") != key_salt(profile, "teacher")


def test_nobody_is_asked_about_a_row_that_brings_its_answer(profile_of: ProfileOf):
    asked = teacher_requests(profile_of(recipe=CAPITALS))
    assert asked(OWN) is None
    assert asked(ROW) is not None


def test_only_the_teacher_alone_can_be_asked_in_bulk(profile_of: ProfileOf):
    answerer = {"model": "small"}
    by_batch = {"mode": "batch_api"}
    require_teacher_alone(profile_of(recipe=CAPITALS, distill=by_batch))
    require_teacher_alone(profile_of(recipe=JUDGING, answerer=answerer))
    with pytest.raises(
        ConfigError, match=r"distill\.mode: batch_api .*asks answerer and teacher about each row; set it"
    ):
        require_teacher_alone(profile_of(recipe=JUDGING, answerer=answerer, distill=by_batch))
