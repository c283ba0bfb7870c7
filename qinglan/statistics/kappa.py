"""Cohen's kappa: how far two judges agree beyond what chance would bring."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from qinglan.statistics.bootstrap import RESAMPLES, Interval, percentiles
from qinglan.statistics.groups import Floats


class Agreement(NamedTuple):
    """Agreement of two judges on the same rows."""

    share: float
    kappa: float | None
    """None where both always said the same one thing: nothing shows then that they would agree on
    anything else."""
    ci95: Interval | None
    """Kappa's; None for fewer than two groups, or where kappa has no value."""
    n: int


def agreement(
    first: Mapping[str, str], second: Mapping[str, str], groups: Mapping[str, str]
) -> Agreement | None:
    """Agreement of two judges over the rows that both have judged; None where there are none.

    Args:
        first: one judge's verdict by row id.
        second: the other judge's.
        groups: row id → group.
    """
    rows = sorted(first.keys() & second.keys())
    if not rows:
        return None
    verdict_index = _index_of({*first.values(), *second.values()})
    group_index = _index_of({groups[row] for row in rows})
    # A table of counts for each group: first's verdicts × second's.
    tables = np.zeros((len(group_index), len(verdict_index), len(verdict_index)))
    for row in rows:
        group = group_index[groups[row]]
        tables[group, verdict_index[first[row]], verdict_index[second[row]]] += 1

    whole = tables.sum(axis=0, keepdims=True)
    share = float(np.trace(whole[0]) / len(rows))
    kappa = float(_kappas(whole)[0])
    if math.isnan(kappa):
        return Agreement(share, None, None, len(rows))
    if len(group_index) < 2:
        return Agreement(share, kappa, None, len(rows))

    rng = np.random.default_rng([0, 3])
    probabilities = [1 / len(group_index)] * len(group_index)
    draws = rng.multinomial(len(group_index), probabilities, size=RESAMPLES)
    kappas = _kappas(np.tensordot(draws, tables, axes=1))
    return Agreement(share, kappa, percentiles(kappas[~np.isnan(kappas)]), len(rows))


def _index_of(names: Iterable[str]) -> dict[str, int]:
    """Each name's place in alphabetical order."""
    return {name: index for index, name in enumerate(sorted(names))}


def _kappas(tables: Floats) -> Floats:
    """Kappa of each table of counts; NaN where chance alone would agree on everything."""
    total = tables.sum(axis=(1, 2))
    observed = np.trace(tables, axis1=1, axis2=2) / total
    expected = (tables.sum(axis=1) * tables.sum(axis=2)).sum(axis=1) / total**2
    certain = np.isclose(expected, 1)
    # numpy divides before it chooses, so tables without a kappa need a denominator other than 0.
    room_above_chance = np.where(certain, 1.0, 1 - expected)
    kappas: Floats = np.where(certain, np.nan, (observed - expected) / room_above_chance)
    return kappas
