"""p-values of a paired comparison, and their correction where there are several."""

from collections.abc import Sequence

import numpy as np

from qinglan.statistics.groups import Floats, block_sizes

MIN_FLIPS = 10_000
"""Fewest flips with which a comparison's p-value is estimated."""
TIE = 1e-9
"""Differences below this are those of rounding."""


def sign_flip_p(group_sums: Floats, flips: int, seed: int) -> float:
    """Two-sided permutation p-value of a sum of group differences, whatever the metric.

    Under the null hypothesis either arm could have had either label in each group, so each group's
    sign is a coin. (1 + as extreme) / (1 + flips) keeps the p-value above 0, as it must be with
    random flips.
    """
    nonzero_sums = group_sums[np.abs(group_sums) > TIE]
    if not len(nonzero_sums):
        return 1.0
    total = float(nonzero_sums.sum())
    rng = np.random.default_rng([seed, 1])
    extreme = 0
    for size in block_sizes(flips, len(nonzero_sums)):
        heads = rng.integers(2, size=(size, len(nonzero_sums)), dtype=np.uint8).astype(float)
        # The sum with the signs of the tails turned.
        flipped_totals = 2 * (heads @ nonzero_sums) - total
        extreme += int((np.abs(flipped_totals) >= abs(total) - TIE).sum())
    return (1 + extreme) / (1 + flips)


def mcnemar_p(wins: int, losses: int) -> float:
    """McNemar's exact test, two-sided: are the rows on which two arms differ evenly divided?

    It is 1 where none differs. It takes rows for independent, which rows of one group are not.
    """
    # scipy.stats.binomtest takes a second to load.
    from scipy.special import bdtr  # type: ignore[import-untyped]

    return min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order of the p-values.

    The chance of any false alarm among all of them stays at the level.
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    smallest_first = sorted(range(len(p_values)), key=lambda index: p_values[index])
    for rank, index in enumerate(smallest_first):
        remaining = len(p_values) - rank
        # A larger p-value is never corrected to less than a smaller one was.
        highest = max(highest, min(1.0, remaining * p_values[index]))
        corrected[index] = highest
    return corrected
