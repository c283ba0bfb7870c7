"""Cohen's kappa: how far two judges agree beyond what chance would bring about, with its interval.

Rows of one group are not independent, so the interval comes from a bootstrap over groups.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qinglan.statistics import Interval

RESAMPLES = 2_000
"""Enough for the ends of an interval that is only read."""


class Agreement(NamedTuple):
    """Of two judges on the same rows."""

    share: float
    kappa: float | None
    """None where both always said the same one thing: nothing shows then that they would agree on anything else."""
    ci95: Interval | None
    """Of kappa; None for fewer than two groups, or where kappa has no value."""
    n: int


def agreement(
    one: Mapping[str, str],
    other: Mapping[str, str],
    groups: Mapping[str, str],
    resamples: int = RESAMPLES,
    seed: int = 0,
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
    if math.isnan(kappa):
        return Agreement(share, None, None, len(rows))
    return Agreement(share, kappa, _interval(tables, resamples, seed), len(rows))


def _interval(tables: NDArray[np.float64], resamples: int, seed: int) -> Interval | None:
    groups = len(tables)
    if groups < 2:
        return None
    drawn = np.random.default_rng([seed, 3]).multinomial(groups, [1 / groups] * groups, size=resamples)
    low, high = np.nanpercentile(_kappas(np.tensordot(drawn, tables, axes=1)), [2.5, 97.5])
    return float(low), float(high)


def _kappas(tables: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each table of counts (one's words × other's); NaN where chance alone would agree on everything."""
    total = tables.sum(axis=(1, 2))
    observed = np.trace(tables, axis1=1, axis2=2) / total
    expected = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1) / total**2
    certain = np.isclose(expected, 1)
    found: NDArray[np.float64] = np.where(certain, np.nan, (observed - expected) / np.where(certain, 1.0, 1 - expected))
    return found
