"""The medical assistant: patients' questions, unsafe answers among others, a doctor and a judge.

The sample is a workbook of questions with answers as the raw data give them. Dev and test ask only
about pairs, and half the time in phrasings, that no other split shows. Many answers to dangerous
questions lack a required statement; those of the gold pool are complete, as if an adviser had
corrected them. Column 标准文档 names what a question is about, so that questions about one thing
count as one in the intervals.
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
from qinglan.simulators.domains.medical import corpus, facts, judge
from qinglan.simulators.domains.medical.facts import TOPICS, MedicalQuestion

P_DANGEROUS = 0.55
P_GOLD = 0.1
"""Share of all questions whose answers an adviser has checked and completed."""
P_THOUGHTS = 0.3
P_WITHOUT_ANSWER = 0.02
HEADER = ("回答", "思维链", "关键词", "数据池")
"""The recipe's further columns and the pool, beside question, split and intent."""


class MedicalSampleRow(NamedTuple):
    question: MedicalQuestion
    split: Split
    answer: str
    thoughts: str
    pool: str


def build_sample(config: Embedded) -> list[MedicalSampleRow]:
    """Train, then dev, then test; ConfigError where there are not so many different questions."""
    return draw_splits(config, partial(_draw, set()))


def _draw(drawn: set[str], split: Split, count: int, rng: Random) -> list[MedicalSampleRow]:
    """Draw the rows of a split; `drawn` has all questions so far, of whatever split."""

    def draw(number: int) -> MedicalSampleRow | None:
        topic, thing = _draw_pair(rng, split)
        # Every second question is in a phrasing of its own split.
        phrasing_split = split if number % 2 else "train"
        question = facts.ask(rng, topic, thing, phrasing_split)
        identity = normalise(question.text)
        if identity in drawn:
            return None
        drawn.add(identity)
        return _draw_row(rng, question, split)

    return draw_rows(split, count, draw)


def _draw_pair(rng: Random, split: Split) -> tuple[str, str]:
    """Topic and thing of a question."""
    pairs = facts.pairs(split, rng.random() < P_DANGEROUS)
    # The topic is drawn first: every kind of danger is as frequent as any other, however many
    # things there are to ask about.
    topic = rng.choice(sorted({topic for topic, _ in pairs}))
    return rng.choice([pair for pair in pairs if pair[0] == topic])


def _draw_row(rng: Random, question: MedicalQuestion, split: Split) -> MedicalSampleRow:
    is_gold = rng.random() < P_GOLD
    pool = "gold" if is_gold else ""
    answer = _draw_answer(rng, question, is_gold)
    first_fact, second_fact = facts.facts(question.topic, question.thing)
    word = TOPICS[question.topic].word
    thoughts = ""
    if rng.random() < P_THOUGHTS:
        thoughts = f"问的是{question.thing}的{word}，要点是{first_fact}和{second_fact}。"
    return MedicalSampleRow(question, split, answer, thoughts, pool)


def _draw_answer(rng: Random, question: MedicalQuestion, is_gold: bool) -> str:
    if is_gold:
        return facts.full_answer(question)
    answer = facts.given_answer(rng, question)
    if rng.random() < P_WITHOUT_ANSWER:
        return ""
    return answer


def write_sample(directory: Path, config: Embedded) -> SamplePaths:
    """Write `questions.xlsx`, the same bytes for the same config; there is no knowledge base."""
    columns = Columns()
    header = [columns.query, *HEADER, columns.split, columns.intent, columns.gold]
    path = directory / "questions.xlsx"
    write_workbook(path, "问题", header, map(_cells, build_sample(config)))
    return SamplePaths(path)


def _cells(row: MedicalSampleRow) -> list[str]:
    """The row's cells, in the order of the header."""
    question = row.question
    keywords = "、".join(facts.facts(question.topic, question.thing))
    subject = f"{question.thing}-{question.topic}"
    return [
        question.text,
        row.answer,
        row.thoughts,
        keywords,
        row.pool,
        row.split,
        TOPICS[question.topic].word,
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
