"""The judge's facts: what is known of a product, how users word it, and what can be wrong with an
answer.

A fact is a slot with one of its values ("频次" is "每日两次"); slots are exclusive, so another value of
the same slot contradicts it. Every value has wordings of its own; the first one is what reference
answers use.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

from qinglan.recipes.answer_judge import Verdict
from qinglan.recipes.passage_judge import RIGHT, WRONG
from qinglan.rows import Split
from qinglan.simulators.domains import load_facts, owner_of
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
SLOTS, VAGUE, OPENINGS, CLOSINGS = _TABLES.slots, _TABLES.vague, _TABLES.openings, _TABLES.closings
P_TEST_PAIR, P_DEV_PAIR = 0.3, 0.15


@dataclass(frozen=True)
class Fact:
    """A slot and the number of its value."""

    slot: str
    value: int

    def wording(self, number: int = 0) -> str:
        """One of its wordings; 0 is the reference's."""
        return SLOTS[self.slot].values[self.value][number]


def _number(*key: str) -> int:
    return int.from_bytes(hashlib.sha256("|".join(key).encode()).digest()[:8])


@cache
def facts_of(product: str, slot: str) -> tuple[Fact, ...]:
    """The facts of a reference answer to a question about `slot`: the fact asked for, then perhaps
    another.

    Of each slot one value is true of a product.
    """
    rng = Random(_number("facts", product, slot))
    others = rng.sample([name for name in SLOTS if name != slot], rng.choices((0, 1), (2, 3))[0])
    numbers = {
        name: _number("value", product, name) % len(SLOTS[name].values) for name in (slot, *others)
    }
    return tuple(Fact(name, number) for name, number in numbers.items())


def pairs(split: Split) -> list[tuple[str, str]]:
    """Product and slot of the questions that belong to a split."""
    known = [
        (product, slot, _number("split", product, slot) % 1000 / 1000)
        for product in PRODUCTS
        for slot in SLOTS
    ]
    return [
        (product, slot)
        for product, slot, n in known
        if owner_of(n, P_TEST_PAIR, P_DEV_PAIR) == split
    ]


def judge(reference: tuple[Fact, ...], stated: tuple[Fact, ...]) -> Verdict:
    """The truth about an answer: its first flaw in order of gravity.

    An incomplete answer is acceptable if it states the fact asked for.
    """
    known = {fact.slot: fact for fact in reference}
    found = [fact for fact in reference if fact in stated]
    contradicted = any(fact.slot in known and fact != known[fact.slot] for fact in stated)
    invented = any(fact.slot not in known for fact in stated)
    if not found and not contradicted:
        return Verdict(WRONG, "跑题" if invented else "含糊")
    if contradicted or invented:
        return Verdict(WRONG, "矛盾" if contradicted else "编造")
    return Verdict(
        RIGHT if reference[0] in found else WRONG,
        "完整" if len(found) == len(reference) else "不完整",
    )
