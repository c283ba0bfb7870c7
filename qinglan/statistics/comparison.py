"""Two arms side by side on one metric: their difference, its interval and its p-value."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pydantic import BaseModel

from qinglan.statistics.bootstrap import Interval, bootstrap_means, percentiles
from qinglan.statistics.groups import Floats, present_values, sum_by_group
from qinglan.statistics.significance import MIN_FLIPS, TIE, holm, mcnemar_p, sign_flip_p

POWER_FACTOR = 2.80
"""z(0.975) + z(0.80): a true difference of this many standard errors is found in four of five test
sets."""
FEWEST_GROUPS = 10
"""Fewest groups whose interval decides anything: below, intervals come out too narrow. With 3 to 5
groups, some 8% of the intervals of equals lie above 0."""


class ArmScores(BaseModel, frozen=True, extra="forbid"):
    """One arm's value per metric and row id.

    A value is None or NaN where the arm has none: it failed, the row has no label, or no judge was
    asked.
    """

    arm: str
    scores: dict[str, dict[str, float | None]]


class Comparison(BaseModel, frozen=True, extra="forbid"):
    """`diff` = a − b over the rows where both have a value; positive where `a` is better."""

    a: str
    b: str
    metric: str
    n: int
    groups: int
    diff: float | None
    """None where no row has both values."""
    ci95: Interval | None
    """None for fewer than two groups."""
    wins: int
    """Rows where a > b."""
    ties: int
    losses: int
    p_value: float | None
    """Two-sided, from sign flips of whole groups; not corrected for the number of comparisons."""
    detectable_diff: float | None
    """Found with 80% power at two-sided 5%; None where the spread can't be estimated or is 0."""
    mean_a: float | None = None
    """Mean of `a` over the compared rows, so that `diff` = `mean_a` − `mean_b`."""
    mean_b: float | None = None
    left_out: int = 0
    """Rows where either arm has no value."""
    one_sided: int = 0
    """Rows of `left_out` where one arm has a value, so that the comparison may flatter the
    other."""
    only_a: int = 0
    """Rows of `one_sided` where `a` has a value and `b` has none."""
    p_holm: float | None = None
    """`p_value` corrected by Holm's method, where there are several comparisons on this metric."""
    p_mcnemar: float | None = None
    """McNemar's exact test, where a row's value is 0 or 1; it counts rows as independent: `p_value`
    is to go by."""
    rows_needed: int | None = None
    """Paired rows with which four of five test sets would tell a gain of `gate.smallest_gain` from
    `gate.min_gain`, at as many rows a group as here. The report fills it in, by the settings of its
    day; None elsewhere, and where the spread is not known."""

    @property
    def deciding_ci95(self) -> Interval | None:
        """`ci95`, where there are enough groups to decide by it."""
        return self.ci95 if self.groups >= FEWEST_GROUPS else None

    @property
    def corrected_p(self) -> float | None:
        """`p_holm` where there are several comparisons on this metric, otherwise `p_value`."""
        return self.p_value if self.p_holm is None else self.p_holm

    @property
    def turned(self) -> "Comparison":
        """The same comparison as `b` − `a`."""
        # Taken from 0.0, so that a difference of 0 doesn't become −0.
        diff = None if self.diff is None else 0.0 - self.diff
        ci95 = None
        if self.ci95:
            low, high = self.ci95
            ci95 = (0.0 - high, 0.0 - low)
        return self.model_copy(
            update={
                "a": self.b,
                "b": self.a,
                "mean_a": self.mean_b,
                "mean_b": self.mean_a,
                "wins": self.losses,
                "losses": self.wins,
                "only_a": self.one_sided - self.only_a,
                "diff": diff,
                "ci95": ci95,
            }
        )

    def involves(self, arm: str) -> bool:
        return arm in (self.a, self.b)

    def with_arms(self, a: str, b: str) -> "Comparison":
        """The same comparison under these names."""
        return self.model_copy(update={"a": a, "b": b})

    def with_p_holm(self, p_holm: float) -> "Comparison":
        return self.model_copy(update={"p_holm": p_holm})

    def with_rows_needed(self, rows: int | None) -> "Comparison":
        return self.model_copy(update={"rows_needed": rows})


def between(comparisons: Iterable[Comparison], a: str, b: str) -> dict[str, Comparison]:
    """The comparisons of two arms as a − b, by metric, also those that are kept as b − a."""
    by_metric: dict[str, Comparison] = {}
    for comparison in comparisons:
        if {comparison.a, comparison.b} == {a, b}:
            is_turned = comparison.a != a
            by_metric[comparison.metric] = comparison.turned if is_turned else comparison
    return by_metric


def compare(
    a: ArmScores,
    b: ArmScores,
    metric: str,
    groups: Mapping[str, str],
    resamples: int = 10_000,
    seed: int = 0,
    *,
    proportion: bool = False,
) -> Comparison:
    """Compare two arms on one metric, row by row.

    Args:
        groups: row id → group; every compared row needs one.
        resamples: of the bootstrap; the permutation test makes at least 10,000 flips.
        proportion: a row's value is 0 or 1, so that McNemar's test applies.

    Raises:
        KeyError: an arm doesn't know the metric.
        ValueError: a compared row has no group.
    """
    present_a = present_values(a.scores[metric])
    present_b = present_values(b.scores[metric])
    rows = sorted(present_a.keys() & present_b.keys())
    all_rows = a.scores[metric].keys() | b.scores[metric].keys()
    values_a = np.array([present_a[row] for row in rows], dtype=float)
    values_b = np.array([present_b[row] for row in rows], dtype=float)
    differences = values_a - values_b
    group_sums = sum_by_group(differences, rows, groups)
    means = bootstrap_means(group_sums, resamples, seed)
    wins = int((differences > TIE).sum())
    losses = int((differences < -TIE).sum())

    mean_a: float | None = None
    mean_b: float | None = None
    p_value: float | None = None
    p_mcnemar: float | None = None
    if rows:
        mean_a = float(values_a.mean())
        mean_b = float(values_b.mean())
        p_value = sign_flip_p(group_sums.sums, max(resamples, MIN_FLIPS), seed)
        if proportion:
            p_mcnemar = mcnemar_p(wins, losses)

    return Comparison(
        a=a.arm,
        b=b.arm,
        metric=metric,
        n=len(rows),
        groups=len(group_sums.sums),
        diff=group_sums.mean,
        ci95=percentiles(means),
        wins=wins,
        ties=len(rows) - wins - losses,
        losses=losses,
        p_value=p_value,
        detectable_diff=_detectable_diff(means),
        mean_a=mean_a,
        mean_b=mean_b,
        left_out=len(all_rows) - len(rows),
        one_sided=len(present_a.keys() ^ present_b.keys()),
        only_a=len(present_a.keys() - present_b.keys()),
        p_mcnemar=p_mcnemar,
    )


def _detectable_diff(means: Floats) -> float | None:
    """The true difference that is found in four of five test sets, from resampled means."""
    if not len(means):
        return None
    standard_error = float(means.std())
    return POWER_FACTOR * standard_error if standard_error > TIE else None


def rows_needed(rows: int, detectable: float | None, gain: float | None) -> int | None:
    """Rows with which a difference of `gain` is found as surely as `detectable` is with `rows` of
    them.

    The standard error falls with the square root of the number of rows, as long as there are as
    many in a group.
    """
    if detectable is None or gain is None:
        return None
    return math.ceil(rows * (detectable / gain) ** 2)


def holm_corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with `p_holm`, corrected over those of each metric.

    A metric's only comparison is not corrected.
    """
    indices_by_metric: defaultdict[str, list[int]] = defaultdict(list)
    for index, comparison in enumerate(comparisons):
        indices_by_metric[comparison.metric].append(index)
    corrected = list(comparisons)
    for indices in indices_by_metric.values():
        if len(indices) == 1:
            continue
        p_values = []
        for index in indices:
            p_value = comparisons[index].p_value
            # A comparison without a common row counts among those that were made.
            p_values.append(1.0 if p_value is None else p_value)
        for index, p_holm in zip(indices, holm(p_values), strict=True):
            corrected[index] = comparisons[index].with_p_holm(p_holm)
    return corrected
