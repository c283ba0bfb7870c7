"""The judge's simulated models: a weak model that answers, and a strong one that judges.

Both know what any wording means. Their random errors depend on the prompt and the seed alone.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import NamedTuple

from qinglan.simulators.domains import ReasonedAnswer
from qinglan.simulators.domains.answer_judge.facts import (
    CLOSINGS,
    FLAWS,
    OPENINGS,
    PRODUCTS,
    SLOTS,
    VAGUE,
    AnswerVerdict,
    Fact,
    Flaw,
    facts_of,
    judge,
)

P_MISREAD = 0.05
"""Share of answers of which the strong judge misreads a fact."""
P_BLIND, P_GULLIBLE = 0.65, 0.3
"""Known weaknesses of judges: how often it misses an invented fact beside right ones, and how often it accepts an
answer of empty phrases."""
P_HEDGED = 0.15
"""Share of answers with facts that have an empty phrase beside them, which is no flaw."""
_KIND_WEIGHTS = (30, 18, 22, 12, 10, 8)
"""How often the weak model chooses each kind of answer, in the order of `FLAWS`."""


class WeakAnswer(NamedTuple):
    """The weak model's answer, and the facts that it states."""

    facts: tuple[Fact, ...]
    text: str


def weak_answer(rng: Random, product: str, slot: str, kind: Flaw | None = None) -> WeakAnswer:
    """An answer of the given kind, or of any. With a reference of a single fact, 不完整 gives a complete answer."""
    reference = facts_of(product, slot)
    kind = kind or rng.choices(FLAWS, _KIND_WEIGHTS)[0]
    if kind == "含糊":
        return WeakAnswer((), compose(rng, (), rng.choice((1, 2))))
    found = _stated_facts(rng, reference, kind)
    if rng.random() < 0.5:
        rng.shuffle(found)
    return WeakAnswer(tuple(found), compose(rng, found, int(rng.random() < P_HEDGED)))


def _stated_facts(rng: Random, reference: tuple[Fact, ...], kind: Flaw) -> list[Fact]:
    found = list(reference)
    if kind == "跑题":
        return _added_facts(rng, reference, rng.choice((1, 2)))
    if kind == "不完整" and len(found) > 1:
        found.pop(rng.randrange(len(found)))
    elif kind == "编造":
        found += _added_facts(rng, reference, 1)
    elif kind == "矛盾":
        place = rng.randrange(len(found))
        found[place] = contrary(rng, found[place])
    return found


def _added_facts(rng: Random, reference: tuple[Fact, ...], count: int) -> list[Fact]:
    taken = {fact.slot for fact in reference}
    slots = rng.sample([slot for slot in SLOTS if slot not in taken], count)
    return [Fact(slot, rng.randrange(len(SLOTS[slot].values))) for slot in slots]


def contrary(rng: Random, fact: Fact) -> Fact:
    """Another value of the same slot."""
    return Fact(fact.slot, rng.choice([n for n in range(len(SLOTS[fact.slot].values)) if n != fact.value]))


def compose(rng: Random, facts: Sequence[Fact], vague: int) -> str:
    """A sentence of clauses: facts in users' words, never in the reference's; empty phrases, courtesies."""
    clauses = [fact.wording(rng.choice((1, 2))) for fact in facts]
    for phrase in rng.sample(VAGUE, vague):
        clauses.insert(rng.randrange(len(clauses) + 1), phrase)
    if rng.random() < 0.15:
        clauses.insert(0, rng.choice(OPENINGS))
    if rng.random() < 0.1:
        clauses.append(rng.choice(CLOSINGS))
    return "，".join(clauses) + "。"


def reference_text(product: str, slot: str) -> str:
    """The right answer in the workbook."""
    return "，".join(fact.wording() for fact in facts_of(product, slot)) + "。"


def facts_in(text: str) -> list[tuple[Fact, str]]:
    """The facts that a text states, in its order, each with its wording there."""
    return [(_wordings()[match], match) for match in _any_wording().findall(text)]


@cache
def _wordings() -> dict[str, Fact]:
    return {
        text: Fact(slot, number)
        for slot, known in SLOTS.items()
        for number, texts in enumerate(known.values)
        for text in texts
    }


@cache
def _any_wording() -> re.Pattern[str]:
    return re.compile("|".join(sorted(map(re.escape, _wordings()), key=len, reverse=True)))


def answer(prompt: str, seed: int) -> str:
    """The weak model: a question → a more or less right answer; empty phrases where it understands nothing."""
    rng = _random_of("answer", prompt, seed)
    asked = _understood(prompt)
    return weak_answer(rng, *asked).text if asked else compose(rng, (), 2)


def _understood(question: str) -> tuple[str, str] | None:
    names = ((name, product) for product, known in PRODUCTS.items() for name in (product, *known))
    for name, product in sorted(names, key=lambda pair: -len(pair[0])):
        for slot, known in SLOTS.items() if name in question else ():
            if any(phrasing.format(p=name) in question for phrasing in known.questions):
                return product, slot
    return None


def reason(prompt: str, seed: int) -> ReasonedAnswer:
    """The strong model: question, reference and answer on the last three lines → thoughts, and a verdict."""
    fields = dict(line.split("：", 1) for line in prompt.splitlines() if "：" in line)
    thoughts, verdict = thoughts_on(
        fields.get("标准答案", ""), fields.get("待评答案", ""), _random_of("reason", prompt, seed)
    )
    return ReasonedAnswer(f"<output>{'，'.join(verdict.words)}</output>", thoughts)


def thoughts_on(reference: str, candidate: str, rng: Random) -> tuple[str, AnswerVerdict]:
    """A clause for each fact as the judge reads it, and the verdict that follows from them."""
    wanted, found = [fact for fact, _ in facts_in(reference)], _noticed(rng, reference, candidate)
    stated, slots = [fact for fact, _ in found], {fact.slot for fact in wanted}
    steps = [fact.wording() + mark_of(fact, stated) for fact in wanted]
    steps += [f"多{wording}" for fact, wording in found if fact.slot not in slots]
    return "，".join(steps) or "没有要点", judge(tuple(wanted), tuple(stated))


def _noticed(rng: Random, reference: str, candidate: str) -> list[tuple[Fact, str]]:
    """The facts that the judge finds in an answer."""
    wanted, found = facts_in(reference), facts_in(candidate)
    facts, slots = {fact for fact, _ in wanted}, {fact.slot for fact, _ in wanted}
    if not found:
        return wanted if rng.random() < P_GULLIBLE else []
    if any(fact in facts for fact, _ in found) and rng.random() < P_BLIND:
        found = [(fact, wording) for fact, wording in found if fact.slot in slots]
    if wanted and rng.random() < P_MISREAD:
        found = _misread(rng, [fact for fact, _ in wanted], found)
    return found


def mark_of(fact: Fact, stated: Sequence[Fact]) -> str:
    """Whether a fact is stated (有), contradicted (反) or absent (无)."""
    if fact in stated:
        return "有"
    return "反" if any(other.slot == fact.slot for other in stated) else "无"


def _misread(rng: Random, wanted: list[Fact], found: list[tuple[Fact, str]]) -> list[tuple[Fact, str]]:
    """A fact overlooked, or one imagined."""
    if found and rng.random() < 0.6:
        place = rng.randrange(len(found))
        return found[:place] + found[place + 1 :]
    imagined = rng.choice(wanted)
    return [*found, (imagined, imagined.wording())]


def _random_of(role: str, prompt: str, seed: int) -> Random:
    return Random(hashlib.sha256(f"{seed}|{role}|{prompt}".encode()).digest())
