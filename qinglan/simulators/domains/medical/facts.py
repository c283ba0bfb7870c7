"""The facts of the medical sample, and how users ask about them.

They are medicines, complaints, emergencies and hardships. The answers resemble those of hurried
doctors: the facts are right, but more than half of the answers to dangerous questions lack a
required statement, and some give forbidden advice. Whether the writer was careful depends on what
the question is about, so that a student that imitates the answers is safe on some things only. This
replaces a data set of real answers; it is no medical advice.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal, NamedTuple

from qinglan.rows import Split, hash_fraction
from qinglan.simulators.domains import all_but, load_facts, owner_of, pattern_of_any


class Thing(NamedTuple):
    """The subject of a question: users' names for it, and the two facts that an answer needs."""

    names: tuple[str, ...]
    facts: tuple[str, str] | dict[str, tuple[str, str]]
    """By topic where the topic decides."""


@dataclass(frozen=True)
class Topic:
    """A kind of question: its subject, its phrasings, and the rules for its answers."""

    kind: Literal["medicine", "complaint", "emergency", "hardship"]
    """The kind of things that it is about."""
    word: str
    phrasings: dict[Split, tuple[str, ...]]
    """Dev and test use train's as well."""
    answer: str
    statements: tuple[str, ...] = ()
    """Statements that an answer must make beside its facts; none where the question is not
    dangerous."""
    forbidden_advice: tuple[str, ...] = ()
    """Advice that an answer must never give."""


@dataclass(frozen=True)
class _Tables:
    things: dict[str, dict[str, Thing]]
    topics: dict[str, Topic]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]


_TABLES = load_facts(__package__, _Tables)
TOPICS = _TABLES.topics
MEDICINES = _TABLES.things["medicine"]
PREFIXES = _TABLES.prefixes
SUFFIXES = _TABLES.suffixes

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
    """Users' names for a thing."""
    return _TABLES.things[TOPICS[topic].kind][thing].names


def facts(topic: str, thing: str) -> tuple[str, str]:
    """The two facts that an answer needs: the sample's keywords."""
    facts_of_thing = _TABLES.things[TOPICS[topic].kind][thing].facts
    return facts_of_thing[topic] if isinstance(facts_of_thing, dict) else facts_of_thing


def pair_split(topic: str, thing: str) -> Split:
    """The split that owns a pair: no other one asks about it."""
    return owner_of(hash_fraction(f"{_PAIR_SEED}|split|{topic}|{thing}"), P_TEST_PAIR, P_DEV_PAIR)


@cache
def pairs(split: Split, dangerous: bool | None = None) -> tuple[tuple[str, str], ...]:
    """All (topic, thing) pairs of a split.

    Only the dangerous ones, or only the others, where `dangerous` is given.
    """
    pairs_of_split = []
    for name, topic in TOPICS.items():
        is_dangerous = bool(topic.statements)
        if dangerous is not None and dangerous != is_dangerous:
            continue
        for thing in things(name):
            if pair_split(name, thing) == split:
                pairs_of_split.append((name, thing))
    return tuple(pairs_of_split)


def ask(rng: Random, topic: str, thing: str, phrased: Split = "train") -> MedicalQuestion:
    """A question about a pair, in a phrasing of the split `phrased`."""
    phrasing = rng.choice(TOPICS[topic].phrasings[phrased])
    other_medicine = ""
    other_name = ""
    if "{o}" in phrasing:
        other_medicine = rng.choice(all_but(MEDICINES, thing))
        other_name = rng.choice(MEDICINES[other_medicine].names)
    question = phrasing.format(n=rng.choice(names(topic, thing)), o=other_name)
    text = rng.choice(PREFIXES) + question + rng.choice(SUFFIXES)
    return MedicalQuestion(text, topic, thing, other_medicine)


def statement(topic: str, thing: str) -> str:
    """The facts about a thing as an answer states them."""
    first_fact, second_fact = facts(topic, thing)
    return TOPICS[topic].answer.format(n=thing, a=first_fact, b=second_fact)


def full_answer(question: MedicalQuestion) -> str:
    """The facts and all required statements."""
    statements = TOPICS[question.topic].statements
    return statement(question.topic, question.thing) + sentence(statements)


def given_answer(rng: Random, question: MedicalQuestion) -> str:
    """An answer as in the raw data.

    Some required statements are missing, and some answers give forbidden advice.
    """
    topic = TOPICS[question.topic]
    # A hash and no draw: who writes about a thing is careful about it every time.
    care = hash_fraction(f"{_PAIR_SEED}|careful|{question.topic}|{question.thing}")
    p_stated = P_STATED[care < P_CAREFUL]
    stated = [required for required in topic.statements if rng.random() < p_stated]
    advice = []
    if topic.forbidden_advice and rng.random() < P_FORBIDDEN:
        advice.append(rng.choice(topic.forbidden_advice))
    return statement(question.topic, question.thing) + sentence([*advice, *stated])


def sentence(clauses: Iterable[str]) -> str:
    """The clauses as a sentence; empty without any."""
    text = "，".join(clauses)
    return f"{text}。" if text else ""


# ---- what a question is about ----

_LABEL = re.compile("^(?:患者情况|之前|问题)：", re.MULTILINE)


class _Phrasing(NamedTuple):
    topic: str
    split: Split
    text: str
    pattern: re.Pattern[str]
    """Finds the phrasing with any name of a thing, as group `n`."""


def understand(text: str) -> MedicalQuestion | None:
    """The question, which may follow facts about the patient.

    None where it is about nothing in this domain.
    """
    question = _LABEL.split(text)[-1]
    first_phrasing = next(_phrasings_in(question), None)
    if first_phrasing is None:
        return None
    phrasing, match = first_phrasing
    return MedicalQuestion(question, phrasing.topic, _thing_of_match(phrasing, match))


def reveals_held_out(text: str) -> bool:
    """Whether a text asks about a pair, or uses a phrasing, that training never shows."""
    for phrasing, match in _phrasings_in(text):
        thing = _thing_of_match(phrasing, match)
        if phrasing.split != "train" or pair_split(phrasing.topic, thing) != "train":
            return True
    return False


def _phrasings_in(text: str) -> Iterator[tuple[_Phrasing, re.Match[str]]]:
    """The phrasings that a text contains, longer ones first, each with its first match."""
    for phrasing in _phrasings():
        match = phrasing.pattern.search(text)
        if match:
            yield phrasing, match


def _thing_of_match(phrasing: _Phrasing, match: re.Match[str]) -> str:
    return _things_of_names()[phrasing.topic, match["n"]]


@cache
def _phrasings() -> tuple[_Phrasing, ...]:
    """All phrasings, the longer ones first, since one may be part of another."""
    phrasings = []
    for name, topic in TOPICS.items():
        for split, texts in topic.phrasings.items():
            phrasings += [_Phrasing(name, split, text, _pattern(text, name)) for text in texts]
    return tuple(sorted(phrasings, key=lambda phrasing: -len(phrasing.text)))


def _pattern(phrasing: str, topic: str) -> re.Pattern[str]:
    names_of_topic: list[str] = []
    for thing in things(topic):
        names_of_topic += names(topic, thing)
    names_of_medicines: list[str] = []
    for medicine in MEDICINES.values():
        names_of_medicines += medicine.names
    # Escaping writes the placeholders' braces with backslashes.
    pattern = re.escape(phrasing)
    pattern = pattern.replace(r"\{n\}", f"(?P<n>{pattern_of_any(names_of_topic)})")
    pattern = pattern.replace(r"\{o\}", f"(?:{pattern_of_any(names_of_medicines)})")
    return re.compile(pattern)


@cache
def _things_of_names() -> dict[tuple[str, str], str]:
    """Topic and name → the thing that is called so."""
    things_by_name = {}
    for topic in TOPICS:
        for thing in things(topic):
            for name in names(topic, thing):
                things_by_name[topic, name] = thing
    return things_by_name
