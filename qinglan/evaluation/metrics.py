"""Values of one row, by metric; absent where there is none: nothing retrieved or graded, no label, not judged.

A recipe declares its metrics (`Recipe.METRICS`) and computes them (`Recipe.measured_values`), all but `quality`, which
is the judge's score.
"""

from collections.abc import Iterable, Sequence

from qinglan.recipes import QUALITY, Recipe
from qinglan.rows import ArmRow, Row
from qinglan.statistics import ArmScores


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
    return recipe.measured_values(entry, row) | judged


def groups_of(rows: Iterable[Row]) -> dict[str, str]:
    """What the bootstrap draws."""
    return {row.id: row.unit for row in rows}
