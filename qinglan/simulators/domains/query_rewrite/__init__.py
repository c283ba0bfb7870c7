"""Query rewriting: questions about supplements, a knowledge base, a teacher and a judge.

The sample, which ships with Qinglan, is a workbook of colloquial questions and the knowledge base
that answers them in its own wording, made from `facts` by a seed. Dev and test ask only about
product × intent pairs, and half the time in phrasings, that no other split shows. `python -m
benchmarks.describe_sample` prints its figures.
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
    ngrams,
    rounds,
    write_workbook,
)
from qinglan.simulators.domains.query_rewrite import corpus, facts, teacher
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
    """The rows, train then dev then test, and the knowledge base.

    Raises ConfigError where too many rows are wanted.
    """
    rows = draw_splits(config, partial(_draw, _DrawnQuestions()))
    return rows, facts.documents()


class _DrawnQuestions:
    """The workbook's questions so far, so that none is drawn twice.

    Once training is closed, also questions that are too similar to one of training are refused.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._training: list[frozenset[str]] = []
        # Trigram → places in `_training`, as in an inverted index.
        self._postings: dict[str, list[int]] = defaultdict(list)
        self.is_training_closed = False

    def add(self, question: RewriteQuestion) -> bool:
        """Add a question; False where it may not be used."""
        # The id by which reading the workbook finds duplicates.
        identity = row_id(Tenant().id, question.query, question.profile, question.history)
        if identity in self._ids:
            return False
        grams = trigrams(question)
        if self.is_training_closed and self._nearest(grams) >= NEAR_DUPLICATE_JACCARD:
            return False
        self._ids.add(identity)
        if not self.is_training_closed:
            for gram in grams:
                self._postings[gram].append(len(self._training))
            self._training.append(grams)
        return True

    def _nearest(self, grams: frozenset[str]) -> float:
        """Jaccard similarity to the most similar question of training."""
        shared_counts = Counter[int]()
        for gram in grams:
            shared_counts.update(self._postings.get(gram, ()))
        similarities = (
            shared / (len(grams) + len(self._training[index]) - shared)
            for index, shared in shared_counts.items()
        )
        return max(similarities, default=0.0)


def trigrams(question: RewriteQuestion) -> frozenset[str]:
    """Character trigrams of the normalised query and history."""
    text = normalise(question.query + question.history)
    # A shorter text counts as one, so that equal ones are alike.
    return frozenset(ngrams(text, 3) or [text])


def _draw(drawn: _DrawnQuestions, split: Split, count: int, rng: Random) -> list[RewriteSampleRow]:
    drawn.is_training_closed = split != "train"
    pairs_in_turn = rounds(pairs(split), rng)

    def draw(number: int) -> RewriteSampleRow | None:
        product, intent = next(pairs_in_turn)
        phrasing_split = split if number % 2 else "train"
        question = facts.ask(rng, product, intent, phrasing_split)
        if not drawn.add(question):
            return None
        is_unseen = phrasing_split != "train"
        return RewriteSampleRow(question, product, intent, split, is_unseen)

    rows = draw_rows(split, count, draw)
    # They were drawn in turn: seen and unseen phrasings alternate.
    rng.shuffle(rows)
    return rows


def write_sample(directory: Path, config: Embedded) -> SamplePaths:
    """Write `questions.xlsx` and `kb.jsonl`, the same bytes for the same config."""
    rows, knowledge_base = build_sample(config)
    paths = SamplePaths(directory / "questions.xlsx", directory / "kb.jsonl")
    write_jsonl(directory / "kb.jsonl", (asdict(document) for document in knowledge_base))
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
    """The row's cells, in the order of the header."""
    question = row.question
    return [
        question.query,
        question.profile,
        question.history,
        row.gold_id,
        row.split,
        INTENTS[row.intent].name,
    ]


def _extract(user_text: str, _seed: int) -> str:
    return teacher.extract(user_text)


DOMAIN = Domain(
    name="query_rewrite",
    models={
        "simulated-rewriter": teacher.teach,
        "simulated-keywords": _extract,
        "simulated-judge": teacher.judge_json,
    },
    write_sample=write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
    pretraining=Pretraining(noise_share=0.25),
)
