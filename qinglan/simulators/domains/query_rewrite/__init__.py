"""Query rewriting: questions about supplements, a knowledge base with its own wording, a teacher
and a judge.

The sample, which ships with Qinglan, is a workbook of colloquial questions and the knowledge base
that answers them, made from `facts` by a seed. Dev and test ask only about product × intent pairs,
and half the time in phrasings, that no other split shows. `python -m benchmarks.describe_sample`
prints its figures.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

from qinglan.config import Columns, Embedded, Tenant
from qinglan.rows import Split, normalise, row_id
from qinglan.runs.artifacts import write_jsonl
from qinglan.simulators.domains import (
    Domain,
    Pretraining,
    SamplePaths,
    draw_rows,
    draw_splits,
    rounds,
    write_workbook,
)
from qinglan.simulators.domains.query_rewrite import corpus, teacher
from qinglan.simulators.domains.query_rewrite import facts as domain
from qinglan.simulators.domains.query_rewrite.facts import INTENTS, Document, RewriteQuestion, pairs

NEAR_DUPLICATE_JACCARD = 0.85


@dataclass(frozen=True)
class RewriteSampleRow:
    question: RewriteQuestion
    product: str
    intent: str
    split: Split
    unseen_phrasing: bool = False

    @property
    def gold_id(self) -> str:
        return f"{self.product}-{self.intent}"


def build_sample(config: Embedded) -> tuple[list[RewriteSampleRow], list[Document]]:
    """The rows, train then dev then test, and the knowledge base; ConfigError where too many rows
    are wanted."""
    return draw_splits(config, partial(_draw, _Taken())), domain.documents()


class _Taken:
    """The workbook's questions, and once training is closed also all that are too similar to one of
    training."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._training: list[frozenset[str]] = []
        self._postings: dict[str, list[int]] = defaultdict(list)
        self.is_training_closed = False
        """Once it is, questions that nearly equal an earlier one are refused."""

    def add(self, question: RewriteQuestion) -> bool:
        """Take a question; False where it may not be used."""
        key = row_id(Tenant().id, question.query, question.profile, question.history)
        grams = trigrams(question)
        if key in self._ids or (
            self.is_training_closed and self._nearest(grams) >= NEAR_DUPLICATE_JACCARD
        ):
            return False
        self._ids.add(key)
        if not self.is_training_closed:
            for gram in grams:
                self._postings[gram].append(len(self._training))
            self._training.append(grams)
        return True

    def _nearest(self, grams: frozenset[str]) -> float:
        shared = Counter(index for gram in grams for index in self._postings.get(gram, ()))
        return max(
            (n / (len(grams) + len(self._training[i]) - n) for i, n in shared.items()), default=0.0
        )


def trigrams(question: RewriteQuestion) -> frozenset[str]:
    """Character trigrams of the normalised query and history."""
    text = normalise(question.query + question.history)
    return frozenset(text[i : i + 3] for i in range(max(1, len(text) - 2)))


def _draw(taken: _Taken, split: Split, count: int, rng: Random) -> list[RewriteSampleRow]:
    taken.is_training_closed = split != "train"
    asked = rounds(pairs(split), rng)

    def draw(number: int) -> RewriteSampleRow | None:
        product, intent = next(asked)
        phrased = split if number % 2 else "train"
        question = domain.ask(rng, product, intent, phrased)
        return (
            RewriteSampleRow(question, product, intent, split, phrased != "train")
            if taken.add(question)
            else None
        )

    rows = draw_rows(split, count, draw)
    rng.shuffle(rows)
    return rows


def write_sample(directory: Path, config: Embedded) -> SamplePaths:
    """Write `questions.xlsx` and `kb.jsonl`, the same bytes for the same config."""
    rows, knowledge_base = build_sample(config)
    paths = SamplePaths(directory / "questions.xlsx", documents_path := directory / "kb.jsonl")
    write_jsonl(documents_path, (asdict(document) for document in knowledge_base))
    columns = Columns()
    header = [
        columns.query,
        columns.profile,
        columns.history,
        columns.gold,
        columns.split,
        columns.intent,
    ]
    write_workbook(paths.workbook, "问题", header, map(_cells, rows))
    return paths


def _cells(row: RewriteSampleRow) -> list[str]:
    question = row.question
    return [
        question.query,
        question.profile,
        question.history,
        row.gold_id,
        row.split,
        INTENTS[row.intent].name,
    ]


DOMAIN = Domain(
    name="query_rewrite",
    models={
        "simulated-rewriter": teacher.teach,
        "simulated-keywords": lambda text, _seed: teacher.extract(text),
        "simulated-judge": teacher.judge_json,
    },
    write_sample=write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
    pretraining=Pretraining(noise_share=0.25),
)
