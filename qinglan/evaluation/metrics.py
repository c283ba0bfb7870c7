"""Values of one row, by metric; absent where there is none: nothing retrieved or graded, no label, not judged.

A recipe declares its metrics (`Recipe.METRICS`). Those of retrieval are defined here, once each: with one gold document
per question recall@k is a share of questions, and the ideal DCG is 1. Those of answers come from the recipe. `quality`
is the judge's score in both.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from qinglan.recipes import Recipe
from qinglan.recipes.kinds.answer.recipe import AnswerRecipe
from qinglan.rows import ArmRow, Row
from qinglan.statistics import ArmScores

QUALITY = "quality"
OfRank = Callable[[int], float]


def recall_at(places: int) -> OfRank:
    """Is the gold document among the first `places`? Rank 0 means that it was not recalled."""
    return lambda rank: float(0 < rank <= places)


def mrr10(rank: int) -> float:
    """1 / rank, 0 beyond the tenth place."""
    return 1 / rank if 0 < rank <= 10 else 0.0


def ndcg10(rank: int) -> float:
    """1 / log2(1 + rank), 0 beyond the tenth place."""
    return 1 / math.log2(1 + rank) if 0 < rank <= 10 else 0.0


BY_RANK: dict[str, OfRank] = {
    "top1": recall_at(1),
    "recall3": recall_at(3),
    "recall10": recall_at(10),
    "mrr10": mrr10,
    "ndcg10": ndcg10,
}
"""What follows from the gold document's rank alone."""


def arm_scores(name: str, arm: Sequence[ArmRow], rows: Iterable[Row], recipe: Recipe) -> ArmScores:
    """Each of the recipe's metrics by row id."""
    by_id = {row.id: row for row in rows}
    found = {entry.row_id: values_of(entry, by_id[entry.row_id], recipe) for entry in arm}
    return ArmScores(
        arm=name,
        scores={metric.name: {row: found[row].get(metric.name) for row in found} for metric in recipe.METRICS},
    )


def values_of(entry: ArmRow, row: Row, recipe: Recipe) -> dict[str, float]:
    """One text's values by metric."""
    if not entry.measured:
        return {}
    judged = {} if entry.judge_score is None else {QUALITY: entry.judge_score}
    if isinstance(recipe, AnswerRecipe):
        return recipe.metric_values(row, entry.text or "", entry.parts or {}) | judged
    return _of_retrieval(entry, row) | judged


def _of_retrieval(entry: ArmRow, row: Row) -> dict[str, float]:
    if entry.retrieved is None:
        return {}
    found = {"mean_top1_score": entry.retrieved.top1_score}
    if row.gold_id:
        rank = entry.retrieved.rank(row.gold_id)
        found |= {metric: value(rank) for metric, value in BY_RANK.items()}
    return found


def groups_of(rows: Iterable[Row]) -> dict[str, str]:
    """What the bootstrap draws."""
    return {row.id: row.unit for row in rows}
