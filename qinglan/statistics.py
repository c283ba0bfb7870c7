"""Paired comparison of two arms over the same rows, in groups.

Rows of one group (questions about one gold document) are not independent, so the group is the unit:
intervals come from a bootstrap over groups (ratio of sums), p-values from flipping the sign of
whole groups' differences. McNemar's test counts rows as independent and claims too much: it is
there because readers expect it, and decides nothing. A missing value is never a 0: its row is left
out and counted.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator

Floats = NDArray[np.float64]
Counts = NDArray[np.uint8]
Interval = tuple[float, float]
Values = Mapping[str, float | None]
Number = Annotated[float | None, BeforeValidator(lambda value: None if value != value else value)]
"""None where there is no value; NaN, the only value that differs from itself, becomes None."""

MIN_FLIPS = 10_000
POWER_FACTOR = 2.80
"""z(0.975) + z(0.80): a true difference of this many standard errors is found in four of five test
sets."""
RESAMPLES = 2_000
"""Enough for the ends of an interval that is only read."""
FEWEST_GROUPS = 10
"""Of fewer, intervals come out too narrow to decide by: of 3 to 5 groups, some 8% of those of
equals lie above 0."""
_BLOCK = 4_000_000
_DRAWS, _MIN_RESAMPLES = 100_000_000, 1_000
"""Of more groups than 10,000 fewer resamples are drawn, so that the time for an interval stays
bounded."""
_TIE = 1e-9


class ArmScores(BaseModel, frozen=True, extra="forbid"):
    """One arm's value per metric and row id; None or NaN where it has none (failed, unlabelled,
    unjudged)."""

    arm: str
    scores: dict[str, dict[str, float | None]]


class MeanCi(BaseModel, frozen=True, extra="forbid"):
    """One arm's mean over the rows that have a value."""

    mean: Number = None
    n: int = 0
    ci95: Interval | None = None
    """None where none is estimated, and for fewer than two groups, which say nothing about
    spread."""


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
    """Those of them where only one arm has none, so that the comparison may flatter it."""
    only_a: int = 0
    """Those of `one_sided` where `a` has a value and `b` has none."""
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
        """`ci95`, where it is of enough groups to decide by."""
        return self.ci95 if self.groups >= FEWEST_GROUPS else None

    @property
    def turned(self) -> "Comparison":
        """The same of `b` − `a`."""
        found = {"a": self.b, "b": self.a, "mean_a": self.mean_b, "mean_b": self.mean_a}
        found |= {"wins": self.losses, "losses": self.wins, "only_a": self.one_sided - self.only_a}
        found |= {"diff": None if self.diff is None else 0.0 - self.diff}
        return self.model_copy(
            update=found | {"ci95": self.ci95 and (0.0 - self.ci95[1], 0.0 - self.ci95[0])}
        )


def between(found: Iterable[Comparison], a: str, b: str) -> dict[str, Comparison]:
    """Those of two arms as a − b, by metric, also where they are kept as b − a."""
    return {
        each.metric: each if each.a == a else each.turned
        for each in found
        if {each.a, each.b} == {a, b}
    }


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
    left, right = _present(a.scores[metric]), _present(b.scores[metric])
    rows = sorted(left.keys() & right.keys())
    listed = len(a.scores[metric].keys() | b.scores[metric].keys())
    values_a, values_b = (
        np.array([arm[row] for row in rows], dtype=float) for arm in (left, right)
    )
    differences = values_a - values_b
    clusters = _cluster(differences, rows, groups)
    means = _bootstrap(clusters, resamples, seed)
    wins, losses = int((differences > _TIE).sum()), int((differences < -_TIE).sum())
    error = float(means.std()) if len(means) else 0.0
    return Comparison(
        a=a.arm,
        b=b.arm,
        metric=metric,
        n=len(rows),
        groups=len(clusters.sums),
        diff=clusters.mean,
        ci95=_percentiles(means),
        wins=wins,
        ties=len(rows) - wins - losses,
        losses=losses,
        p_value=sign_flip_p(clusters.sums, max(resamples, MIN_FLIPS), seed) if rows else None,
        detectable_diff=POWER_FACTOR * error if error > _TIE else None,
        mean_a=float(values_a.mean()) if rows else None,
        mean_b=float(values_b.mean()) if rows else None,
        left_out=listed - len(rows),
        one_sided=len(left.keys() ^ right.keys()),
        only_a=len(left.keys() - right.keys()),
        p_mcnemar=mcnemar_p(wins, losses) if proportion and rows else None,
    )


def rows_needed(rows: int, detectable: float | None, gain: float | None) -> int | None:
    """Rows with which a difference of `gain` is found as surely as `detectable` is with `rows` of
    them.

    The standard error falls with the square root of the number of rows, as long as there are as
    many in a group.
    """
    return (
        None if detectable is None or gain is None else math.ceil(rows * (detectable / gain) ** 2)
    )


def mcnemar_p(wins: int, losses: int) -> float:
    """McNemar's exact test, two-sided: are the rows on which two arms differ evenly divided? 1
    where none differs.

    It takes rows for independent, which rows of one group are not.
    """
    from scipy.special import bdtr  # type: ignore[import-untyped]  # scipy.stats.binomtest takes a second to load

    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the chance of any false alarm among all of them stays at the
    level."""
    corrected, highest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = highest
    return corrected


def holm_corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with `p_holm`, over those of each metric; where there is only one,
    nothing is corrected."""
    families: defaultdict[str, list[int]] = defaultdict(list)
    for place, found in enumerate(comparisons):
        families[found.metric].append(place)
    corrected = list(comparisons)
    for places in (family for family in families.values() if len(family) > 1):
        p_values = holm(
            [1.0 if (p := comparisons[place].p_value) is None else p for place in places]
        )
        for place, p_holm in zip(places, p_values, strict=True):
            corrected[place] = comparisons[place].model_copy(update={"p_holm": p_holm})
    return corrected


def mean_ci(
    values: Values, groups: Mapping[str, str], resamples: int = 10_000, seed: int = 0
) -> MeanCi:
    """One arm's mean (by row id) with its 95% interval from a bootstrap over groups."""
    present = _present(values)
    rows = sorted(present)
    clusters = _cluster(np.array([present[row] for row in rows], dtype=float), rows, groups)
    return MeanCi(
        mean=clusters.mean, n=len(rows), ci95=_percentiles(_bootstrap(clusters, resamples, seed))
    )


def ratio_ci(
    pairs: Sequence[tuple[float, float]], resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """95% interval of a ratio of sums, such as dollars a usable answer, from a bootstrap over
    (above, below) pairs."""
    above, below = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
    return (
        _percentiles(_bootstrap(_Clusters(above, below), resamples, seed)) if below.any() else None
    )


def percentile_ci(values: Sequence[float], percent: float, seed: int = 0) -> Interval | None:
    """95% interval of a percentile, from a bootstrap over independent values; None for fewer than
    two."""
    if len(values) < 2:
        return None
    # scipy.stats.bootstrap gives the same interval, and takes a second to load. Sorting makes a
    # resample dear.
    drawn, rng = np.array(values, dtype=float), np.random.default_rng([seed, 2])
    found = [
        np.percentile(drawn[rng.integers(len(drawn), size=(size, len(drawn)))], percent, axis=1)
        for size in _blocks(RESAMPLES, len(drawn))
    ]
    return _percentiles(np.concatenate(found))


def sign_flip_p(group_sums: Floats, flips: int, seed: int) -> float:
    """Two-sided permutation p-value of a sum of group differences, whatever the metric.

    Under the null hypothesis either arm could have had either label in each group, so each group's
    sign is a coin. (1 + as extreme) / (1 + flips) keeps the p-value above 0, as it must be with
    random flips.
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
    return {
        row: value for row, value in values.items() if value is not None and not math.isnan(value)
    }


def _cluster(values: Floats, rows: Sequence[str], groups: Mapping[str, str]) -> _Clusters:
    if missing := [row for row in rows if row not in groups]:
        raise ValueError(f"{len(missing)} rows have no group, the first is {missing[0]!r}")
    keys, index = np.unique(np.array([groups[row] for row in rows], dtype=str), return_inverse=True)
    sums, sizes = (
        np.bincount(index, weights=w, minlength=len(keys)) for w in (values, np.ones(len(rows)))
    )
    return _Clusters(sums.astype(np.float64), sizes.astype(np.float64))


def _bootstrap(clusters: _Clusters, resamples: int, seed: int) -> Floats:
    """Means of resampled groups; empty for fewer than two groups, or where no resamples are
    wanted."""
    groups = len(clusters.sums)
    if groups < 2 or not resamples:
        return np.empty(0)
    resamples = max(min(resamples, _MIN_RESAMPLES), min(resamples, _DRAWS // groups))
    kept = groups * resamples <= _DRAWS
    draws = _kept_draws(groups, resamples, seed) if kept else _draws(groups, resamples, seed)
    sides = np.stack([clusters.sums, clusters.sizes], axis=1)
    sums, sizes = np.concatenate([counts.astype(np.float64) @ sides for counts in draws]).T
    with np.errstate(
        divide="ignore", invalid="ignore"
    ):  # a ratio whose denominators are all 0 in a resample
        means: Floats = sums / sizes
    return means[np.isfinite(means)]


@lru_cache(maxsize=2)
def _kept_draws(groups: int, resamples: int, seed: int) -> tuple[Counts, ...]:
    """An evaluation asks for the same draws for each arm and metric: at most 100 MB."""
    return tuple(_draws(groups, resamples, seed))


def _draws(groups: int, resamples: int, seed: int) -> Iterator[Counts]:
    """How often each group was drawn, a line per resample, in blocks."""
    rng = np.random.default_rng([seed, 0])
    for size in _blocks(resamples, groups):
        drawn = rng.integers(groups, size=(size, groups))
        drawn += groups * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * groups)
        yield counts.reshape(size, groups).astype(
            np.uint8
        )  # 1 on average; 256 would take longer than the universe


def _blocks(count: int, width: int) -> list[int]:
    """Split `count` rows of `width` numbers so that each block fits comfortably into memory."""
    block = max(1, _BLOCK // width)
    return [min(block, count - start) for start in range(0, count, block)]


def _percentiles(means: Floats) -> Interval | None:
    if not len(means):
        return None
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


class Agreement(NamedTuple):
    """Of two judges on the same rows."""

    share: float
    kappa: float | None
    """None where both always said the same one thing: nothing shows then that they would agree on
    anything else."""
    ci95: Interval | None
    """Of kappa; None for fewer than two groups, or where kappa has no value."""
    n: int


def agreement(
    one: Mapping[str, str], other: Mapping[str, str], groups: Mapping[str, str]
) -> Agreement | None:
    """Over the rows (by id) that both have judged; None where there are none."""
    rows = sorted(one.keys() & other.keys())
    if not rows:
        return None
    place = {name: number for number, name in enumerate(sorted({*one.values(), *other.values()}))}
    group = {key: number for number, key in enumerate(sorted({groups[row] for row in rows}))}
    tables = np.zeros((len(group), len(place), len(place)))
    for row in rows:
        tables[group[groups[row]], place[one[row]], place[other[row]]] += 1
    whole = tables.sum(axis=0, keepdims=True)
    share = float(np.trace(whole[0]) / len(rows))
    (kappa,) = map(float, _kappas(whole))
    if math.isnan(kappa) or len(group) < 2:
        return Agreement(share, None if math.isnan(kappa) else kappa, None, len(rows))
    drawn = np.random.default_rng([0, 3]).multinomial(
        len(group), [1 / len(group)] * len(group), size=RESAMPLES
    )
    kappas = _kappas(np.tensordot(drawn, tables, axes=1))
    return Agreement(share, kappa, _percentiles(kappas[~np.isnan(kappas)]), len(rows))


def _kappas(tables: Floats) -> Floats:
    """Of each table of counts (one's words × other's); NaN where chance alone would agree on
    everything."""
    total = tables.sum(axis=(1, 2))
    observed = np.trace(tables, axis1=1, axis2=2) / total
    expected = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1) / total**2
    certain = np.isclose(expected, 1)
    found: Floats = np.where(
        certain, np.nan, (observed - expected) / np.where(certain, 1.0, 1 - expected)
    )
    return found


class Histogram:
    """Counts over [low, high]; what lies outside is counted in the bin at the end."""

    def __init__(self, low: float, high: float, bins: int) -> None:
        self.low, self.high, self.counts = low, high, [0] * bins
        self._per_bin = bins / (high - low)

    def add(self, value: float) -> None:
        # A value on an edge belongs to the bin above it, also where 0.29 · 100 falls short of 29.
        place = int((value - self.low) * self._per_bin + 1e-9)
        self.counts[min(max(place, 0), len(self.counts) - 1)] += 1


def quantile(low: float, high: float, counts: Sequence[int], share: float) -> float | None:
    """The value below which a share of the counted ones lies, evenly spread in its bin; None if
    none was counted."""
    wanted, width, seen = share * sum(counts), (high - low) / len(counts), 0
    for place, count in enumerate(counts):
        if count and seen + count >= wanted:
            return low + width * (place + (wanted - seen) / count)
        seen += count
    return None


def regrouped(counts: Sequence[int], bins: int) -> list[int]:
    """The same counts in fewer bins; `bins` divides their number."""
    each = len(counts) // bins
    return [sum(counts[i : i + each]) for i in range(0, len(counts), each)]
