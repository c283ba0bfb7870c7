"""The row that every data stage reads and writes: one question and what is known of it.

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
from statistics import fmean
from typing import Generic, Literal, Self, TypeVar

from pydantic import BaseModel

Item = TypeVar("Item")
Split = Literal["train", "dev", "test"]
ReviewVerdict = Literal["accept", "reject", "correct"]

LEFT_FOR_LATER = "left_for_later"
DIALOGUE = "dialogue"
"""Key in `Row.inputs` of a dialogue that is to be read, from ingest to extract; no later stage has
it."""
HINTS = {
    "empty_query": "fill in the question or delete the row",
    "empty_input": "fill in every column that the recipe needs, or delete the row",
    "not_text": "write it as text; numbers, dates, errors and lists are not questions",
    "query_too_long": "shorten the question, or allow it with --set data.max_query_chars=N",
    "context_too_long": (
        "shorten its profile, history or inputs, or allow them with --set data.max_context_chars=N"
    ),
    "dialogue_too_long": "shorten the dialogue, or allow it with --set data.max_dialogue_chars=N",
    "duplicate": "delete one of the two",
    "formula_cell": "paste the formula's result as a value",
    "merged_cell": "unmerge the cells and give every row its own value",
    "extra_cells": (
        "the line has more cells than the header; put text that contains commas in double quotes"
    ),
    "bad_split": "write train, dev or test, or leave the cell empty",
    LEFT_FOR_LATER: "a later run takes it; to take more at once, raise data.max_new_rows",
    "forgotten": "`qinglan forget` removed it; delete it at its source too",
}
"""The remedy for each reason for which reading fails a row."""

INPUT_REASONS = frozenset(HINTS)
"""Rows failed for one of these are no questions of this run: no stage after reading looks at
them."""

# 5.6 is not 56, >7 not <7 and C# not C. A dash before a number goes: it is a hyphen or a slip more
# often than a minus.
_PUNCTUATION = re.compile(r"(?<!\d)(?:[^\w+#%<>≤≥]|_)|(?:[^\w+#%<>≤≥]|_)(?!\d)")


def normalise(text: str) -> str:
    """Reduce a text to what makes it the same question as another.

    NFKC, lower case, without white space and without punctuation that has no meaning; empty where
    the text has no letter or digit.
    """
    lowered = unicodedata.normalize("NFKC", text).lower()
    text_without_punctuation = _PUNCTUATION.sub(_meaningful_mark, lowered)
    has_letter_or_digit = any(map(str.isalnum, text_without_punctuation))
    return text_without_punctuation if has_letter_or_digit else ""


def _meaningful_mark(match: re.Match[str]) -> str:
    """The matched sign where it is part of a word, otherwise an empty text."""
    sign = match[0]
    # Vowels of Hindi and tones of Thai are marks; a variant of an emoji is one too, but means
    # nothing.
    is_combining = unicodedata.category(sign) in ("Mn", "Mc")
    if is_combining and "VARIATION SELECTOR" not in unicodedata.name(sign):
        return sign
    return ""


def row_id(
    tenant: str,
    query: str,
    profile: str = "",
    history: str = "",
    inputs: Mapping[str, str] | None = None,
) -> str:
    """A stable id of 16 hexadecimal digits from what was asked; an empty input counts as none."""
    parts = [tenant, normalise(query), normalise(profile), normalise(history)]
    for name, value in sorted((inputs or {}).items()):
        text = normalise(value)
        if text:
            parts.append(f"{name}={text}")
    return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]


def bigrams(runs: Iterable[str]) -> list[str]:
    """The character bigrams of each run of text, with repetitions.

    A run of ASCII characters, or of a single character, counts as one unit.
    """
    grams: list[str] = []
    for run in runs:
        if run.isascii() or len(run) == 1:
            grams.append(run)
        else:
            grams.extend(run[start : start + 2] for start in range(len(run) - 1))
    return grams


def hash_fraction(key: str) -> float:
    """A number in [0, 1) that depends on the key alone.

    Samples and splits that are drawn by it agree between runs and machines.
    """
    return int(hashlib.sha256(key.encode()).hexdigest()[:13], 16) / 16**13


class BottomK(Generic[Item]):
    """Keeps the `size` items whose keys have the lowest hashes.

    This is a uniform sample of a stream, whatever the stream's order.
    """

    def __init__(self, size: int, seed: str = "") -> None:
        self._size = size
        self._seed = seed
        self._heap: list[tuple[float, int, Item]] = []
        # Entries of equal priority are told apart by their number: items are never compared.
        self._entry_numbers = count()

    def wants(self, key: str) -> bool:
        """Tell whether an item with this key would be kept, before the item is made."""
        if self._size <= 0:
            return False
        if len(self._heap) < self._size:
            return True
        return self._priority(key) > self._heap[0][0]

    def add(self, key: str, item: Item) -> None:
        if not self.wants(key):
            return
        heapq.heappush(self._heap, (self._priority(key), next(self._entry_numbers), item))
        if len(self._heap) > self._size:
            heapq.heappop(self._heap)

    def items(self) -> list[Item]:
        """The items that were kept, the lowest hash first."""
        lowest_hash_first = sorted(self._heap, key=lambda entry: -entry[0])
        return [item for _, _, item in lowest_hash_first]

    def _priority(self, key: str) -> float:
        # heapq pops the smallest entry first, so the highest hash must have the smallest priority.
        return -hash_fraction(f"{self._seed}:{key}")


class Retrieved(BaseModel, frozen=True):
    """The passages that the RAG returned for one text, best first.

    Scores are the service's `reranker_score` in [0, 1].
    """

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
        gold_ids = {gold_id, *documents_of(gold_id)} - {None, ""}
        for place, document_id in enumerate(self.ids, start=1):
            if document_id in gold_ids:
                return place
        return 0


def documents_of(gold_id: str | None) -> list[str]:
    """The document ids in a cell that may name several: `d1; d2`.

    An id that holds a semicolon itself is cut too.
    """
    parts = re.split("[;；\n]", gold_id or "")
    return [part.strip() for part in parts if part.strip()]


def top1_of(retrieved: Retrieved | None) -> float | None:
    """The best passage's score; None where nothing was asked."""
    return None if retrieved is None else retrieved.top1_score


class Row(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """One question of the workbook, its teacher's answer, and what the stages found of both."""

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
    review: ReviewVerdict | None = None
    """A reviewer's verdict on this answer, which overrides the selection's."""
    corrected: str | None = None
    """The reviewer's own answer, which the student learns instead of the teacher's."""

    @property
    def was_question(self) -> bool:
        """Tell whether reading took the row for a question, whatever became of it later."""
        return self.reason not in INPUT_REASONS

    @property
    def target(self) -> str | None:
        """The text that SFT learns: a reviewer's correction, otherwise the teacher's answer."""
        return self.corrected or self.answer

    @property
    def unit(self) -> str:
        """The key that rows share which are not independent of each other.

        It is the first gold document, otherwise the group of near-duplicates.
        """
        documents = documents_of(self.gold_id)
        if documents:
            return documents[0]
        return self.group or self.id

    def failed(self, reason: str) -> Self:
        """The row, out of the data set for this reason."""
        return self.model_copy(update={"status": "failed", "reason": reason})

    def kept(self, reason: str | None) -> Self:
        """The row, in the data set; the reason stays where only a reviewer gave an answer."""
        return self.model_copy(update={"status": "ok", "reason": reason})

    def with_id(self, row_id: str) -> Self:
        return self.model_copy(update={"id": row_id})

    def with_question(self, query: str, profile: str, history: str) -> Self:
        return self.model_copy(update={"query": query, "profile": profile, "history": history})

    def with_query(self, query: str) -> Self:
        return self.model_copy(update={"query": query})

    def with_context(self, profile: str, history: str) -> Self:
        return self.model_copy(update={"profile": profile, "history": history})

    def with_inputs(self, inputs: Mapping[str, str]) -> Self:
        """The row with these in place of all its inputs."""
        return self.model_copy(update={"inputs": dict(inputs)})

    def with_pool(self, pool: str | None) -> Self:
        return self.model_copy(update={"pool": pool})

    def with_split(self, split: Split) -> Self:
        return self.model_copy(update={"split": split})

    def with_group(self, group: str | None) -> Self:
        return self.model_copy(update={"group": group})

    def with_answer(
        self,
        answer: str,
        *,
        request: str | None = None,
        latency_ms: float | None = None,
        cost_usd: float | None = None,
    ) -> Self:
        """The row with the teacher's answer and what its call took."""
        return self.model_copy(
            update={
                "answer": answer,
                "answer_request": request,
                "answer_latency_ms": latency_ms,
                "answer_cost_usd": cost_usd,
            }
        )

    def without_answer(self) -> Self:
        """The row as if its teacher had not answered, with what the call took."""
        return self.model_copy(update={"answer": None})

    def with_retrieved(self, original: Retrieved | None, answer: Retrieved | None) -> Self:
        """The row with what the RAG returned for the question and for the teacher's answer."""
        return self.model_copy(update={"original_retrieved": original, "answer_retrieved": answer})

    def with_judge_score(self, judge_score: float | None) -> Self:
        return self.model_copy(update={"judge_score": judge_score})

    def with_parts(self, parts: Mapping[str, float]) -> Self:
        """The row with its answer's grades by rule."""
        return self.model_copy(update={"parts": dict(parts)})

    def with_review(self, verdict: ReviewVerdict | None, corrected: str | None) -> Self:
        return self.model_copy(update={"review": verdict, "corrected": corrected})


def groups_of(rows: Sequence[Row]) -> dict[str, str]:
    """The group that each row belongs to when a bootstrap draws groups, by row id.

    Rows of one unit are one group; a question with several gold documents joins their groups.
    """
    parents: dict[str, str] = {}

    def group_of(unit: str) -> str:
        while unit in parents:
            unit = parents[unit]
        return unit

    for row in rows:
        units = documents_of(row.gold_id) or [row.unit]
        lowest_group, *joined_groups = sorted({group_of(unit) for unit in units})
        for joined_group in joined_groups:
            parents[joined_group] = lowest_group
    return {row.id: group_of(row.unit) for row in rows}


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
    """Mean of `judge_scores`; without a panel the judge's score of this text alone."""
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
        """True where the text was retrieved with or graded by rule: it has metric values then."""
        return self.retrieved is not None or self.parts is not None

    def with_retrieved(self, retrieved: Retrieved | None) -> Self:
        return self.model_copy(update={"retrieved": retrieved})

    def with_reason(self, reason: str | None) -> Self:
        return self.model_copy(update={"reason": reason})

    def with_parts(self, parts: Mapping[str, float] | None) -> Self:
        return self.model_copy(update={"parts": parts})

    def with_judge_score(self, judge_score: float | None) -> Self:
        return self.model_copy(update={"judge_score": judge_score})

    def with_panel_scores(self, judge_scores: tuple[float, ...]) -> Self:
        """The row with the panel's scores, a score per pass, and their mean."""
        return self.model_copy(
            update={"judge_scores": judge_scores, "judge_score": fmean(judge_scores)}
        )

    def with_requests(self, requests: Iterable[str]) -> Self:
        """The row with further calls that stand behind it, by their ledger keys."""
        return self.model_copy(update={"requests": (*self.requests, *requests)})

    def with_cost(self, cost_usd: float | None) -> Self:
        return self.model_copy(update={"cost_usd": cost_usd})

    def with_tokens(self, prompt_tokens: int | None, completion_tokens: int | None) -> Self:
        return self.model_copy(
            update={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
        )


class RowCounts:
    """Counts the rows of a stream without holding them in memory."""

    def __init__(self) -> None:
        self.total = 0
        self.ok = 0
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
