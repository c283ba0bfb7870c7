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

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from qinglan.rows import BottomK, Row, bigrams, documents_of, top1_of
from qinglan.text import count, number

DRAWS = 200
"""Permutations by which the distance by chance is found."""
SAMPLE_ROWS = 1000
MAX_ENTRIES = 300_000
MAX_TERM_CHARS = 40
# Eight distances are tested per version: at 0.05 every third version would give a warning by
# chance.
SIGNIFICANT = 0.01
_LENGTHS = (5, 10, 20, 40, 80, 160)
"""The last lengths, in characters, of the ranges that `length_bucket` names."""
_WORDS = re.compile(r"[^\W\da-z_]+|[a-z0-9]+")

Categories = Sequence[str]


class BoundedCounter:
    """Counts strings in bounded memory.

    Once there are twice `limit` different ones it forgets the rarest, and counts how many.
    """

    def __init__(self, limit: int = MAX_ENTRIES) -> None:
        self.counts: Counter[str] = Counter()
        self.forgotten = 0
        self._limit = limit

    def add(self, items: Iterable[str]) -> None:
        self.counts.update(items)
        if len(self.counts) > 2 * self._limit:
            most_frequent = Counter(dict(self.counts.most_common(self._limit)))
            self.forgotten += len(self.counts) - len(most_frequent)
            self.counts = most_frequent


class DriftRow(BaseModel, frozen=True):
    """The part of a row that drift compares."""

    query: str
    original: float | None = None
    """Top-1 score of the original question; None where it was not retrieved."""
    rewrite: float | None = None
    """Top-1 score of the rewrite."""

    @classmethod
    def of(cls, row: Row) -> "DriftRow":
        return cls(
            query=row.query,
            original=top1_of(row.original_retrieved),
            rewrite=top1_of(row.answer_retrieved),
        )


class RowSummary(BaseModel, frozen=True):
    """Counts and a sample of rows.

    Rows that were never questions (an empty cell, a duplicate) are left out.
    """

    rows: int = 0
    failed: int = 0
    intents: dict[str, int] = {}
    sample: list[DriftRow] = []


class RowSummaryBuilder:
    """Takes rows one at a time and summarises them."""

    def __init__(self) -> None:
        self.rows = 0
        self.failed = 0
        self._intents = BoundedCounter()
        self._sample: BottomK[DriftRow] = BottomK(SAMPLE_ROWS)

    def add(self, row: Row) -> None:
        """Count the row if it was a question."""
        if not row.was_question:
            return
        self.rows += 1
        if row.status == "failed":
            self.failed += 1
        # Without gold documents, the words of the rewrite tell what is asked for.
        self._intents.add(documents_of(row.gold_id) or keywords(row))
        if self._sample.wants(row.id):
            self._sample.add(row.id, DriftRow.of(row))

    def build(self) -> RowSummary:
        return RowSummary(
            rows=self.rows,
            failed=self.failed,
            intents=dict(self._intents.counts),
            sample=self._sample.items(),
        )


def grams(text: str) -> list[str]:
    """Character bigrams of text without spaces between words, and whole alphanumeric runs.

    Repetitions count. No dictionary is needed, which would lack the name of a new product.
    """
    return bigrams(_WORDS.findall(text.lower()))


def keywords(row: Row) -> list[str]:
    """The words that SFT would learn, each once."""
    # An answer that is graded by rule is no list of keywords.
    if row.parts is not None:
        return []
    words = (row.target or "").split()
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
    """Distances by the names in `_RESPECTS`; a respect that one side lacks is left out."""
    new_intents: Unseen | None = None
    failed_share: float = 0.0
    parent_failed_share: float = 0.0


class Drift(BaseModel, frozen=True):
    """A version compared with its parent: its new rows, and all its rows.

    Most of all its rows are in the parent too.
    """

    parent: str
    arrivals: Shift
    whole: Shift
    threshold: float

    @property
    def sides(self) -> tuple[tuple[str, Shift], ...]:
        """The two comparisons, by the names of their rows."""
        return (("the new rows", self.arrivals), ("all rows", self.whole))

    @property
    def warnings(self) -> dict[str, float]:
        """The distance beyond chance of each respect that has drifted."""
        warnings: dict[str, float] = {}
        for rows, side in self.sides:
            for name, found_distance in side.distances.items():
                is_significant = found_distance.p_value <= SIGNIFICANT
                if is_significant and found_distance.excess >= self.threshold:
                    warnings[f"{name} of {rows}"] = found_distance.excess
        return warnings

    @property
    def sentence(self) -> str:
        """The comparison in one paragraph, for people."""
        arrivals = self.arrivals
        whole = self.whole
        subject = "No question"
        if arrivals.rows:
            subject = f"{count(arrivals.rows)} of {count(whole.rows)} questions"
        text = f"{subject} came in since {self.parent}"
        if arrivals.rows and arrivals.new_intents:
            intents = arrivals.new_intents
            text += f", {intents.share:.0%} of their intents new ({intents.expected:.0%} expected)"
        text += f"; failures {whole.parent_failed_share:.1%} → {whole.failed_share:.1%}. "
        if not self.warnings:
            return f"{text}No drift beyond chance and threshold."
        details = []
        for warning, excess in self.warnings.items():
            details.append(f"{warning} ({number(excess, 2)} beyond chance)")
        return f"{text}Drift: {', '.join(details)}."


def _score_categories(score: float | None) -> Categories:
    return [] if score is None else [score_bucket(score)]


_RESPECTS: dict[str, Callable[[DriftRow], Categories]] = {
    "vocabulary": lambda row: grams(row.query),
    "length": lambda row: [length_bucket(row.query)],
    "original score": lambda row: _score_categories(row.original),
    "rewrite score": lambda row: _score_categories(row.rewrite),
}
"""The respects in which rows are compared, and the categories of a row in each."""


def drift(
    parent_id: str, parent: RowSummary, arrivals: RowSummary, whole: RowSummary, threshold: float
) -> Drift:
    """Compare a version with its parent.

    Args:
        arrivals: summary of the rows whose ids the parent lacks.
        whole: summary of all rows.
        threshold: least distance beyond chance that gives a warning.
    """
    return Drift(
        parent=parent_id,
        arrivals=shift(parent, arrivals),
        whole=shift(parent, whole),
        threshold=threshold,
    )


def shift(parent: RowSummary, rows: RowSummary) -> Shift:
    """Compare some rows of a version with all rows of its parent."""
    distances: dict[str, Distance] = {}
    for name, respect in _RESPECTS.items():
        parent_categories = list(map(respect, parent.sample))
        row_categories = list(map(respect, rows.sample))
        found_distance = distance(parent_categories, row_categories)
        if found_distance:
            distances[name] = found_distance
    return Shift(
        rows=rows.rows,
        distances=distances,
        new_intents=unseen(parent.intents, rows.intents),
        failed_share=rows.failed / max(rows.rows, 1),
        parent_failed_share=parent.failed / max(parent.rows, 1),
    )


def distance(old: Sequence[Categories], new: Sequence[Categories]) -> Distance | None:
    """Jensen–Shannon distance of two samples' categories, and its null from permuting whole rows.

    None where a side has no category at all.
    """
    rows = list(filter(None, (*old, *new)))
    old_rows = sum(map(bool, old))
    if old_rows in (0, len(rows)):
        return None
    numbers: dict[str, int] = {}
    codes: list[int] = []
    for row in rows:
        for category in row:
            codes.append(numbers.setdefault(category, len(numbers)))
    category_codes = np.array(codes)
    owners = np.repeat(np.arange(len(rows)), list(map(len, rows)))
    is_new = np.arange(len(rows)) >= old_rows
    observed = _jensen_shannon(category_codes, is_new[owners])

    # A fixed seed, so that a version has the same drift whenever it is described again.
    random = np.random.default_rng(0)
    null_distances: list[float] = []
    for _ in range(DRAWS):
        is_drawn = random.permutation(is_new)
        null_distances.append(_jensen_shannon(category_codes, is_drawn[owners]))
    null = np.array(null_distances)
    expected = float(np.sqrt(np.mean(null**2)))
    # Distances that differ only by rounding count as equal.
    at_least_observed = np.sum(null >= observed - 1e-12)
    return Distance(
        distance=observed,
        expected=expected,
        excess=math.sqrt(max(0.0, observed**2 - expected**2)),
        p_value=float((1 + at_least_observed) / (1 + DRAWS)),
    )


def unseen(old: Mapping[str, int], new: Mapping[str, int]) -> Unseen | None:
    """The share of new items; None where either side is empty."""
    new_total = sum(new.values())
    old_total = sum(old.values())
    if not new_total or not old_total:
        return None
    unseen_total = sum(times for name, times in new.items() if name not in old)
    singletons = list(old.values()).count(1)
    return Unseen(share=unseen_total / new_total, expected=singletons / old_total)


def _jensen_shannon(codes: NDArray[np.int_], is_new: NDArray[np.bool_]) -> float:
    """Distance of the categories of new rows and of old ones.

    Args:
        codes: a number for each category of each row.
        is_new: whether the row of that category is a new one.
    """
    # SciPy takes long to import, and most who import this module compare nothing.
    from scipy.spatial.distance import jensenshannon  # type: ignore[import-untyped]

    size = int(codes.max()) + 1
    new = np.bincount(codes[is_new], minlength=size)
    old = np.bincount(codes[~is_new], minlength=size)
    # Where both are the same, rounding asks for the root of −1e-17.
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(jensenshannon(old, new, base=2)))
