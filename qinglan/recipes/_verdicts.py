"""Recipes whose student judges: what a pipeline that is served such a student asks of the recipe.

A passage that a text found is held against a reference: the passage that the teacher's rewrite found. It is the only
one that is known for every question without a label; where a label says that it is the wrong one there is none.
"""

from typing import Protocol, cast, runtime_checkable

from qinglan.config import Tenant
from qinglan.errors import ConfigError
from qinglan.recipes import Message, get_recipe
from qinglan.rows import Retrieved

BEST = 5.0
"""What a text is worth that is the reference itself; nobody need be asked."""
RIGHT_FROM = 3.0
"""A right main verdict is worth this at least."""


@runtime_checkable
class VerdictRecipe(Protocol):
    """A recipe whose student says of a text whether it agrees with a reference."""

    NAME: str

    def verdict_messages(self, question: str, reference: str, candidate: str, tenant: Tenant) -> list[Message]:
        """What the student is asked."""

    def verdict_score(self, text: str) -> float:
        """0–5, from `RIGHT_FROM` where the main verdict is right.

        Raises:
            TeacherError: the answer holds no verdict.
        """


def verdict_recipe(name: str) -> VerdictRecipe:
    """The recipe of that name.

    Raises:
        ConfigError: there is none, or its student gives no verdicts.
    """
    recipe = get_recipe(name)
    if not isinstance(recipe, VerdictRecipe):
        raise ConfigError(f"recipe `{name}`: its student gives no verdicts; a judge's recipe is answer_judge")
    return cast(VerdictRecipe, recipe)


def reference_of(found: Retrieved, gold_id: str | None, *, use_labels: bool) -> str:
    """The best passage of what the teacher's rewrite found; empty where there is none or a label refuses it."""
    refused = use_labels and bool(gold_id) and found.rank(gold_id) != 1
    return "" if refused else found.first_passage
