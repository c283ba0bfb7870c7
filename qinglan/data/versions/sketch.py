"""What a dataset version remembers of its rows, in bounded memory: counts, and a sample for the next version's drift.

The sample is drawn by a hash of the row's id, so two versions of the same questions sample the same rows.
"""

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterable
from itertools import count
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from qinglan.rows import INPUT_REASONS, Row

SAMPLE_ROWS = 1000
MAX_ENTRIES = 300_000
MAX_TERM_CHARS = 40
_LENGTHS = (5, 10, 20, 40, 80, 160)
Item = TypeVar("Item")
_WORDS = re.compile(r"[^\W\da-z_]+|[a-z0-9]+")


class BoundedCounter:
    """Counts strings; forgets the rarest once there are twice `limit` different ones, and says how many it forgot."""

    def __init__(self, limit: int = MAX_ENTRIES) -> None:
        self.counts: Counter[str] = Counter()
        self.forgotten = 0
        self._limit = limit

    def add(self, items: Iterable[str]) -> None:
        """Count each of them."""
        self.counts.update(items)
        if len(self.counts) > 2 * self._limit:
            kept = Counter(dict(self.counts.most_common(self._limit)))
            self.forgotten += len(self.counts) - len(kept)
            self.counts = kept


class SampledRow(BaseModel):
    """What drift needs of one row."""

    model_config = ConfigDict(frozen=True)

    query: str
    original: float | None = None
    """Top-1 score of the user's own words; None where it was not retrieved."""
    rewrite: float | None = None


class Sketch(BaseModel):
    """Rows in short. Rows that were never questions (an empty cell, a duplicate) are left out."""

    model_config = ConfigDict(frozen=True)

    rows: int = 0
    failed: int = 0
    vocabulary: dict[str, int] = {}
    intents: dict[str, int] = {}
    sample: list[SampledRow] = []

    @property
    def failed_share(self) -> float:
        """Of the questions; 0 where there are none."""
        return self.failed / self.rows if self.rows else 0.0


class SketchBuilder:
    """Takes rows one at a time."""

    def __init__(self, sample_rows: int = SAMPLE_ROWS) -> None:
        self.rows = self.failed = 0
        self._vocabulary, self._intents = BoundedCounter(), BoundedCounter()
        self._sample: BottomK[SampledRow] = BottomK(sample_rows)

    def add(self, row: Row) -> None:
        """Count the row if it was a question."""
        if row.reason in INPUT_REASONS:
            return
        self.rows += 1
        self.failed += row.status == "failed"
        self._vocabulary.add(grams(row.query))
        self._intents.add(intents_of(row))
        if self._sample.wants(row.id):
            self._sample.add(row.id, SampledRow(query=row.query, original=original_score(row), rewrite=rewritten(row)))

    def build(self) -> Sketch:
        """What was seen so far."""
        return Sketch(
            rows=self.rows,
            failed=self.failed,
            vocabulary=dict(self._vocabulary.counts),
            intents=dict(self._intents.counts),
            sample=self._sample.items(),
        )


class BottomK(Generic[Item]):
    """The `size` items whose keys hash lowest: a uniform sample that depends neither on order nor on chance."""

    def __init__(self, size: int, seed: str = "") -> None:
        self._size, self._seed = size, seed
        self._heap: list[tuple[int, int, Item]] = []
        self._number = count()

    def wants(self, key: str) -> bool:
        """Would an item of this key be kept? Spares making those that would not."""
        return self._size > 0 and (len(self._heap) < self._size or self._rank(key) > self._heap[0][0])

    def add(self, key: str, item: Item) -> None:
        """Keep the item if its key hashes low enough."""
        if not self.wants(key):
            return
        heapq.heappush(self._heap, (self._rank(key), next(self._number), item))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def items(self) -> list[Item]:
        """Those kept, the lowest hash first."""
        return [item for _, _, item in sorted(self._heap, key=lambda entry: -entry[0])]

    def _rank(self, key: str) -> int:
        return -int.from_bytes(hashlib.blake2b(f"{self._seed}:{key}".encode(), digest_size=8).digest())


def grams(text: str) -> list[str]:
    """Bigrams of runs of letters without spaces between words, and alphanumeric runs whole, each as often as it is
    there. No dictionary has to know a new product's name."""
    found: list[str] = []
    for run in _WORDS.findall(text.lower()):
        if run.isascii() or len(run) == 1:
            found.append(run)
        else:
            found.extend(run[i : i + 2] for i in range(len(run) - 1))
    return found


def terms(text: str | None) -> list[str]:
    """The different words of a rewrite."""
    return list(dict.fromkeys(word[:MAX_TERM_CHARS] for word in (text or "").split()))


def keywords(row: Row) -> list[str]:
    """The words that SFT would learn; none of an answer that is graded by rule, which is no list of keywords."""
    return [] if row.parts is not None else terms(row.target)


def intents_of(row: Row) -> list[str]:
    """What a question is about: its gold document where it names one, else the words of its rewrite."""
    return [row.gold_id] if row.gold_id else keywords(row)


def original_score(row: Row) -> float | None:
    """Top-1 score of the user's own words."""
    return None if row.original_retrieved is None else row.original_retrieved.top1_score


def rewritten(row: Row) -> float | None:
    """Top-1 score of the teacher's rewrite."""
    return None if row.answer_retrieved is None else row.answer_retrieved.top1_score


def length_bucket(text: str) -> str:
    """Of a number of characters."""
    low = 0
    for high in _LENGTHS:
        if len(text) <= high:
            return f"{low}–{high}"
        low = high + 1
    return f"{low}+"


def score_bucket(score: float) -> str:
    """Tenths of [0, 1]."""
    low = min(max(int(score * 10), 0), 9)
    return f"{low / 10:.1f}–{(low + 1) / 10:.1f}"
