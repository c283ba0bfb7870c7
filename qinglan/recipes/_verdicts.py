"""Recipes whose student judges: what RL asks of the recipe where such a student serves as its judge.

A passage that a text found is compared with a reference: the passage that the teacher's rewrite found. It is the only
reference that every question has without a label; where a label says that it is the wrong one, there is none.
"""

from typing import TYPE_CHECKING, cast

from qinglan.errors import ConfigError
from qinglan.recipes import get_recipe
from qinglan.rows import Retrieved

if TYPE_CHECKING:
    from qinglan.recipes.answer_judge import AnswerJudge

BEST = 5.0
"""What a text is worth that is the reference itself; the judge is not asked."""
RIGHT_FROM = 3.0
"""A right main verdict is worth this at least."""


def verdict_recipe(name: str) -> "AnswerJudge":
    recipe = get_recipe(name)
    if not hasattr(recipe, "verdict_messages"):
        raise ConfigError(f"recipe `{name}`: its student gives no verdicts; a judge's recipe is answer_judge")
    return cast("AnswerJudge", recipe)


def reference_of(found: Retrieved, gold_id: str | None, *, use_labels: bool) -> str:
    """The best passage of what the teacher's rewrite found; empty where there is none or a label refuses it."""
    refused = use_labels and bool(gold_id) and found.rank(gold_id) != 1
    return "" if refused else found.first_passage
