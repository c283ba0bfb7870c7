"""The data card of a dataset version: its contents, its dropped rows with reasons, and its origin.

Built from a stream of rows; `card_markdown` renders it.
"""

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal, Self, get_args

import numpy as np
from pydantic import BaseModel

from qinglan.data.dataset.splits import LEAK
from qinglan.data.versions.drift import BoundedCounter, Drift, keywords, length_bucket
from qinglan.rows import BottomK, Row, Split, documents_of, top1_of
from qinglan.runs.artifacts import Artifact

FEW_ROWS = 5
"""RL finds a term only if SFT gave it some probability: four or five rows (docs/decisions.md)."""
TOP = 20
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_EXAMPLES = 5
Augmented = Mapping[str, Mapping[str, int]]
"""Questions with noise by kind: `sft` and `rl`, those in the training files, and `left_out`."""
_JUDGE = "judge"


class Origin(BaseModel, frozen=True):
    """The identity of a version and its origin."""

    id: str
    tenant: str
    profile: str
    run_id: str
    created: str
    """ISO, UTC."""
    parent: str = ""
    """The latest version when this one was published; empty for a tenant's first."""
    pins: str = ""
    """The version whose splits its questions kept: the latest when its inputs were split first."""
    inputs: str = ""
    """Digest of the dataset stage's inputs; two versions of the same inputs have the same."""
    forgotten: int = 0
    """Rows that `qinglan forget` took out since: the files' digests are new, the id is as it
    was."""
    recipe: str = ""
    recipe_version: str = ""
    teacher: str = ""
    judge: str = ""

    def with_forgotten(self, forgotten: int) -> Self:
        """The origin of the version after so many of its rows were taken out in all."""
        return self.model_copy(update={"forgotten": forgotten})


class CardExample(BaseModel, frozen=True):
    """A row that the card shows."""

    row_id: str
    source: str
    query: str
    answer: str | None
    status: Literal["ok", "failed"]
    reason: str | None
    split: str | None
    original_score: float | None
    rewrite_score: float | None
    judge_score: float | None
    ledger: str | None
    """Ledger key of the call that gave the answer."""

    @classmethod
    def of(cls, row: Row) -> Self:
        return cls(
            row_id=row.id,
            source=row.source,
            query=row.query,
            answer=row.target,
            status=row.status,
            reason=row.reason,
            split=row.split,
            original_score=top1_of(row.original_retrieved),
            rewrite_score=top1_of(row.answer_retrieved),
            judge_score=row.judge_score,
            ledger=row.answer_request,
        )


class CardFile(BaseModel, frozen=True):
    """A file of the version."""

    sha256: str
    rows: int | None


class Card(BaseModel, frozen=True):
    """The data card; counts are of all rows unless a field says otherwise."""

    origin: Origin
    rows: int
    ok: int
    reasons: dict[str, int]
    splits: dict[str, dict[str, int]]
    """Questions by split: `rows` and `ok`."""
    tenants: dict[str, int]
    lengths: dict[str, int]
    """Questions by number of characters."""
    with_profile: int
    with_history: int
    labelled: int
    """Questions that name their gold document."""
    intents: dict[str, int]
    """Questions by gold document, the most frequent."""
    intent_count: int
    terms: dict[str, int]
    """Number of SFT training rows that have a word in their rewrite, for the most frequent
    words."""
    term_count: int
    rare_terms: int
    """Words that fewer than `FEW_ROWS` SFT training rows have."""
    scores: dict[str, dict[str, float]]
    """Quantiles of the top-1 score, `original` and `rewrite`, of the rows that have both."""
    pools: dict[str, dict[str, int]] = {}
    """Questions by pool: `rows`, `ok`, and by split the rows that are ok."""
    parts: dict[str, float] = {}
    """Means of the answers' scores by rule."""
    judge_mean: float | None = None
    """Mean of the judge's scores, 0–5; None where no answer has one."""
    near_duplicates: int
    """Rows left out because they nearly repeat one of a stricter split."""
    decontaminated: int
    """Rows left out because they nearly repeat a question of an evaluation workbook."""
    augmented: dict[str, dict[str, int]] = {}
    """Training questions with noise, by kind: `sft` and `rl`, those in the files, and `left_out`,
    those that nearly repeat a question of dev, test or evaluation. No other count of the card holds
    them, except the files' rows."""
    reviews: dict[str, int]
    examples: list[CardExample]
    files: dict[str, CardFile]
    drift: Drift | None = None


class CardBuilder:
    """Takes rows one at a time, and keeps counts, scores (16 bytes a row) and ten examples."""

    def __init__(self) -> None:
        self._rows = 0
        self._ok = 0
        self._with_profile = 0
        self._with_history = 0
        self._labelled = 0
        self._reasons: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._lengths: Counter[str] = Counter()
        self._reviews: Counter[str] = Counter()
        self._splits: dict[str, Counter[str]] = {}
        self._pools: dict[str, Counter[str]] = {}
        self._grades: dict[str, tuple[float, int]] = {}
        """Sum and number of the values of each grade."""
        self._intents = BoundedCounter()
        self._terms = BoundedCounter()
        self._scores = {"original": array("d"), "rewrite": array("d")}
        self._examples: dict[str, BottomK[CardExample]] = {
            "ok": BottomK(_EXAMPLES, "card"),
            "failed": BottomK(_EXAMPLES, "card"),
        }

    def add(self, row: Row) -> None:
        self._rows += 1
        self._tenants[row.tenant] += 1
        if row.status == "ok":
            self._ok += 1
        else:
            self._reasons[row.reason or "unknown"] += 1
        examples = self._examples[row.status]
        if examples.wants(row.id):
            examples.add(row.id, CardExample.of(row))
        if row.was_question:
            self._add_question(row)

    def build(
        self,
        origin: Origin,
        artifacts: Mapping[str, Artifact],
        drift: Drift | None,
        augmented: Augmented,
    ) -> Card:
        terms = self._terms.counts
        rare_terms = sum(rows < FEW_ROWS for rows in terms.values())
        means = {name: total / count for name, (total, count) in sorted(self._grades.items())}
        judge_mean = means.pop(_JUDGE, None)
        files: dict[str, CardFile] = {}
        for name, artifact in sorted(artifacts.items()):
            files[name] = CardFile(sha256=artifact.sha256, rows=artifact.rows)
        scores: dict[str, dict[str, float]] = {}
        for name, values in self._scores.items():
            if values:
                scores[name] = _quantiles(values)
        return Card(
            origin=origin,
            rows=self._rows,
            ok=self._ok,
            reasons=dict(self._reasons.most_common()),
            splits={split: dict(self._splits[split]) for split in sorted(self._splits)},
            pools={pool: dict(self._pools[pool]) for pool in sorted(self._pools)},
            parts=means,
            judge_mean=judge_mean,
            tenants=dict(self._tenants.most_common(TOP)),
            lengths=dict(sorted(self._lengths.items(), key=_shortest)),
            with_profile=self._with_profile,
            with_history=self._with_history,
            labelled=self._labelled,
            intents=dict(self._intents.counts.most_common(TOP)),
            intent_count=len(self._intents.counts) + self._intents.forgotten,
            terms=dict(terms.most_common(TOP)),
            term_count=len(terms) + self._terms.forgotten,
            # The counter forgets the rarest ones.
            rare_terms=rare_terms + self._terms.forgotten,
            scores=scores,
            near_duplicates=self._reasons[f"{LEAK}test"] + self._reasons[f"{LEAK}dev"],
            decontaminated=self._reasons[f"{LEAK}evaluation"],
            augmented={kind: dict(counts) for kind, counts in augmented.items()},
            reviews=dict(self._reviews.most_common()),
            examples=list(chain(self._examples["ok"].items(), self._examples["failed"].items())),
            files=files,
            drift=drift,
        )

    def _add_question(self, row: Row) -> None:
        is_ok = row.status == "ok"
        split = self._splits.setdefault(row.split or "none", Counter(rows=0, ok=0))
        split.update(rows=1, ok=int(is_ok))
        self._lengths[length_bucket(row.query)] += 1
        if row.profile:
            self._with_profile += 1
        if row.history:
            self._with_history += 1
        if row.pool:
            self._add_to_pool(row.pool, row)
        self._add_grades(row)
        if row.review:
            self._reviews[row.review] += 1
        if row.gold_id:
            self._labelled += 1
            self._intents.add(documents_of(row.gold_id))
        if is_ok and row.split == "train":
            self._terms.add(keywords(row))
        original_score = top1_of(row.original_retrieved)
        rewrite_score = top1_of(row.answer_retrieved)
        # The quantiles are to be compared, so both are of the same rows.
        if original_score is not None and rewrite_score is not None:
            self._scores["original"].append(original_score)
            self._scores["rewrite"].append(rewrite_score)

    def _add_to_pool(self, name: str, row: Row) -> None:
        if name not in self._pools:
            self._pools[name] = Counter(dict.fromkeys(("rows", "ok", *get_args(Split)), 0))
        pool = self._pools[name]
        pool["rows"] += 1
        if row.status == "ok":
            pool["ok"] += 1
            if row.split:
                pool[row.split] += 1

    def _add_grades(self, row: Row) -> None:
        """Add the scores of the row's answer: the judge's, and those by rule."""
        grades: dict[str, float] = {}
        if row.judge_score is not None:
            grades[_JUDGE] = row.judge_score
        grades.update(row.parts or {})
        for name, value in grades.items():
            total, count = self._grades.get(name, (0.0, 0))
            self._grades[name] = (total + value, count + 1)


def _shortest(bucket: tuple[str, int]) -> int:
    """The shortest length of a bucket that is named `6–10` or `161+`."""
    name, _ = bucket
    return int(re.split(r"\D", name)[0])


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    quantiles = np.quantile(np.asarray(values), QUANTILES)
    rounded: dict[str, float] = {}
    for share, value in zip(QUANTILES, quantiles, strict=True):
        rounded[f"{share:.0%}"] = round(float(value), 4)
    return rounded
