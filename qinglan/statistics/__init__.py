"""Paired comparison of two arms over the same rows, in groups.

Rows of one group (questions about one gold document) are not independent, so the group is the unit:
intervals come from a bootstrap over groups (ratio of sums), p-values from flipping the sign of
whole groups' differences. McNemar's test counts rows as independent and claims too much: it is
there because readers expect it, and decides nothing. A missing value is never a 0: its row is left
out and counted.
"""

from qinglan.statistics.bootstrap import (
    RESAMPLES,
    Counts,
    Interval,
    MeanCi,
    Number,
    mean_ci,
    percentile_ci,
    ratio_ci,
)
from qinglan.statistics.comparison import (
    FEWEST_GROUPS,
    POWER_FACTOR,
    ArmScores,
    Comparison,
    between,
    compare,
    holm_corrected,
    rows_needed,
)
from qinglan.statistics.groups import Floats, Values
from qinglan.statistics.histogram import Histogram, quantile, regrouped
from qinglan.statistics.kappa import Agreement, agreement
from qinglan.statistics.significance import MIN_FLIPS, holm, mcnemar_p, sign_flip_p

__all__ = [
    "FEWEST_GROUPS",
    "MIN_FLIPS",
    "POWER_FACTOR",
    "RESAMPLES",
    "Agreement",
    "ArmScores",
    "Comparison",
    "Counts",
    "Floats",
    "Histogram",
    "Interval",
    "MeanCi",
    "Number",
    "Values",
    "agreement",
    "between",
    "compare",
    "holm",
    "holm_corrected",
    "mcnemar_p",
    "mean_ci",
    "percentile_ci",
    "quantile",
    "ratio_ci",
    "regrouped",
    "rows_needed",
    "sign_flip_p",
]
