"""Values by row, and their sums by group, which is what bootstrap and sign flips draw."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Values = Mapping[str, float | None]
"""One arm's values by row id; None or NaN where the row has none."""

_NUMBERS_PER_BLOCK = 4_000_000


@dataclass(frozen=True)
class GroupSums:
    """Sum of values and number of rows per group, in the order of the sorted group keys."""

    sums: Floats
    sizes: Floats

    @property
    def mean(self) -> float | None:
        """Mean over all rows; None where there is no row."""
        if not len(self.sums):
            return None
        return float(self.sums.sum() / self.sizes.sum())


def present_values(values: Values) -> dict[str, float]:
    """The rows that have a value."""
    return {
        row: value for row, value in values.items() if value is not None and not math.isnan(value)
    }


def sum_by_group(values: Floats, rows: Sequence[str], groups: Mapping[str, str]) -> GroupSums:
    """Sum the values, one for each row id in `rows`, within the rows' groups.

    Raises:
        ValueError: a row has no group.
    """
    rows_without_group = [row for row in rows if row not in groups]
    if rows_without_group:
        first = rows_without_group[0]
        raise ValueError(f"{len(rows_without_group)} rows have no group, the first is {first!r}")
    group_of_row = np.array([groups[row] for row in rows], dtype=str)
    names, index = np.unique(group_of_row, return_inverse=True)
    # Converted, as bincount returns integers where it has no weights, or no rows.
    sums = np.bincount(index, weights=values, minlength=len(names)).astype(np.float64)
    sizes = np.bincount(index, minlength=len(names)).astype(np.float64)
    return GroupSums(sums, sizes)


def block_sizes(count: int, width: int) -> list[int]:
    """Split `count` rows of `width` numbers so that each block fits comfortably into memory."""
    rows_per_block = max(1, _NUMBERS_PER_BLOCK // width)
    return [min(rows_per_block, count - start) for start in range(0, count, rows_per_block)]
