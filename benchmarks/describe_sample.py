"""Figures of the sample, from the simulated teacher and RAG without HTTP.

    python -m benchmarks.describe_sample

Prints top-1 by kind of query, the teacher's by intent, and how often the training rows that pass
selection carry the knowledge base's own wording, without which reinforcement learning has nothing
to amplify.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from qinglan.config import Embedded, Select
from qinglan.recipes.query_rewrite import user_text
from qinglan.rows import Retrieved
from qinglan.simulators.domains.query_rewrite import RewriteSampleRow, build_sample
from qinglan.simulators.domains.query_rewrite.facts import (
    INFORMATIVE_PROFILES,
    INTENTS,
    NAME_MISMATCH,
    PRODUCTS,
    Document,
    title,
)
from qinglan.simulators.domains.query_rewrite.teacher import judge, rewrite
from qinglan.simulators.retriever import Retriever

MISMATCHED = tuple(name for name, intent in INTENTS.items() if intent.bridge)
Query = tuple[RewriteSampleRow, str]
"""A row, and a text to retrieve with in place of its question."""


class SampleFigures(NamedTuple):
    """Measures of a sample, by name.

    Top-1 is the share of rows whose gold document is retrieved first, rq the quality of what is
    retrieved.
    """

    top1: dict[str, float]
    teacher_top1_by_intent: dict[str, float]
    selected_with_kb_wording: dict[str, int]
    """Selected training rows in the knowledge base's wording, by mismatched intent and mismatched
    product."""
    quality: dict[str, float]
    """Mean rq over the pairs of the mismatched intents, by kind of query."""
    quality_of_titles: dict[str, float]
    """Mean rq of a title, by intent: the quality of a policy that writes one title for every
    question."""
    judge: dict[str, float]
    """Mean judge score of test rows, by kind of rewrite."""


def describe(
    rows: Sequence[RewriteSampleRow],
    documents: Sequence[Document],
    min_top1_score: float,
    seed: int,
) -> SampleFigures:
    """Measure a sample with the teacher that `seed` makes."""
    rewrites = {row: rewrite(_prompt(row), seed) for row in rows}
    # Queries repeat between the figures, and a search takes most of the time.
    measure = _Measure(Retriever(documents), rewrites)
    train = [row for row in rows if row.split == "train"]
    test = [row for row in rows if row.split == "test"]
    selected = [
        row for row in train if measure.retrieve(rewrites[row]).top1_score >= min_top1_score
    ]
    unseen = [row for row in test if row.unseen_phrasing]
    history_decides = [row for row in test if row.question.query.startswith("那")]
    profile_decides = [row for row in test if _profile_decides(row)]
    return SampleFigures(
        top1={
            "original test": measure.top1((row, row.question.query) for row in test),
            "teacher train": measure.teacher_top1(train),
            "teacher train, selected": measure.teacher_top1(selected),
            "teacher test": measure.teacher_top1(test),
            "teacher test, unseen phrasings": measure.teacher_top1(unseen),
            "teacher test, history decides": measure.teacher_top1(history_decides),
            "teacher test, profile decides": measure.teacher_top1(profile_decides),
            "oracle test": measure.top1((row, title(row.product, row.intent)) for row in test),
            "share selected": round(len(selected) / len(train), 3),
            "share profile decides": round(sum(map(_profile_decides, rows)) / len(rows), 3),
        },
        teacher_top1_by_intent=measure.teacher_top1_by_intent(test),
        selected_with_kb_wording=_kb_wordings(selected, rewrites),
        quality=measure.qualities(),
        quality_of_titles=measure.qualities_of_titles(),
        judge=_judge_means(test, rewrites),
    )


def _prompt(row: RewriteSampleRow) -> str:
    return user_text(row.question.query, row.question.profile, row.question.history)


class _Measure:
    """Retrieval results, remembered by query."""

    def __init__(self, retriever: Retriever, rewrites: Mapping[RewriteSampleRow, str]) -> None:
        self._retriever = retriever
        self._rewrites = rewrites
        self._retrieved: dict[str, Retrieved] = {}

    def retrieve(self, query: str) -> Retrieved:
        if query not in self._retrieved:
            hits = self._retriever.search(query)
            self._retrieved[query] = Retrieved(
                ids=tuple(hit.document.id for hit in hits),
                scores=tuple(hit.score for hit in hits),
            )
        return self._retrieved[query]

    def top1(self, queries: Iterable[Query]) -> float:
        hits = [self.retrieve(query).rank(row.gold_id) == 1 for row, query in queries]
        return round(sum(hits) / max(1, len(hits)), 3)

    def teacher_top1(self, rows: Iterable[RewriteSampleRow]) -> float:
        return self.top1((row, self._rewrites[row]) for row in rows)

    def teacher_top1_by_intent(self, rows: Iterable[RewriteSampleRow]) -> dict[str, float]:
        by_intent: dict[str, list[RewriteSampleRow]] = {intent: [] for intent in INTENTS}
        for row in rows:
            by_intent[row.intent].append(row)
        return {intent: self.teacher_top1(its_rows) for intent, its_rows in by_intent.items()}

    def mean_quality(self, queries: Iterable[str]) -> float:
        values = [self.retrieve(query).quality for query in queries]
        return round(sum(values) / len(values), 3)

    def qualities_of_titles(self) -> dict[str, float]:
        """Mean rq of a title over all products, by intent."""
        qualities: dict[str, float] = {}
        for intent in INTENTS:
            titles = [title(product, intent) for product in PRODUCTS]
            qualities[intent] = self.mean_quality(titles)
        return qualities

    def qualities(self) -> dict[str, float]:
        """Mean rq over the mismatched pairs, for what a policy might write."""
        pairs = [(product, INTENTS[intent]) for product in PRODUCTS for intent in MISMATCHED]
        return {
            "knowledge base's wording": self.mean_quality(
                f"{product} {intent.kb_term}" for product, intent in pairs
            ),
            "teacher's wording": self.mean_quality(
                f"{product} {intent.habit}" for product, intent in pairs
            ),
            "bare product": self.mean_quality(PRODUCTS),
            "product and 功效与作用": self.mean_quality(
                f"{product} 功效与作用" for product in PRODUCTS
            ),
            "wording without a product": self.mean_quality(intent.kb_term for _, intent in pairs),
            "all wordings at once": self.mean_quality(
                f"{product} {intent.kb_term} {intent.habit}" for product, intent in pairs
            ),
        }


def _profile_decides(row: RewriteSampleRow) -> bool:
    return row.question.profile in INFORMATIVE_PROFILES.get(row.intent, ())


def _kb_wordings(
    selected: Sequence[RewriteSampleRow], rewrites: Mapping[RewriteSampleRow, str]
) -> dict[str, int]:
    counts: dict[str, int] = {}
    for intent in MISMATCHED:
        term = INTENTS[intent].kb_term
        counts[intent] = sum(row.intent == intent and term in rewrites[row] for row in selected)
    for product in NAME_MISMATCH:
        counts[product] = sum(
            row.product == product and product in rewrites[row] for row in selected
        )
    return counts


def _judge_means(
    test: Sequence[RewriteSampleRow], rewrites: Mapping[RewriteSampleRow, str]
) -> dict[str, float]:
    other_intents = [row for row in test if row.intent != "effect"]
    return {
        "teacher": _judge_mean((row, rewrites[row]) for row in test),
        "oracle": _judge_mean((row, title(row.product, row.intent)) for row in test),
        "bare product": _judge_mean((row, row.product) for row in test),
        # For the intent `effect` that wording is right.
        "product and 功效与作用": _judge_mean(
            (row, f"{row.product} 功效与作用") for row in other_intents
        ),
        "original": _judge_mean((row, row.question.query) for row in test),
    }


def _judge_mean(candidates: Iterable[Query]) -> float:
    scores = [judge(f"{_prompt(row)}\n改写：{text}").score for row, text in candidates]
    return round(sum(scores) / len(scores), 2)


def main() -> int:
    """Describe the default sample."""
    config = Embedded()
    rows, documents = build_sample(config)
    described = describe(rows, documents, Select().min_top1_score, config.sample_seed)
    sys.stdout.write(json.dumps(described._asdict(), ensure_ascii=False, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
