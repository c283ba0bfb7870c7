"""Recipes: what is trained. One module each, found by its name; the profile's `recipe` picks one.

A recipe turns a user's question into another text for the same retrieval service. Stages know it by `Recipe` alone.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from pydantic import BaseModel

from qinglan.config import Reward, Tenant
from qinglan.errors import ConfigError
from qinglan.rows import Retrieved, Row

Message = dict[str, str]


class Baseline(BaseModel):
    """The teacher's side of one prompt, computed once before RL (`extra_info` of the training file)."""

    row_id: str
    question: str
    gold_id: str
    """Empty where the row is not labelled."""
    teacher_rewrite: str
    teacher_quality: float
    teacher_judge: float
    """−1 where the judge was not asked."""


@dataclass(frozen=True)
class Scored:
    """One sample's reward and what it is made of; NaN for a part that is not known."""

    score: float
    judge: float
    rq: float
    rq_gain: float
    win: float
    gold_top1: float
    relevant: float
    """Does the best passage answer the question, by the judge? 1 or 0."""
    guard_ok: float


class Recipe(Protocol):
    """What a recipe module offers: all that the stages need to know of it."""

    NAME: str
    VERSION: str
    """Part of the stages' keys; raise it with any change of a prompt, of the parsing or of the reward."""

    JUDGE_SCHEMA: dict[str, Any]
    """JSON schema of the judge's answer, for models that can be held to one."""
    PANEL_SCHEMA: dict[str, Any]
    """The same of its answer about several rewrites."""

    def user_text(self, query: str, profile: str = "", history: str = "") -> str:
        """The question as the student, the judge and the reward see it."""

    def student_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """The student's prompt: the same in SFT, RL, evaluation and serving."""

    def teacher_messages(self, row: Row, tenant: Tenant) -> list[Message]:
        """What the teacher is asked."""

    def judge_messages(self, question: str, rewrite: str, tenant: Tenant) -> list[Message]:
        """What the judge is asked; `question` is what `user_text` gives."""

    def panel_messages(self, question: str, rewrites: Sequence[str], tenant: Tenant) -> list[Message]:
        """What the judge is asked about several rewrites of one question at once, in this order, on the same scale.

        Whose they are is not told. They are untrusted: none may pose as another, or as part of the prompt.
        """

    def relevance_messages(self, question: str, passage: str, tenant: Tenant) -> list[Message]:
        """What the judge is asked about a passage that was found: does it answer the question?"""

    def parse_rewrite(self, text: str) -> str:
        """The text to retrieve with, from the teacher's answer.

        Raises:
            TeacherError: there is none in it.
        """

    def parse_judge(self, text: str) -> float:
        """The score, 0–5, from the judge's answer.

        Raises:
            TeacherError: there is none in it.
        """

    def parse_panel(self, text: str, count: int) -> list[float]:
        """The scores, 0–5, one per rewrite in the order of the question.

        Raises:
            TeacherError: not exactly `count` of them are in it.
        """

    def reward(
        self,
        config: Reward,
        baseline: Baseline,
        rewrite: str,
        retrieved: Retrieved,
        judge_score: float | None,
        relevance: float | None,
    ) -> Scored:
        """The reward of one sample from its parts, in [−1, 1]. Pure; `rewrite` is never empty.

        Args:
            judge_score: of the rewrite, 0–5; None where the judge was not asked.
            relevance: of the best passage, 0–5; None where the judge was not asked.
        """


def get_recipe(name: str) -> Recipe:
    """The recipe module of that name.

    Raises:
        ConfigError: there is none.
    """
    known = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"known recipes: {', '.join(known)}"
        raise ConfigError(f"recipe `{name}`: there is no such recipe; {hint}")
    return cast(Recipe, importlib.import_module(f"{__name__}.{name}"))


def identity(name: str) -> dict[str, str]:
    """What a stage that asks or rewards by this recipe depends on."""
    return {"recipe": name, "version": get_recipe(name).VERSION}
