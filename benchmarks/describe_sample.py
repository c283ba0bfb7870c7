"""Figures of the sample: `python -m benchmarks.describe_sample` calls the simulated teacher and RAG
without HTTP.

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


def _asked(row: RewriteSampleRow) -> str:
    return user_text(row.question.query, row.question.profile, row.question.history)


class SampleFigures(NamedTuple):
    """Measures of a sample, by name; top-1 is the share of rows whose gold document is retrieved
    first."""

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
    measure = _Measure(Retriever(documents), {row: rewrite(_asked(row), seed) for row in rows})
    train, test = ([row for row in rows if row.split == split] for split in ("train", "test"))
    selected = [
        row for row in train if measure.retrieve(measure.rewrites[row]).top1_score >= min_top1_score
    ]
    return SampleFigures(
        top1={
            "original test": measure.top1((row, row.question.query) for row in test),
            "teacher train": measure.teacher_top1(train),
            "teacher train, selected": measure.teacher_top1(selected),
            "teacher test": measure.teacher_top1(test),
            "teacher test, unseen phrasings": measure.teacher_top1(
                r for r in test if r.unseen_phrasing
            ),
            "teacher test, history decides": measure.teacher_top1(
                r for r in test if r.question.query.startswith("那")
            ),
            "teacher test, profile decides": measure.teacher_top1(
                r for r in test if _profile_decides(r)
            ),
            "oracle test": measure.top1((row, title(row.product, row.intent)) for row in test),
            "share selected": round(len(selected) / len(train), 3),
            "share profile decides": round(sum(map(_profile_decides, rows)) / len(rows), 3),
        },
        teacher_top1_by_intent={
            intent: measure.teacher_top1(row for row in test if row.intent == intent)
            for intent in INTENTS
        },
        selected_with_kb_wording=_kb_wordings(selected, measure.rewrites),
        quality=measure.qualities(),
        quality_of_titles={
            intent: measure.mean_quality(title(product, intent) for product in PRODUCTS)
            for intent in INTENTS
        },
        judge=_judge_means(test, measure.rewrites),
    )


class _Measure:
    """Retrieval results, remembered by query."""

    def __init__(self, retriever: Retriever, rewrites: Mapping[RewriteSampleRow, str]) -> None:
        self._retriever, self.rewrites = retriever, rewrites
        self._found: dict[str, Retrieved] = {}

    def retrieve(self, query: str) -> Retrieved:
        if query not in self._found:
            hits = self._retriever.search(query)
            ids, scores = tuple(hit.document.id for hit in hits), tuple(hit.score for hit in hits)
            self._found[query] = Retrieved(ids=ids, scores=scores)
        return self._found[query]

    def top1(self, queries: Iterable[tuple[RewriteSampleRow, str]]) -> float:
        hits = [self.retrieve(query).rank(row.gold_id) == 1 for row, query in queries]
        return round(sum(hits) / max(1, len(hits)), 3)

    def teacher_top1(self, rows: Iterable[RewriteSampleRow]) -> float:
        return self.top1((row, self.rewrites[row]) for row in rows)

    def mean_quality(self, queries: Iterable[str]) -> float:
        values = [self.retrieve(query).quality for query in queries]
        return round(sum(values) / len(values), 3)

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
    terms = {
        intent: sum(
            row.intent == intent and INTENTS[intent].kb_term in rewrites[row] for row in selected
        )
        for intent in MISMATCHED
    }
    names = {
        product: sum(row.product == product and product in rewrites[row] for row in selected)
        for product in NAME_MISMATCH
    }
    return terms | names


def _judge_means(
    test: Sequence[RewriteSampleRow], rewrites: Mapping[RewriteSampleRow, str]
) -> dict[str, float]:
    def mean(candidates: Iterable[tuple[RewriteSampleRow, str]]) -> float:
        scores = [judge(f"{_asked(row)}\n改写：{text}").score for row, text in candidates]
        return round(sum(scores) / len(scores), 2)

    return {
        "teacher": mean((row, rewrites[row]) for row in test),
        "oracle": mean((row, title(row.product, row.intent)) for row in test),
        "bare product": mean((row, row.product) for row in test),
        "product and 功效与作用": mean(
            (row, f"{row.product} 功效与作用") for row in test if row.intent != "effect"
        ),
        "original": mean((row, row.question.query) for row in test),
    }


def main() -> int:
    """Describe the default sample."""
    config = Embedded()
    rows, documents = build_sample(config)
    described = describe(rows, documents, Select().min_top1_score, config.sample_seed)
    sys.stdout.write(json.dumps(described._asdict(), ensure_ascii=False, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
