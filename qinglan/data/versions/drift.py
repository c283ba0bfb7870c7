"""Drift: do questions or their retrieval scores differ from those of the last dataset version?

The distance of two samples of one population is never 0, and large for small ones. So each
Jensen–Shannon distance (base 2: 0 the same, 1 nothing in common) comes with the distance by chance
alone, from permuting which rows are the new ones. `excess` is the distance without that part, and
only one that is very unlikely by chance gives a warning.

What is compared is a summary of a version's rows: counts, and a sample drawn by a hash of the row's
id.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from qinglan.rows import INPUT_REASONS, BottomK, Row, bigrams, documents_of, top1_of
from qinglan.text import count, number

DRAWS, SAMPLE_ROWS, MAX_ENTRIES, MAX_TERM_CHARS = 200, 1000, 300_000, 40
SIGNIFICANT = 0.01
"""Eight distances are tested per version; at 0.05 every third version would give a warning by
chance."""
_LENGTHS = (5, 10, 20, 40, 80, 160)
_WORDS = re.compile(r"[^\W\da-z_]+|[a-z0-9]+")

Categories = Sequence[str]


class BoundedCounter:
    """Counts strings; forgets the rarest once there are twice `limit` different ones, and counts
    those too."""

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
    """Counts and a sample of rows; rows that were never questions (an empty cell, a duplicate) are
    left out."""

    rows: int = 0
    failed: int = 0
    intents: dict[str, int] = {}
    sample: list[DriftRow] = []


class RowSummaryBuilder:
    def __init__(self) -> None:
        self.rows = self.failed = 0
        self._intents = BoundedCounter()
        self._sample: BottomK[DriftRow] = BottomK(SAMPLE_ROWS)

    def add(self, row: Row) -> None:
        """Count the row if it was a question."""
        if row.reason in INPUT_REASONS:
            return
        self.rows += 1
        self.failed += row.status == "failed"
        self._intents.add(documents_of(row.gold_id) or keywords(row))
        if self._sample.wants(row.id):
            original, rewrite = top1_of(row.original_retrieved), top1_of(row.answer_retrieved)
            self._sample.add(row.id, DriftRow(query=row.query, original=original, rewrite=rewrite))

    def build(self) -> RowSummary:
        intents, sample = dict(self._intents.counts), self._sample.items()
        return RowSummary(rows=self.rows, failed=self.failed, intents=intents, sample=sample)


def grams(text: str) -> list[str]:
    """Character bigrams of text without spaces between words, and whole alphanumeric runs, with
    repetitions.

    Needs no dictionary, which would lack the name of a new product."""
    return bigrams(_WORDS.findall(text.lower()))


def keywords(row: Row) -> list[str]:
    """The words that SFT would learn; none of an answer with scores by rule, which is no list of
    keywords."""
    words = [] if row.parts is not None else (row.target or "").split()
    return list(dict.fromkeys(word[:MAX_TERM_CHARS] for word in words))


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


class Distance(BaseModel, frozen=True):
    """The distance of two samples in one respect."""

    distance: float
    expected: float
    """The average for two samples of these sizes from one population (root mean square)."""
    excess: float
    """√(distance² − expected²), 0 where the distance is less than expected."""
    p_value: float
    """Share of permutations with at least this distance."""


class Unseen(BaseModel, frozen=True):
    """Share of the new rows' items that the parent version lacks."""

    share: float
    expected: float
    """The expected share for one more row of the parent's population (Good–Turing: the share of
    items seen once)."""


class Shift(BaseModel, frozen=True):
    """Some rows of a version against all rows of its parent."""

    rows: int
    distances: dict[str, Distance] = {}
    """By vocabulary, length, original score and rewrite score; a respect that one side lacks is
    left out."""
    new_intents: Unseen | None = None
    failed_share: float = 0.0
    parent_failed_share: float = 0.0


class Drift(BaseModel, frozen=True):
    """A version compared with its parent: its new rows, and all its rows, most of which are in the
    parent too."""

    parent: str
    arrivals: Shift
    whole: Shift
    threshold: float

    @property
    def warnings(self) -> dict[str, float]:
        """By what has drifted, the distance beyond chance."""
        return {
            f"{name} of {rows}": found.excess
            for rows, moved in (("the new rows", self.arrivals), ("all rows", self.whole))
            for name, found in moved.distances.items()
            if found.excess >= self.threshold and found.p_value <= SIGNIFICANT
        }

    @property
    def sentence(self) -> str:
        came, now = self.arrivals, self.whole
        some = f"{count(came.rows)} of {count(now.rows)} questions" if came.rows else "No question"
        text = f"{some} came in since {self.parent}"
        if came.rows and came.new_intents:
            text += f", {came.new_intents.share:.0%} of their intents new ({came.new_intents.expected:.0%} expected)"
        text += f"; failures {now.parent_failed_share:.1%} → {now.failed_share:.1%}. "
        if not self.warnings:
            return text + "No drift beyond chance and threshold."
        details = (
            f"{warning} ({number(excess, 2)} beyond chance)"
            for warning, excess in self.warnings.items()
        )
        return text + f"Drift: {', '.join(details)}."


_RESPECTS: dict[str, Callable[[DriftRow], Categories]] = {
    "vocabulary": lambda row: grams(row.query),
    "length": lambda row: [length_bucket(row.query)],
    "original score": lambda row: [] if row.original is None else [score_bucket(row.original)],
    "rewrite score": lambda row: [] if row.rewrite is None else [score_bucket(row.rewrite)],
}


def drift(
    parent_id: str, parent: RowSummary, arrivals: RowSummary, whole: RowSummary, threshold: float
) -> Drift:
    """Compare a version with its parent; `arrivals` is of the rows whose ids the parent lacks."""
    return Drift(
        parent=parent_id,
        arrivals=shift(parent, arrivals),
        whole=shift(parent, whole),
        threshold=threshold,
    )


def shift(parent: RowSummary, rows: RowSummary) -> Shift:
    found = {
        name: distance(
            [respect(row) for row in parent.sample], [respect(row) for row in rows.sample]
        )
        for name, respect in _RESPECTS.items()
    }
    return Shift(
        rows=rows.rows,
        distances={name: value for name, value in found.items() if value},
        new_intents=unseen(parent.intents, rows.intents),
        failed_share=rows.failed / max(rows.rows, 1),
        parent_failed_share=parent.failed / max(parent.rows, 1),
    )


def distance(old: Sequence[Categories], new: Sequence[Categories]) -> Distance | None:
    """Jensen–Shannon distance of two samples' categories, with its null from permuting whole rows;
    None where a side has no category at all."""
    rows = [row for row in (*old, *new) if row]
    split = sum(1 for row in old if row)
    if split in (0, len(rows)):
        return None
    numbers: dict[str, int] = {}
    codes = np.array(
        [numbers.setdefault(category, len(numbers)) for row in rows for category in row]
    )
    owners = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    is_new = np.arange(len(rows)) >= split
    observed = _jensen_shannon(codes, is_new[owners])
    random = np.random.default_rng(0)
    null = np.array(
        [_jensen_shannon(codes, random.permutation(is_new)[owners]) for _ in range(DRAWS)]
    )
    expected = float(np.sqrt(np.mean(null**2)))
    return Distance(
        distance=observed,
        expected=expected,
        excess=math.sqrt(max(0.0, observed**2 - expected**2)),
        p_value=float((1 + np.sum(null >= observed - 1e-12)) / (1 + DRAWS)),
    )


def unseen(old: Mapping[str, int], new: Mapping[str, int]) -> Unseen | None:
    """The share of new items; None where either side is empty."""
    total, total_old = sum(new.values()), sum(old.values())
    if not total or not total_old:
        return None
    share = sum(n for name, n in new.items() if name not in old) / total
    return Unseen(share=share, expected=sum(1 for n in old.values() if n == 1) / total_old)


def _jensen_shannon(codes: Any, is_new: Any) -> float:
    from scipy.spatial.distance import jensenshannon  # type: ignore[import-untyped]

    size = int(codes.max()) + 1
    new, old = (
        np.bincount(codes[is_new], minlength=size),
        np.bincount(codes[~is_new], minlength=size),
    )
    with np.errstate(invalid="ignore"):  # the root of −1e-17, where both are the same
        return float(np.nan_to_num(jensenshannon(old, new, base=2)))
