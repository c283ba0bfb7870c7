"""Recipes whose student judges: what RL asks of the recipe where such a student serves as its judge.

A passage that a text found is compared with a reference: the passage that the teacher's rewrite found. It is the only
reference that every question has without a label; where a label says that it is the wrong one, there is none.
"""

from typing import Protocol, cast

from qinglan.config import Tenant
from qinglan.errors import ConfigError
from qinglan.recipes import Message, get_recipe
from qinglan.rows import Retrieved

BEST = 5.0
"""What a text is worth that is the reference itself; the judge is not asked."""
RIGHT_FROM = 3.0
"""A right main verdict is worth this at least."""


class VerdictRecipe(Protocol):
    """A recipe whose student says of a text whether it agrees with a reference."""

    NAME: str

    def verdict_messages(self, question: str, reference: str, candidate: str, tenant: Tenant) -> list[Message]: ...

    def verdict_score(self, text: str) -> float:
        """0–5, from `RIGHT_FROM` where the main verdict is right; raises TeacherError where the text holds none."""


def verdict_recipe(name: str) -> VerdictRecipe:
    recipe = get_recipe(name)
    if not hasattr(recipe, "verdict_messages"):
        raise ConfigError(f"recipe `{name}`: its student gives no verdicts; a judge's recipe is answer_judge")
    return cast(VerdictRecipe, recipe)


def reference_of(found: Retrieved, gold_id: str | None, *, use_labels: bool) -> str:
    """The best passage of what the teacher's rewrite found; empty where there is none or a label refuses it."""
    refused = use_labels and bool(gold_id) and found.rank(gold_id) != 1
    return "" if refused else found.first_passage
