"""Counts of values in equal bins, which need no memory for each value."""

from collections.abc import Sequence


class Histogram:
    """Counts over [low, high]; what lies outside is counted in the bin at the end."""

    def __init__(self, low: float, high: float, bins: int) -> None:
        self.low = low
        self.high = high
        self.counts = [0] * bins
        self._bins_per_unit = bins / (high - low)

    def add(self, value: float) -> None:
        # A value on an edge belongs to the bin above it, also where 0.29 · 100 falls short of 29.
        place = int((value - self.low) * self._bins_per_unit + 1e-9)
        last = len(self.counts) - 1
        self.counts[min(max(place, 0), last)] += 1


def quantile(low: float, high: float, counts: Sequence[int], share: float) -> float | None:
    """The value below which this share of the counted values lies; None if none was counted.

    Values are taken to be evenly spread within their bin.
    """
    count_below = share * sum(counts)
    bin_width = (high - low) / len(counts)
    count_so_far = 0
    for place, count in enumerate(counts):
        if count and count_so_far + count >= count_below:
            return low + bin_width * (place + (count_below - count_so_far) / count)
        count_so_far += count
    return None


def regrouped(counts: Sequence[int], bins: int) -> list[int]:
    """The same counts in fewer bins; `bins` divides their number."""
    joined = len(counts) // bins
    return [sum(counts[start : start + joined]) for start in range(0, len(counts), joined)]
