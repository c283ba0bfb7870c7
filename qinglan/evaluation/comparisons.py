"""Which arms are compared with which, and on which metrics."""

from collections.abc import Collection, Mapping, Sequence

from qinglan.config import Evaluate
from qinglan.evaluation.metrics import arm_scores, groups_of
from qinglan.recipes import Metric, Recipe
from qinglan.rows import ArmName, ArmRow, Row
from qinglan.statistics import ArmScores, Comparison, compare, holm_corrected
from qinglan.text import ARMS

PAIRS: tuple[tuple[ArmName, ArmName], ...] = (
    ("rl", "teacher"),
    ("sft", "teacher"),
    ("rl", "sft"),
    ("teacher", "original"),
    ("sft", "base"),
    ("rl", "champion"),
    ("sft", "champion"),
    ("champion", "teacher"),
)


def pairs_of(arms: Collection[ArmName]) -> list[tuple[ArmName, ArmName]]:
    """Those of the pairs whose arms are there, and for each further teacher what it gains and what RL gains on it."""
    others = [name for name in arms if name not in ARMS]
    pairs = (*PAIRS, *((other, "original") for other in others), *(("rl", other) for other in others))
    return [(a, b) for a, b in pairs if a in arms and b in arms]


def compare_arms(
    arms: Mapping[ArmName, Sequence[ArmRow]],
    rows: Sequence[Row],
    config: Evaluate,
    recipe: Recipe,
) -> list[Comparison]:
    """All pairs on every metric that has values, with p-values corrected for all comparisons on the same metric."""
    scores, groups = {name: arm_scores(name, arm, rows, recipe) for name, arm in arms.items()}, groups_of(rows)
    found = [
        compared(scores[a], scores[b], metric, groups, config)
        for a, b in pairs_of(arms)
        for metric in recipe.METRICS
        if metric.compared
    ]
    return holm_corrected([comparison for comparison in found if comparison.n])


def compared(a: ArmScores, b: ArmScores, metric: Metric, groups: Mapping[str, str], config: Evaluate) -> Comparison:
    resamples = config.bootstrap_resamples
    return compare(a, b, metric.name, groups, resamples, config.seed, proportion=metric.proportion)
