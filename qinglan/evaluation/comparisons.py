"""Which arms are compared with which, and on what."""

from collections.abc import Collection, Mapping, Sequence

from qinglan.config import Evaluate
from qinglan.evaluation.arms import ArmRow
from qinglan.evaluation.metrics import arm_scores, groups_of
from qinglan.report import ArmName
from qinglan.report_words import ARMS
from qinglan.rows import Row
from qinglan.statistics import Comparison, compare, holm_corrected

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
COMPARED_METRICS = ("top1", "mrr10", "mean_top1_score", "quality")


def pairs_of(arms: Collection[ArmName]) -> list[tuple[ArmName, ArmName]]:
    """Those of the pairs whose arms are there, and for each further teacher what it gains and what RL gains on it."""
    others = [name for name in arms if name not in ARMS]
    pairs = (*PAIRS, *((other, "original") for other in others), *(("rl", other) for other in others))
    return [(a, b) for a, b in pairs if a in arms and b in arms]


def compare_arms(
    arms: Mapping[ArmName, Sequence[ArmRow]],
    rows: Sequence[Row],
    config: Evaluate,
) -> list[Comparison]:
    """All pairs on every metric that has values, with p-values corrected for all comparisons on the same metric."""
    scores, groups = {name: arm_scores(name, arm, rows) for name, arm in arms.items()}, groups_of(rows)
    found = [
        compare(scores[a], scores[b], metric, groups, config.bootstrap_resamples, config.seed)
        for a, b in pairs_of(arms)
        for metric in COMPARED_METRICS
    ]
    return holm_corrected([comparison for comparison in found if comparison.n])
