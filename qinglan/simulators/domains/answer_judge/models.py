"""The judge's simulated models: a weak model that answers, and a strong one that judges.

Both know what any wording means. Their random errors depend on the prompt and the seed alone.
"""

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from qinglan.recipes.answer_judge import FLAWS
from qinglan.simulators.domains import ReasonedAnswer, random_of
from qinglan.simulators.domains.answer_judge.facts import (
    CLOSINGS,
    OPENINGS,
    PRODUCTS,
    SLOTS,
    VAGUE,
    Fact,
    facts_of,
    judge,
)

P_MISREAD = 0.05
"""Share of answers of which the strong judge misreads a fact."""
P_BLIND, P_GULLIBLE = 0.65, 0.3
"""Known weaknesses of judges: how often it misses an invented fact beside right ones, and how often
it accepts an answer of empty phrases."""
P_HEDGED = 0.15
"""Share of answers with facts that have an empty phrase beside them, which is no flaw."""
_KIND_WEIGHTS = (30, 18, 22, 12, 10, 8)
"""How often the weak model chooses each kind of answer, in the order of `FLAWS`."""


_WORDINGS = {
    text: Fact(slot, number)
    for slot, known in SLOTS.items()
    for number, texts in enumerate(known.values)
    for text in texts
}
_ANY_WORDING = re.compile("|".join(sorted(map(re.escape, _WORDINGS), key=len, reverse=True)))


class WeakAnswer(NamedTuple):
    facts: tuple[Fact, ...]
    text: str


def weak_answer(rng: Random, product: str, slot: str) -> WeakAnswer:
    """An answer of any kind. With a reference of a single fact, 不完整 gives a complete answer."""
    reference = facts_of(product, slot)
    kind = rng.choices(FLAWS, _KIND_WEIGHTS)[0]
    if kind == "含糊":
        return WeakAnswer((), compose(rng, (), rng.choice((1, 2))))
    found = _stated_facts(rng, reference, kind)
    if rng.random() < 0.5:
        rng.shuffle(found)
    return WeakAnswer(tuple(found), compose(rng, found, int(rng.random() < P_HEDGED)))


def _stated_facts(rng: Random, reference: tuple[Fact, ...], kind: str) -> list[Fact]:
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
    return Fact(
        fact.slot, rng.choice([n for n in range(len(SLOTS[fact.slot].values)) if n != fact.value])
    )


def compose(rng: Random, facts: Sequence[Fact], vague: int) -> str:
    """A sentence of clauses: facts in users' words, never in the reference's; empty phrases,
    courtesies."""
    clauses = [fact.wording(rng.choice((1, 2))) for fact in facts]
    for phrase in rng.sample(VAGUE, vague):
        clauses.insert(rng.randrange(len(clauses) + 1), phrase)
    if rng.random() < 0.15:
        clauses.insert(0, rng.choice(OPENINGS))
    if rng.random() < 0.1:
        clauses.append(rng.choice(CLOSINGS))
    return "，".join(clauses) + "。"


def facts_in(text: str) -> list[tuple[Fact, str]]:
    """The facts that a text states, in its order, each with its wording there."""
    return [(_WORDINGS[match], match) for match in _ANY_WORDING.findall(text)]


def answer(prompt: str, seed: int) -> str:
    """The weak model: a question → a more or less right answer; empty phrases where it understands
    nothing."""
    rng = random_of(seed, "answer", prompt)
    names = ((name, product) for product, known in PRODUCTS.items() for name in (product, *known))
    for name, product in sorted(names, key=lambda pair: -len(pair[0])):
        for slot, known in SLOTS.items() if name in prompt else ():
            if any(phrasing.format(p=name) in prompt for phrasing in known.questions):
                return weak_answer(rng, product, slot).text
    return compose(rng, (), 2)


def reason(prompt: str, seed: int) -> ReasonedAnswer:
    """The strong model: question, reference and answer on the last three lines → thoughts, and a
    verdict."""
    fields = dict(line.split("：", 1) for line in prompt.splitlines() if "：" in line)
    wanted, found = facts_in(fields.get("标准答案", "")), facts_in(fields.get("待评答案", ""))
    found = _noticed(random_of(seed, "reason", prompt), wanted, found)
    known, stated = [fact for fact, _ in wanted], [fact for fact, _ in found]
    steps = [fact.wording() + mark_of(fact, stated) for fact in known]
    steps += [
        f"多{wording}" for fact, wording in found if fact.slot not in {each.slot for each in known}
    ]
    verdict = judge(tuple(known), tuple(stated))
    return ReasonedAnswer(f"<output>{'，'.join(verdict)}</output>", "，".join(steps) or "没有要点")


def _noticed(
    rng: Random, wanted: list[tuple[Fact, str]], found: list[tuple[Fact, str]]
) -> list[tuple[Fact, str]]:
    """Which of an answer's facts the judge finds in it."""
    facts, slots = {fact for fact, _ in wanted}, {fact.slot for fact, _ in wanted}
    if not found:
        return wanted if rng.random() < P_GULLIBLE else []
    if any(fact in facts for fact, _ in found) and rng.random() < P_BLIND:
        found = [(fact, wording) for fact, wording in found if fact.slot in slots]
    if wanted and rng.random() < P_MISREAD:
        if found and rng.random() < 0.6:  # a fact is overlooked, else one is imagined
            place = rng.randrange(len(found))
            return found[:place] + found[place + 1 :]
        imagined, _ = rng.choice(wanted)
        return [*found, (imagined, imagined.wording())]
    return found


def mark_of(fact: Fact, stated: Sequence[Fact]) -> str:
    """Whether a fact is stated (有), contradicted (反) or absent (无)."""
    if fact in stated:
        return "有"
    return "反" if any(other.slot == fact.slot for other in stated) else "无"
