"""95% intervals of means, ratios and percentiles, from resamples with replacement."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator

from qinglan.statistics.groups import (
    Floats,
    GroupSums,
    Values,
    block_sizes,
    present_values,
    sum_by_group,
)

Counts = NDArray[np.uint8]
Interval = tuple[float, float]
Number = Annotated[float | None, BeforeValidator(lambda value: None if value != value else value)]
"""None where there is no value; NaN, the only value that differs from itself, becomes None."""

RESAMPLES = 2_000
"""Enough for the ends of an interval that is only read."""

_MOST_DRAWS = 100_000_000
"""Bounds the time for an interval: over more than 10,000 groups, fewer than 10,000 resamples are
drawn."""
_FEWEST_RESAMPLES = 1_000


class MeanCi(BaseModel, frozen=True, extra="forbid"):
    """One arm's mean over the rows that have a value."""

    mean: Number = None
    n: int = 0
    ci95: Interval | None = None
    """None where none is estimated, and for fewer than two groups, which say nothing about
    spread."""


def mean_ci(
    values: Values, groups: Mapping[str, str], resamples: int = 10_000, seed: int = 0
) -> MeanCi:
    """One arm's mean (by row id) with its 95% interval from a bootstrap over groups."""
    present = present_values(values)
    rows = sorted(present)
    row_values = np.array([present[row] for row in rows], dtype=float)
    group_sums = sum_by_group(row_values, rows, groups)
    means = bootstrap_means(group_sums, resamples, seed)
    return MeanCi(mean=group_sums.mean, n=len(rows), ci95=percentiles(means))


def ratio_ci(
    pairs: Sequence[tuple[float, float]], resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """95% interval of a ratio of sums, such as dollars a usable answer.

    Args:
        pairs: numerator and denominator of each row; rows are drawn independently.
    """
    numerators, denominators = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    if not denominators.any():
        return None
    return percentiles(bootstrap_means(GroupSums(numerators, denominators), resamples, seed))


def percentile_ci(values: Sequence[float], percent: float, seed: int = 0) -> Interval | None:
    """95% interval of a percentile, from a bootstrap over independent values.

    It is None for fewer than two values. The number of resamples is fixed, as each has to be
    sorted, which is dear.
    """
    if len(values) < 2:
        return None
    # scipy.stats.bootstrap gives the same interval, and takes a second to load.
    array = np.array(values, dtype=float)
    rng = np.random.default_rng([seed, 2])
    drawn_percentiles = []
    for size in block_sizes(RESAMPLES, len(array)):
        drawn = array[rng.integers(len(array), size=(size, len(array)))]
        drawn_percentiles.append(np.percentile(drawn, percent, axis=1))
    return percentiles(np.concatenate(drawn_percentiles))


def bootstrap_means(group_sums: GroupSums, resamples: int, seed: int) -> Floats:
    """Means of resampled groups.

    The array is empty for fewer than two groups, or where no resamples are wanted.
    """
    groups = len(group_sums.sums)
    if groups < 2 or not resamples:
        return np.empty(0)
    affordable = max(_FEWEST_RESAMPLES, _MOST_DRAWS // groups)
    resamples = min(resamples, affordable)
    blocks: Iterable[Counts]
    if groups * resamples <= _MOST_DRAWS:
        blocks = _cached_draws(groups, resamples, seed)
    else:
        blocks = _draws(groups, resamples, seed)
    sums_and_sizes = np.stack([group_sums.sums, group_sums.sizes], axis=1)
    drawn = np.concatenate([counts.astype(np.float64) @ sums_and_sizes for counts in blocks])
    sums, sizes = drawn.T
    # A ratio's denominators may all be 0 in a resample.
    with np.errstate(divide="ignore", invalid="ignore"):
        means: Floats = sums / sizes
    return means[np.isfinite(means)]


def percentiles(values: Floats) -> Interval | None:
    """The middle 95% of resampled values; None where there is no value."""
    if not len(values):
        return None
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


# An evaluation asks for the same draws for each arm and metric. An entry takes at most 100 MB.
@lru_cache(maxsize=2)
def _cached_draws(groups: int, resamples: int, seed: int) -> tuple[Counts, ...]:
    return tuple(_draws(groups, resamples, seed))


def _draws(groups: int, resamples: int, seed: int) -> Iterator[Counts]:
    """Counts of the draws of each group, a line per resample, in blocks."""
    rng = np.random.default_rng([seed, 0])
    for size in block_sizes(resamples, groups):
        drawn = rng.integers(groups, size=(size, groups))
        # Each resample counts in a range of numbers of its own, so that one bincount does them all.
        drawn += groups * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * groups)
        # A count is 1 on average; 256 would take longer than the universe to come up.
        yield counts.reshape(size, groups).astype(np.uint8)
