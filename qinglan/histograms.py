"""A distribution in bounded memory: counts over equal bins, from which quantiles can be read to a bin's width."""

from collections.abc import Sequence


class Histogram:
    """Counts over [low, high]; what lies outside is counted in the bin at the end."""

    def __init__(self, low: float, high: float, bins: int) -> None:
        self.low, self.high, self.counts = low, high, [0] * bins
        self._per_bin = bins / (high - low)

    def add(self, value: float) -> None:
        """Count a finite value."""
        # A value on an edge belongs to the bin above it, also where 0.29 · 100 falls short of 29.
        place = int((value - self.low) * self._per_bin + 1e-9)
        self.counts[min(max(place, 0), len(self.counts) - 1)] += 1


def quantile(low: float, high: float, counts: Sequence[int], share: float) -> float | None:
    """The value below which a share of the counted ones lies, evenly spread in its bin; None if none was counted."""
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
