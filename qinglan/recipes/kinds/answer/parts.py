"""The parts and metrics of an answer by name, so that every sample of a run has the same."""

import math
from collections.abc import Mapping

from qinglan.config import Reward
from qinglan.errors import ConfigError
from qinglan.recipes.kinds.answer.recipe import AnswerRecipe
from qinglan.rows import Row

JUDGE = "judge"
"""The part of a reward that the judge gives: its score / 5. Beside the parts its score is logged as it is, 0–5."""
QUALITY = "quality"
"""The metric that is the judge's score."""
_TAKEN = frozenset(
    {
        *("score", "group", "invalid", "samples", "alone", "steps", "reward", "entropy", "clip_fraction", "value_loss"),
        *("judge_asked", "judge_cached", "judge_cost_usd", "rag_calls", "rag_cached", "latency_ms"),
    }
)
"""Figures of a sample or a step that are called so already."""


def part_names(recipe: AnswerRecipe) -> tuple[str, ...]:
    """Those that rules give.

    Raises:
        ConfigError: one is called as a figure of the training itself.
    """
    names = tuple(name for name in recipe.WEIGHTS if name != JUDGE)
    if taken := sorted(_TAKEN & {*names, *metric_names(recipe)}):
        raise ConfigError(f"recipe `{recipe.NAME}`: training has figures called {', '.join(taken)}; rename the part")
    return names


def metric_names(recipe: AnswerRecipe) -> tuple[str, ...]:
    """Those that follow from the parts."""
    return tuple(metric.name for metric in recipe.METRICS if metric.name != QUALITY)


def grade(recipe: AnswerRecipe, row: Row, text: str) -> dict[str, float]:
    """The text's parts by rule.

    Raises:
        ConfigError: the recipe's rules gave something else than they declare.
    """
    parts = recipe.parts(row, text)
    for name, value in parts.items():
        if name not in recipe.WEIGHTS or name == JUDGE:
            raise ConfigError(f"recipe `{recipe.NAME}`: parts() gave `{name}`, which WEIGHTS does not name")
        if not 0 <= value <= 1:
            raise ConfigError(f"recipe `{recipe.NAME}`: parts() gave {name} = {value}, which is not from 0 to 1")
    return parts


def weights(recipe: AnswerRecipe, config: Reward) -> dict[str, float]:
    """Of the reward's parts, the profile's before the recipe's."""
    return recipe.WEIGHTS | config.part_weights


def rewarded(recipe: AnswerRecipe, config: Reward, parts: Mapping[str, float], judge: float | None) -> float:
    """The reward, in [−1, 1].

    Raises:
        ConfigError: it has none, as no part that counts is known.
    """
    known = dict(parts) if judge is None else {**parts, JUDGE: judge / 5}
    score = recipe.reward(config, known)
    if math.isnan(score):
        raise ConfigError(
            f"recipe `{recipe.NAME}`: no part with a weight is known for this row (known: {', '.join(known) or 'none'})"
        )
    return score
