"""The data card of a dataset version: its contents, its dropped rows with reasons, and its origin.

Built from a stream of rows; `card_markdown` renders it.
"""

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from pydantic import BaseModel

from qinglan.data.dataset.splits import LEAK
from qinglan.data.versions.drift import BoundedCounter, Drift, keywords, length_bucket
from qinglan.rows import INPUT_REASONS, BottomK, Row, Split, documents_of, top1_of
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


class CardExample(BaseModel, frozen=True):
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


class CardFile(BaseModel, frozen=True):
    sha256: str
    rows: int | None


class Card(BaseModel, frozen=True):
    """The data card; counts are of all rows unless a field says otherwise."""

    origin: Origin
    rows: int
    ok: int
    reasons: dict[str, int]
    splits: dict[str, dict[str, int]]
    """Of the questions: by split, `rows` and `ok`."""
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
    """How many SFT training rows have a word in their rewrite, the most frequent words."""
    term_count: int
    rare_terms: int
    """Words that fewer than `FEW_ROWS` SFT training rows have."""
    scores: dict[str, dict[str, float]]
    """Quantiles of the top-1 score, `original` and `rewrite`, of the rows that have both."""
    pools: dict[str, dict[str, int]] = {}
    """Of the questions in a pool: by pool, `rows`, `ok`, and by split the rows that are ok."""
    parts: dict[str, float] = {}
    """Means of the answers' scores by rule."""
    judge_mean: float | None = None
    """Of the answers that the judge scored, 0–5."""
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
        self._reasons, self._tenants, self._lengths, self._reviews, self._flags = (
            Counter[str]() for _ in range(5)
        )
        self._splits, self._pools = dict[str, Counter[str]](), dict[str, Counter[str]]()
        self._grades: dict[str, tuple[float, int]] = {}
        self._intents, self._terms = BoundedCounter(), BoundedCounter()
        self._scores = {"original": array("d"), "rewrite": array("d")}
        self._examples: dict[str, BottomK[CardExample]] = {
            s: BottomK(_EXAMPLES, "card") for s in ("ok", "failed")
        }

    def add(self, row: Row) -> None:
        self._flags.update(rows=1, ok=row.status == "ok")
        self._tenants[row.tenant] += 1
        if row.status == "failed":
            self._reasons[row.reason or "unknown"] += 1
        if self._examples[row.status].wants(row.id):
            example = CardExample(
                **row.model_dump(
                    include={"source", "query", "status", "reason", "split", "judge_score"}
                ),
                row_id=row.id,
                answer=row.target,
                original_score=top1_of(row.original_retrieved),
                rewrite_score=top1_of(row.answer_retrieved),
                ledger=row.answer_request,
            )
            self._examples[row.status].add(row.id, example)
        if row.reason not in INPUT_REASONS:
            self._add_question(row)

    def build(
        self,
        origin: Origin,
        artifacts: Mapping[str, Artifact],
        drift: Drift | None,
        augmented: Augmented,
    ) -> Card:
        flags, kept = self._flags, self._terms.counts
        means = {name: total / n for name, (total, n) in sorted(self._grades.items())}
        judge_mean = means.pop(_JUDGE, None)
        return Card(
            origin=origin,
            rows=flags["rows"],
            ok=flags["ok"],
            reasons=dict(self._reasons.most_common()),
            splits={split: dict(self._splits[split]) for split in sorted(self._splits)},
            pools={pool: dict(self._pools[pool]) for pool in sorted(self._pools)},
            parts=means,
            judge_mean=judge_mean,
            tenants=dict(self._tenants.most_common(TOP)),
            lengths=dict(
                sorted(self._lengths.items(), key=lambda item: int(re.split(r"\D", item[0])[0]))
            ),
            with_profile=flags["profile"],
            with_history=flags["history"],
            labelled=flags["labelled"],
            intents=dict(self._intents.counts.most_common(TOP)),
            intent_count=len(self._intents.counts) + self._intents.forgotten,
            terms=dict(kept.most_common(TOP)),
            term_count=len(kept) + self._terms.forgotten,
            rare_terms=sum(n < FEW_ROWS for n in kept.values()) + self._terms.forgotten,
            scores={name: _quantiles(values) for name, values in self._scores.items() if values},
            near_duplicates=sum(self._reasons[LEAK + split] for split in ("test", "dev")),
            decontaminated=self._reasons[LEAK + "evaluation"],
            augmented={kind: dict(counts) for kind, counts in augmented.items()},
            reviews=dict(self._reviews.most_common()),
            examples=[example for sample in self._examples.values() for example in sample.items()],
            files={
                name: CardFile(sha256=a.sha256, rows=a.rows)
                for name, a in sorted(artifacts.items())
            },
            drift=drift,
        )

    def _add_question(self, row: Row) -> None:
        is_ok = row.status == "ok"
        self._splits.setdefault(row.split or "none", Counter(rows=0, ok=0)).update(rows=1, ok=is_ok)
        self._lengths[length_bucket(row.query)] += 1
        self._flags.update(
            profile=bool(row.profile), history=bool(row.history), labelled=bool(row.gold_id)
        )
        if row.pool:
            pool = self._pools.setdefault(
                row.pool, Counter(dict.fromkeys(("rows", "ok", *get_args(Split)), 0))
            )
            pool.update(rows=1, ok=is_ok)
            pool.update({row.split: is_ok} if row.split else {})
        grades = {} if row.judge_score is None else {_JUDGE: row.judge_score}
        for name, value in (grades | (row.parts or {})).items():
            total, n = self._grades.get(name, (0.0, 0))
            self._grades[name] = (total + value, n + 1)
        if row.review:
            self._reviews[row.review] += 1
        if row.gold_id:
            self._intents.add(documents_of(row.gold_id))
        if is_ok and row.split == "train":
            self._terms.add(keywords(row))
        original, found = top1_of(row.original_retrieved), top1_of(row.answer_retrieved)
        if original is not None and found is not None:
            self._scores["original"].append(original)
            self._scores["rewrite"].append(found)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    found = np.quantile(np.asarray(values), QUANTILES)
    return {f"{q:.0%}": round(float(value), 4) for q, value in zip(QUANTILES, found, strict=True)}
