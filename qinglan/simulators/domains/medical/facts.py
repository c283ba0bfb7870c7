"""The facts of the medical sample: medicines, complaints, emergencies, hardships, and how users ask
about them.

The answers resemble those of hurried doctors: the facts are right, but more than half of the
answers to dangerous questions lack a required statement, and some give forbidden advice. Whether
the writer was careful depends on what the question is about, so that a student that imitates the
answers is safe on some things only. This replaces a data set of real answers; it is no medical
advice.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random
from typing import Literal, NamedTuple

from qinglan.rows import Split, hash_fraction
from qinglan.simulators.domains import load_facts, owner_of


class Thing(NamedTuple):
    """What a question is about: what users call it, and the two facts that an answer needs."""

    names: tuple[str, ...]
    facts: tuple[str, str] | dict[str, tuple[str, str]]
    """By topic where the topic decides."""


@dataclass(frozen=True)
class Topic:
    """A kind of question: its subject, its phrasings, and what its answers must, may and must not
    add."""

    kind: Literal["medicine", "complaint", "emergency", "hardship"]
    """What it is about."""
    word: str
    phrasings: dict[Split, tuple[str, ...]]
    """Dev and test use train's as well."""
    answer: str
    statements: tuple[str, ...] = ()
    """What an answer must say beside its facts; none where the question is not dangerous."""
    forbidden_advice: tuple[str, ...] = ()
    """What it must never say."""


@dataclass(frozen=True)
class _Tables:
    things: dict[str, dict[str, Thing]]
    topics: dict[str, Topic]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]


_TABLES = load_facts(__package__, _Tables)
TOPICS, MEDICINES = _TABLES.topics, _TABLES.things["medicine"]
PREFIXES, SUFFIXES = _TABLES.prefixes, _TABLES.suffixes

P_CAREFUL = 0.5
"""Share of dangerous things whose answers have a careful writer."""
P_STATED = {True: 0.9, False: 0.1}
"""How often each required statement is there, by whether the writer was careful."""
P_FORBIDDEN = 0.1
"""Share of the dangerous answers with forbidden advice."""
P_TEST_PAIR = 0.3
P_DEV_PAIR = 0.15
_PAIR_SEED = 1915


@dataclass(frozen=True)
class MedicalQuestion:
    text: str
    topic: str
    thing: str
    other: str = ""
    """The second medicine where the question names one."""


def things(topic: str) -> list[str]:
    return list(_TABLES.things[TOPICS[topic].kind])


def names(topic: str, thing: str) -> tuple[str, ...]:
    """What users call it."""
    return _TABLES.things[TOPICS[topic].kind][thing].names


def facts(topic: str, thing: str) -> tuple[str, str]:
    """The two facts that an answer needs: the sample's keywords."""
    known = _TABLES.things[TOPICS[topic].kind][thing].facts
    return known[topic] if isinstance(known, dict) else known


def pair_split(topic: str, thing: str) -> Split:
    """Which split owns a pair: no other one asks about it."""
    return owner_of(hash_fraction(f"{_PAIR_SEED}|split|{topic}|{thing}"), P_TEST_PAIR, P_DEV_PAIR)


@cache
def pairs(split: Split, dangerous: bool | None = None) -> tuple[tuple[str, str], ...]:
    """All (topic, thing) pairs of a split; only the dangerous ones, or only the others, where
    `dangerous` is given."""
    wanted = [
        topic for topic, known in TOPICS.items() if dangerous in (None, bool(known.statements))
    ]
    return tuple(
        (topic, thing)
        for topic in wanted
        for thing in things(topic)
        if pair_split(topic, thing) == split
    )


def ask(rng: Random, topic: str, thing: str, phrased: Split = "train") -> MedicalQuestion:
    """A question about a pair, in a phrasing of the split `phrased`."""
    phrasing = rng.choice(TOPICS[topic].phrasings[phrased])
    other = rng.choice([name for name in MEDICINES if name != thing]) if "{o}" in phrasing else ""
    called = rng.choice(MEDICINES[other].names) if other else ""
    text = phrasing.format(n=rng.choice(names(topic, thing)), o=called)
    return MedicalQuestion(rng.choice(PREFIXES) + text + rng.choice(SUFFIXES), topic, thing, other)


def statement(topic: str, thing: str) -> str:
    first, second = facts(topic, thing)
    return TOPICS[topic].answer.format(n=thing, a=first, b=second)


def full_answer(question: MedicalQuestion) -> str:
    return statement(question.topic, question.thing) + _sentence(TOPICS[question.topic].statements)


def given_answer(rng: Random, question: MedicalQuestion) -> str:
    """An answer as in the raw data: some required statements are missing, and some give forbidden
    advice."""
    known = TOPICS[question.topic]
    careful = hash_fraction(f"{_PAIR_SEED}|careful|{question.topic}|{question.thing}") < P_CAREFUL
    stated = [statement for statement in known.statements if rng.random() < P_STATED[careful]]
    advice = (
        [rng.choice(known.forbidden_advice)]
        if known.forbidden_advice and rng.random() < P_FORBIDDEN
        else []
    )
    return statement(question.topic, question.thing) + _sentence((*advice, *stated))


def _sentence(clauses: tuple[str, ...]) -> str:
    return "，".join(clauses) + "。" if clauses else ""


# ---- what a question is about ----

_LABEL = re.compile("^(?:患者情况|之前|问题)：", re.MULTILINE)


class _Phrasing(NamedTuple):
    topic: str
    split: Split
    pattern: re.Pattern[str]


def understand(text: str) -> MedicalQuestion | None:
    """The question, which may follow facts about the patient; None where it is about nothing in
    this domain."""
    asked = _LABEL.split(text)[-1]
    for topic, _, pattern in _phrasings():
        if found := pattern.search(asked):
            return MedicalQuestion(asked, topic, _owners()[topic, found["n"]])
    return None


def reveals_held_out(text: str) -> bool:
    """Whether a text asks about a pair, or uses a phrasing, that training never shows."""
    found = ((known, match) for known in _phrasings() if (match := known.pattern.search(text)))
    return any(
        known.split != "train"
        or pair_split(known.topic, _owners()[known.topic, match["n"]]) != "train"
        for known, match in found
    )


@cache
def _phrasings() -> tuple[_Phrasing, ...]:
    """The longer ones first, since one may be part of another."""
    medicines = _either(chain.from_iterable(known.names for known in MEDICINES.values()))
    found = [
        (topic, phrasing, split)
        for topic, known in TOPICS.items()
        for split, phrasings in known.phrasings.items()
        for phrasing in phrasings
    ]
    made = []
    for topic, phrasing, split in sorted(found, key=lambda one: -len(one[1])):
        called = _either(chain.from_iterable(names(topic, thing) for thing in things(topic)))
        pattern = (
            re.escape(phrasing)
            .replace(r"\{n\}", f"(?P<n>{called})")
            .replace(r"\{o\}", f"(?:{medicines})")
        )
        made.append(_Phrasing(topic, split, re.compile(pattern)))
    return tuple(made)


def _either(names: Iterable[str]) -> str:
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


@cache
def _owners() -> dict[tuple[str, str], str]:
    """Topic and name → what is called so."""
    pairs = [(topic, thing) for topic in TOPICS for thing in things(topic)]
    return {(topic, name): thing for topic, thing in pairs for name in names(topic, thing)}
