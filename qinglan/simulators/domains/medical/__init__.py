"""The medical assistant: patients' questions, answers that are not always safe, a doctor and a
judge.

The sample is a workbook of questions with answers as the raw data give them. Dev and test ask only
about pairs, and half the time in phrasings, that no other split shows. Many answers to dangerous
questions lack a required statement; those of the gold pool are complete, as if an adviser had
corrected them. Column 标准文档 names what a question is about, so that questions about one thing count
as one in the intervals.
"""

from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from qinglan.config import Columns, Embedded
from qinglan.rows import Split, normalise
from qinglan.simulators.domains import (
    Domain,
    Pretraining,
    SamplePaths,
    draw_rows,
    draw_splits,
    write_workbook,
)
from qinglan.simulators.domains.medical import corpus, judge
from qinglan.simulators.domains.medical import facts as domain
from qinglan.simulators.domains.medical.facts import TOPICS, MedicalQuestion

P_DANGEROUS = 0.55
P_GOLD = 0.1
"""Of all questions, those whose answers an adviser has checked and completed."""
P_THOUGHTS = 0.3
P_WITHOUT_ANSWER = 0.02
HEADER = ("回答", "思维链", "关键词", "数据池")
"""Beside question, split and intent: the recipe's further columns and the pool."""


class MedicalSampleRow(NamedTuple):
    question: MedicalQuestion
    split: Split
    answer: str
    thoughts: str
    pool: str


def build_sample(config: Embedded) -> list[MedicalSampleRow]:
    """Train, then dev, then test; ConfigError where there are not so many different questions."""
    return draw_splits(config, partial(_draw, set()))


def _draw(taken: set[str], split: Split, count: int, rng: Random) -> list[MedicalSampleRow]:
    def draw(number: int) -> MedicalSampleRow | None:
        # Every kind of danger is as frequent as any other, however many things there are to ask
        # about.
        pairs = domain.pairs(split, rng.random() < P_DANGEROUS)
        topic = rng.choice(sorted({topic for topic, _ in pairs}))
        pair = rng.choice([pair for pair in pairs if pair[0] == topic])
        question = domain.ask(rng, *pair, phrased=split if number % 2 else "train")
        if (key := normalise(question.text)) in taken:
            return None
        taken.add(key)
        return _row(rng, question, split)

    return draw_rows(split, count, draw)


def _row(rng: Random, question: MedicalQuestion, split: Split) -> MedicalSampleRow:
    is_gold = rng.random() < P_GOLD
    answer = domain.full_answer(question) if is_gold else domain.given_answer(rng, question)
    if not is_gold and rng.random() < P_WITHOUT_ANSWER:
        answer = ""
    first, second = domain.facts(question.topic, question.thing)
    thoughts = f"问的是{question.thing}的{TOPICS[question.topic].word}，要点是{first}和{second}。"
    thoughts = thoughts if rng.random() < P_THOUGHTS else ""
    return MedicalSampleRow(question, split, answer, thoughts, "gold" if is_gold else "")


def write_sample(directory: Path, config: Embedded) -> SamplePaths:
    """Write `questions.xlsx`, the same bytes for the same config; there is no knowledge base."""
    columns = Columns()
    header = [columns.query, *HEADER, columns.split, columns.intent, columns.gold]
    path = directory / "questions.xlsx"
    write_workbook(path, "问题", header, map(_cells, build_sample(config)))
    return SamplePaths(path)


def _cells(row: MedicalSampleRow) -> list[str]:
    topic = TOPICS[row.question.topic]
    keywords = "、".join(domain.facts(row.question.topic, row.question.thing))
    subject = f"{row.question.thing}-{row.question.topic}"
    return [
        row.question.text,
        row.answer,
        row.thoughts,
        keywords,
        row.pool,
        row.split,
        topic.word,
        subject,
    ]


DOMAIN = Domain(
    name="medical",
    models={
        "simulated-medical-doctor": judge.doctor_answer,
        "simulated-medical-judge": judge.judge_json,
    },
    write_sample=write_sample,
    documents=corpus.documents,
    words=corpus.words,
    characters=corpus.characters,
    pretraining=Pretraining(steps=400, context_tokens=512, documents_per_step=100),
)
