"""Counts of rows that are only passing through: how many, how many usable, and why the others fell."""

from collections import Counter
from collections.abc import Iterable, Iterator

from qinglan.rows import Row


class Tally:
    """Counts rows as a stream goes by, so that nobody needs them all at once."""

    def __init__(self) -> None:
        self.total, self.ok = 0, 0
        self.reasons: Counter[str] = Counter()
        """How many rows fell for each reason."""

    def dropped_since(self, before: "Tally") -> dict[str, int]:
        """Rows by reason that fell between the two counts, the most frequent reason first."""
        fell = {reason: n - before.reasons.get(reason, 0) for reason, n in self.reasons.items()}
        return by_frequency({reason: n for reason, n in fell.items() if n > 0})

    def pass_through(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows; each is counted before it is handed on."""
        for row in rows:
            self.total += 1
            if row.status == "ok":
                self.ok += 1
            else:
                self.reasons[row.reason or "unknown"] += 1
            yield row


def by_frequency(reasons: dict[str, int]) -> dict[str, int]:
    """The counts in the order in which people read them."""
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0])))
