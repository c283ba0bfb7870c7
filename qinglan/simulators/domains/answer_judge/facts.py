"""The judge's facts: what is known of a product, how users word it, and the flaws of answers.

A fact is a slot with one of its values ("频次" is "每日两次"). Slots are exclusive, so another
value of the same slot contradicts it. Every value has wordings of its own; the first one is what
reference answers use.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import product as combinations
from random import Random
from typing import NamedTuple

from qinglan.recipes.answer_judge import Verdict
from qinglan.recipes.passage_judge import RIGHT, WRONG
from qinglan.rows import Split
from qinglan.simulators.domains import all_but, load_facts, owner_of
from qinglan.simulators.domains.query_rewrite.facts import PRODUCTS as PRODUCTS


class Slot(NamedTuple):
    """One thing that can be known of a product."""

    questions: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    """Each value's wordings, the reference's first; each is one token."""


@dataclass(frozen=True)
class _Tables:
    slots: dict[str, Slot]
    vague: tuple[str, ...]
    openings: tuple[str, ...]
    closings: tuple[str, ...]


_TABLES = load_facts(__package__, _Tables)
SLOTS = _TABLES.slots
VAGUE = _TABLES.vague
OPENINGS = _TABLES.openings
CLOSINGS = _TABLES.closings
P_TEST_PAIR = 0.3
P_DEV_PAIR = 0.15


@dataclass(frozen=True)
class Fact:
    """A slot and the number of its value."""

    slot: str
    value: int

    def wording(self, number: int = 0) -> str:
        """One of its wordings; 0 is the reference's."""
        return SLOTS[self.slot].values[self.value][number]


def in_reference_words(facts: Iterable[Fact]) -> str:
    return "，".join(fact.wording() for fact in facts)


def slots_of(facts: Iterable[Fact]) -> set[str]:
    return {fact.slot for fact in facts}


def any_value(rng: Random, slot: str) -> Fact:
    return Fact(slot, rng.randrange(len(SLOTS[slot].values)))


def _number(*key: str) -> int:
    """A large number that depends on the key alone."""
    return int.from_bytes(hashlib.sha256("|".join(key).encode()).digest()[:8])


@cache
def facts_of(product: str, slot: str) -> tuple[Fact, ...]:
    """The facts of a reference answer to a question about `slot`.

    The fact asked for comes first, then perhaps another one. Of each slot one value is true of a
    product.
    """
    rng = Random(_number("facts", product, slot))
    further_slots = rng.sample(all_but(SLOTS, slot), rng.choices((0, 1), (2, 3))[0])
    return tuple(_true_fact(product, name) for name in (slot, *further_slots))


def _true_fact(product: str, slot: str) -> Fact:
    return Fact(slot, _number("value", product, slot) % len(SLOTS[slot].values))


def pairs(split: Split) -> list[tuple[str, str]]:
    """Product and slot of the questions that belong to a split."""
    return [pair for pair in combinations(PRODUCTS, SLOTS) if _pair_split(*pair) == split]


def _pair_split(product: str, slot: str) -> Split:
    fraction = _number("split", product, slot) % 1000 / 1000
    return owner_of(fraction, P_TEST_PAIR, P_DEV_PAIR)


def judge(reference: tuple[Fact, ...], stated: tuple[Fact, ...]) -> Verdict:
    """The truth about an answer: its first flaw in order of gravity.

    An incomplete answer is acceptable if it states the fact asked for.
    """
    true_facts = {fact.slot: fact for fact in reference}
    right_facts = [fact for fact in reference if fact in stated]
    contradicts = any(fact.slot in true_facts and fact != true_facts[fact.slot] for fact in stated)
    invents = any(fact.slot not in true_facts for fact in stated)
    if not right_facts and not contradicts:
        return Verdict(WRONG, "跑题" if invents else "含糊")
    # A contradiction is graver than an invention beside it.
    if contradicts:
        return Verdict(WRONG, "矛盾")
    if invents:
        return Verdict(WRONG, "编造")
    states_fact_asked_for = reference[0] in right_facts
    is_complete = len(right_facts) == len(reference)
    return Verdict(
        RIGHT if states_fact_asked_for else WRONG,
        "完整" if is_complete else "不完整",
    )
