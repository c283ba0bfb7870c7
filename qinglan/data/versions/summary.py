"""A summary of a dataset version's rows, in bounded memory: counts, and a sample for the next version's drift.

The sample is drawn by a hash of the row's id, so two versions of the same questions have the same sample.
"""

import re
from collections import Counter
from collections.abc import Iterable

from pydantic import BaseModel

from qinglan.rows import INPUT_REASONS, BottomK, Retrieved, Row

SAMPLE_ROWS = 1000
MAX_ENTRIES = 300_000
MAX_TERM_CHARS = 40
_LENGTHS = (5, 10, 20, 40, 80, 160)
_WORDS = re.compile(r"[^\W\da-z_]+|[a-z0-9]+")


class BoundedCounter:
    """Counts strings; forgets the rarest once there are twice `limit` different ones, and counts those too."""

    def __init__(self, limit: int = MAX_ENTRIES) -> None:
        self.counts: Counter[str] = Counter()
        self.forgotten = 0
        self._limit = limit

    def add(self, items: Iterable[str]) -> None:
        self.counts.update(items)
        if len(self.counts) > 2 * self._limit:
            kept = Counter(dict(self.counts.most_common(self._limit)))
            self.forgotten += len(self.counts) - len(kept)
            self.counts = kept


class DriftRow(BaseModel, frozen=True):
    """The part of a row that drift compares."""

    query: str
    original: float | None = None
    """Top-1 score of the original question; None where it was not retrieved."""
    rewrite: float | None = None


class RowSummary(BaseModel, frozen=True):
    """Counts and a sample of rows; rows that were never questions (an empty cell, a duplicate) are left out."""

    rows: int = 0
    failed: int = 0
    vocabulary: dict[str, int] = {}
    intents: dict[str, int] = {}
    sample: list[DriftRow] = []

    @property
    def failed_share(self) -> float:
        return self.failed / self.rows if self.rows else 0.0


class RowSummaryBuilder:
    def __init__(self, sample_rows: int = SAMPLE_ROWS) -> None:
        self.rows = self.failed = 0
        self._vocabulary, self._intents = BoundedCounter(), BoundedCounter()
        self._sample: BottomK[DriftRow] = BottomK(sample_rows)

    def add(self, row: Row) -> None:
        """Count the row if it was a question."""
        if row.reason in INPUT_REASONS:
            return
        self.rows += 1
        self.failed += row.status == "failed"
        self._vocabulary.add(grams(row.query))
        self._intents.add([row.gold_id] if row.gold_id else keywords(row))
        if self._sample.wants(row.id):
            original, rewrite = top1_of(row.original_retrieved), top1_of(row.answer_retrieved)
            self._sample.add(row.id, DriftRow(query=row.query, original=original, rewrite=rewrite))

    def build(self) -> RowSummary:
        return RowSummary(
            rows=self.rows,
            failed=self.failed,
            vocabulary=dict(self._vocabulary.counts),
            intents=dict(self._intents.counts),
            sample=self._sample.items(),
        )


def grams(text: str) -> list[str]:
    """Character bigrams of text without spaces between words, and whole alphanumeric runs, with repetitions.

    Needs no dictionary, which would lack the name of a new product."""
    found: list[str] = []
    for run in _WORDS.findall(text.lower()):
        if run.isascii() or len(run) == 1:
            found.append(run)
        else:
            found.extend(run[i : i + 2] for i in range(len(run) - 1))
    return found


def keywords(row: Row) -> list[str]:
    """The words that SFT would learn; none of an answer with scores by rule, which is no list of keywords."""
    words = [] if row.parts is not None else (row.target or "").split()
    return list(dict.fromkeys(word[:MAX_TERM_CHARS] for word in words))


def top1_of(found: Retrieved | None) -> float | None:
    return None if found is None else found.top1_score


def length_bucket(text: str) -> str:
    """A range of lengths, in characters."""
    low = 0
    for high in _LENGTHS:
        if len(text) <= high:
            return f"{low}–{high}"
        low = high + 1
    return f"{low}+"


def score_bucket(score: float) -> str:
    """A tenth of [0, 1]."""
    low = min(max(int(score * 10), 0), 9)
    return f"{low / 10:.1f}–{(low + 1) / 10:.1f}"
