"""Paired comparison of two arms over the same rows, in groups.

Rows of one group (questions about one gold document) are not independent, so the group is the unit:
intervals come from a bootstrap over groups (ratio of sums), p-values from flipping the sign of whole groups'
differences. McNemar's test would count rows as independent and claim too much. A missing value is never a 0:
its row is left out and counted.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

Floats = NDArray[np.float64]
Interval = tuple[float, float]
Values = Mapping[str, float | None]

MIN_FLIPS = 10_000
POWER_FACTOR = 2.80
"""z(0.975) + z(0.80): a true difference of this many standard errors is found in four of five test sets."""
_BLOCK = 4_000_000
_TIE = 1e-9


class Result(BaseModel):
    """A frozen result that goes into report.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ArmScores(Result):
    """One arm's value per metric and row id; None or NaN where it has none (failed, unlabelled, unjudged)."""

    arm: str
    scores: dict[str, dict[str, float | None]]


class MeanCi(Result):
    """One arm's mean. `ci95` is None for fewer than two groups, which say nothing about spread."""

    mean: float | None
    ci95: Interval | None
    n: int
    groups: int
    left_out: int


class Comparison(Result):
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
    """Those of them where only one arm has none, so that the comparison may flatter it."""
    p_holm: float | None = None
    """`p_value` corrected by Holm's method, where several arms are compared with the same one on this metric."""


@dataclass(frozen=True)
class _Clusters:
    """Sum of values and number of rows per group, in the order of the sorted group keys."""

    sums: Floats
    sizes: Floats

    @property
    def mean(self) -> float | None:
        return float(self.sums.sum() / self.sizes.sum()) if len(self.sums) else None


def compare(
    a: ArmScores,
    b: ArmScores,
    metric: str,
    groups: Mapping[str, str],
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare two arms on one metric, row by row.

    Args:
        groups: row id → group; every compared row needs one.
        resamples: of the bootstrap; the permutation test makes at least 10,000 flips.

    Raises:
        KeyError: an arm doesn't know the metric.
        ValueError: a compared row has no group.
    """
    left, right = _present(a.scores[metric]), _present(b.scores[metric])
    rows = sorted(left.keys() & right.keys())
    listed = len(a.scores[metric].keys() | b.scores[metric].keys())
    values_a, values_b = (np.array([arm[row] for row in rows], dtype=float) for arm in (left, right))
    differences = values_a - values_b
    clusters = _cluster(differences, rows, groups)
    means = _bootstrap(clusters, resamples, seed)
    return Comparison(
        a=a.arm,
        b=b.arm,
        metric=metric,
        n=len(rows),
        groups=len(clusters.sums),
        diff=clusters.mean,
        ci95=_percentiles(means),
        wins=int((differences > _TIE).sum()),
        ties=int((np.abs(differences) <= _TIE).sum()),
        losses=int((differences < -_TIE).sum()),
        p_value=sign_flip_p(clusters.sums, max(resamples, MIN_FLIPS), seed) if rows else None,
        detectable_diff=_detectable(means),
        mean_a=float(values_a.mean()) if rows else None,
        mean_b=float(values_b.mean()) if rows else None,
        left_out=listed - len(rows),
        one_sided=len(left.keys() ^ right.keys()),
    )


def mean_ci(values: Values, groups: Mapping[str, str], resamples: int = 10_000, seed: int = 0) -> MeanCi:
    """One arm's mean (by row id) with its 95% interval from a bootstrap over groups."""
    present = _present(values)
    rows = sorted(present)
    clusters = _cluster(np.array([present[row] for row in rows], dtype=float), rows, groups)
    return MeanCi(
        mean=clusters.mean,
        ci95=_percentiles(_bootstrap(clusters, resamples, seed)),
        n=len(rows),
        groups=len(clusters.sums),
        left_out=len(values) - len(rows),
    )


def sign_flip_p(group_sums: Floats, flips: int, seed: int) -> float:
    """Two-sided permutation p-value of a sum of group differences, whatever the metric.

    Under the null hypothesis either arm could have had either label in each group, so each group's sign is a
    coin. (1 + as extreme) / (1 + flips) keeps the p-value above 0, as it must be with random flips.
    """
    moving = group_sums[np.abs(group_sums) > _TIE]
    total = float(moving.sum())
    if not len(moving):
        return 1.0
    rng, extreme = np.random.default_rng([seed, 1]), 0
    for size in _blocks(flips, len(moving)):
        heads = rng.integers(2, size=(size, len(moving)), dtype=np.uint8).astype(float)
        extreme += int((np.abs(2 * (heads @ moving) - total) >= abs(total) - _TIE).sum())
    return (1 + extreme) / (1 + flips)


def _present(values: Values) -> dict[str, float]:
    return {row: value for row, value in values.items() if value is not None and not math.isnan(value)}


def _cluster(values: Floats, rows: Sequence[str], groups: Mapping[str, str]) -> _Clusters:
    if missing := [row for row in rows if row not in groups]:
        raise ValueError(f"{len(missing)} rows have no group, the first is {missing[0]!r}")
    keys, index = np.unique(np.array([groups[row] for row in rows], dtype=str), return_inverse=True)
    sums, sizes = (np.bincount(index, weights=w, minlength=len(keys)) for w in (values, np.ones(len(rows))))
    return _Clusters(sums.astype(np.float64), sizes.astype(np.float64))


def _bootstrap(clusters: _Clusters, resamples: int, seed: int) -> Floats:
    """Means of resampled groups; empty for fewer than two groups."""
    groups = len(clusters.sums)
    if groups < 2:
        return np.empty(0)
    rng, means = np.random.default_rng([seed, 0]), []
    for size in _blocks(resamples, groups):
        drawn = rng.integers(groups, size=(size, groups))
        means.append(clusters.sums[drawn].sum(axis=1) / clusters.sizes[drawn].sum(axis=1))
    return np.concatenate(means)


def _blocks(count: int, width: int) -> list[int]:
    """Split `count` rows of `width` numbers so that each block fits comfortably into memory."""
    block = max(1, _BLOCK // width)
    full, rest = divmod(count, block)
    return [block] * full + ([rest] if rest else [])


def _percentiles(means: Floats) -> Interval | None:
    if not len(means):
        return None
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _detectable(means: Floats) -> float | None:
    error = float(means.std()) if len(means) else 0.0
    return POWER_FACTOR * error if error > _TIE else None
