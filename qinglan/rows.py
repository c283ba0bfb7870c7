"""One question and what is known of it: the row that every data stage reads and writes.

A row's id is a hash of what the user asked (tenant, normalised query, profile, history and the
recipe's further inputs), so it is the same in every file, run and night, whatever the row's place
in the workbook. Where profile or history are extracted, it is a hash of the workbook's cells with
the dialogue, whatever the teacher answers.
"""

import hashlib
import heapq
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel

Item = TypeVar("Item")
Split = Literal["train", "dev", "test"]

LEFT_FOR_LATER = "left_for_later"
DIALOGUE = "dialogue"
"""Key in `Row.inputs` of a dialogue that is to be read, from ingest to extract; no later stage has
it."""
HINTS = {
    "empty_query": "fill in the question or delete the row",
    "empty_input": "fill in every column that the recipe needs, or delete the row",
    "not_text": "write it as text; numbers, dates, errors and lists are not questions",
    "query_too_long": "shorten the question, or allow it with --set data.max_query_chars=N",
    "context_too_long": "shorten its profile, history or inputs, or allow them with --set data.max_context_chars=N",
    "dialogue_too_long": "shorten the dialogue, or allow it with --set data.max_dialogue_chars=N",
    "duplicate": "delete one of the two",
    "formula_cell": "paste the formula's result as a value",
    "merged_cell": "unmerge the cells and give every row its own value",
    "extra_cells": "the line has more cells than the header; put text that contains commas in double quotes",
    "bad_split": "write train, dev or test, or leave the cell empty",
    LEFT_FOR_LATER: "a later run takes it; to take more at once, raise data.max_new_rows",
    "forgotten": "`qinglan forget` removed it; delete it at its source too",
}
"""What to do about each reason for which reading fails a row."""

INPUT_REASONS = frozenset(HINTS)
"""Rows failed for one of these are no questions of this run: no stage after reading looks at
them."""

# 5.6 is not 56, >7 not <7 and C# not C. A dash before a number goes: it is a hyphen or a slip more
# often than a minus.
_PUNCTUATION = re.compile(r"(?<!\d)(?:[^\w+#%<>≤≥]|_)|(?:[^\w+#%<>≤≥]|_)(?!\d)")


def normalise(text: str) -> str:
    """NFKC, lower case, no white space, no punctuation without meaning, nothing at all without a
    letter or digit."""
    kept = _PUNCTUATION.sub(_mark, unicodedata.normalize("NFKC", text).lower())
    return kept if any(map(str.isalnum, kept)) else ""


def _mark(found: re.Match[str]) -> str:
    """The sign, where it is part of a word, as vowels are in Hindi and tones in Thai; a variant of
    an emoji is none."""
    sign = found[0]
    is_kept = unicodedata.category(sign) in (
        "Mn",
        "Mc",
    ) and "VARIATION SELECTOR" not in unicodedata.name(sign)
    return sign if is_kept else ""


def row_id(
    tenant: str,
    query: str,
    profile: str = "",
    history: str = "",
    inputs: Mapping[str, str] | None = None,
) -> str:
    """A stable 16-digit id from what was asked; an empty input counts as none."""
    asked = (
        f"{name}={text}"
        for name, value in sorted((inputs or {}).items())
        if (text := normalise(value))
    )
    key = "\x1f".join((tenant, normalise(query), normalise(profile), normalise(history), *asked))
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def bigrams(runs: Iterable[str]) -> list[str]:
    """The character bigrams of each run of text, with repetitions; a run of ASCII, or of one
    character, is whole."""
    found: list[str] = []
    for run in runs:
        is_whole = run.isascii() or len(run) == 1
        found += [run] if is_whole else [run[i : i + 2] for i in range(len(run) - 1)]
    return found


def hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key alone: samples and splits by it agree between runs
    and machines."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:13], 16) / 16**13


class BottomK(Generic[Item]):
    """Keeps the `size` items whose keys have the lowest hashes: a uniform sample of a stream,
    whatever its order."""

    def __init__(self, size: int, seed: str = "") -> None:
        self._size, self._seed = size, seed
        self._heap: list[tuple[float, int, Item]] = []
        self._number = count()  # keeps items from being compared

    def wants(self, key: str) -> bool:
        """Would an item of this key be kept? Saves making those that would not."""
        priority = -hash_fraction(f"{self._seed}:{key}")
        return self._size > 0 and (len(self._heap) < self._size or priority > self._heap[0][0])

    def add(self, key: str, item: Item) -> None:
        if self.wants(key):
            heapq.heappush(
                self._heap, (-hash_fraction(f"{self._seed}:{key}"), next(self._number), item)
            )
            if len(self._heap) > self._size:
                heapq.heappop(self._heap)

    def items(self) -> list[Item]:
        """Those kept, the lowest hash first."""
        return [item for _, _, item in sorted(self._heap, key=lambda entry: -entry[0])]


class Retrieved(BaseModel, frozen=True):
    """What the RAG returned for one text, best first. Scores are the service's `reranker_score` in
    [0, 1]."""

    ids: tuple[str | None, ...] = ()
    scores: tuple[float, ...] = ()
    titles: tuple[str, ...] = ()
    """The first characters of each passage, for reports."""
    first_passage: str = ""
    """Title and beginning of the best passage, where a judge is to read it; rows of the data stage
    don't keep it."""

    @property
    def top1_score(self) -> float:
        return self.scores[0] if self.scores else 0.0

    @property
    def quality(self) -> float:
        """rq = 0.6·top1 + 0.4·mean(top3); missing places count as 0."""
        return 0.6 * self.top1_score + 0.4 * sum(self.scores[:3]) / 3

    def rank(self, gold_id: str | None) -> int:
        """1-based rank of the best of a row's gold documents, 0 where none was recalled."""
        wanted = {gold_id, *documents_of(gold_id)} - {None, ""}
        return next(
            (place for place, document_id in enumerate(self.ids, 1) if document_id in wanted), 0
        )


def documents_of(gold_id: str | None) -> list[str]:
    """The ids in a cell that may name several documents: `d1; d2`. An id that holds a semicolon
    itself is cut too."""
    return [each.strip() for each in re.split("[;；\n]", gold_id or "") if each.strip()]


def top1_of(found: Retrieved | None) -> float | None:
    return None if found is None else found.top1_score


class Row(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    id: str
    tenant: str
    query: str
    profile: str = ""
    history: str = ""
    gold_id: str | None = None
    """Id of the document that answers the question, or of several of which each does: `d1; d2`."""
    intent: str | None = None
    """What kind of question it is, where the workbook says so: evaluation shows each kind by
    itself."""
    inputs: dict[str, str] = {}
    """What else the recipe asked the workbook for, by `Input.name`; an empty cell is absent."""
    pool: str | None = None
    """Which set of questions it belongs to, such as `red_team`, where the workbook says so."""
    split: Split | None = None
    group: str | None = None
    """Smallest id among its near-duplicates and itself, once rows have splits; None where it has
    none."""
    source: str
    """Where the row stands: ``file.xlsx!Sheet1!A2`` (the query's cell) or ``file.jsonl:7`` (the
    line)."""

    status: Literal["ok", "failed"] = "ok"
    reason: str | None = None
    """Why the row failed, e.g. ``empty_answer``; an ok row has one only where a reviewer gave the
    only answer."""

    answer: str | None = None
    """The teacher's answer, such as its rewrite of the question."""
    answer_request: str | None = None
    """Ledger key of the call that produced it."""
    answer_latency_ms: float | None = None
    answer_cost_usd: float | None = None
    judge_score: float | None = None
    """The judge's score of the teacher's answer, 0–5; None where it was not asked."""
    parts: dict[str, float] | None = None
    """The teacher's answer graded by rule; None where the recipe has no rules, or it was not
    graded."""
    original_retrieved: Retrieved | None = None
    answer_retrieved: Retrieved | None = None
    review: Literal["accept", "reject", "correct"] | None = None
    """A reviewer's verdict on this answer, which overrides the selection's."""
    corrected: str | None = None
    """The reviewer's own answer, which the student learns instead of the teacher's."""

    @property
    def target(self) -> str | None:
        """What SFT learns from this row: the teacher's answer, or a reviewer's correction of it."""
        return self.corrected or self.answer

    @property
    def unit(self) -> str:
        """What rows share that are not independent: the document (of several the first), else the
        near-duplicates."""
        return next(iter(documents_of(self.gold_id)), self.group or self.id)

    def failed(self, reason: str) -> "Row":
        return self.model_copy(update={"status": "failed", "reason": reason})


def groups_of(rows: Sequence[Row]) -> dict[str, str]:
    """What a bootstrap draws, by row id: units, those together that questions with several gold
    documents connect."""
    first: dict[str, str] = {}

    def group(unit: str) -> str:
        while unit in first:
            unit = first[unit]
        return unit

    for row in rows:
        lowest, *others = sorted({group(each) for each in documents_of(row.gold_id) or [row.unit]})
        first |= dict.fromkeys(others, lowest)
    return {row.id: group(row.unit) for row in rows}


ArmName = str
"""An arm's name: `original`, `teacher`, `base`, `sft`, `rl`, `champion` or a compared teacher's."""


class ArmRow(BaseModel, frozen=True, hide_input_in_errors=True):
    """One question through one arm."""

    row_id: str
    text: str | None = None
    """The query sent to the RAG, or the answer; None where the arm gave none."""
    reason: str | None = None
    retrieved: Retrieved | None = None
    """What the RAG found with a query."""
    parts: dict[str, float] | None = None
    """An answer graded by rule, by part; None where it was not graded."""
    judge_score: float | None = None
    """Mean of `judge_scores`, or what validation's judge said where there was no panel."""
    judge_scores: tuple[float, ...] = ()
    """The panel's, a score per pass; one alone where the question had only one text to judge."""
    requests: tuple[str, ...] = ()
    """Ledger keys of the calls that stand behind this row: the teacher's, where there is one, then
    the judge's."""
    latency_ms: float | None = None
    """Time to get the text, retrieval excluded; None where it was not measured."""
    cost_usd: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def measured(self) -> bool:
        """Whether the text met what says how good it is: retrieval or rules. Only then it has
        values."""
        return self.retrieved is not None or self.parts is not None


class RowCounts:
    """Counts the rows of a stream without holding them in memory."""

    def __init__(self) -> None:
        self.total, self.ok = 0, 0
        self.reasons: Counter[str] = Counter()
        """How many rows were dropped for each reason."""

    def dropped_since(self, before: "RowCounts") -> dict[str, int]:
        """Rows by reason that were dropped between the two counts, the most frequent reason
        first."""
        dropped = self.reasons - before.reasons
        return dict(sorted(dropped.items(), key=lambda item: (-item[1], item[0])))

    def pass_through(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The same rows; each is counted before it is handed on."""
        for row in rows:
            self.total += 1
            if row.status == "ok":
                self.ok += 1
            else:
                self.reasons[row.reason or "unknown"] += 1
            yield row
