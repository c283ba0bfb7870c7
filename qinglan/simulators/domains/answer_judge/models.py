"""The judge's simulated models: a weak model that answers, and a strong one that judges.

Both know what any wording means. Their random errors depend on the prompt and the seed alone.
"""

import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from qinglan.recipes.answer_judge import FLAWS
from qinglan.simulators.domains import ReasonedAnswer, all_but, pattern_of_any, random_of
from qinglan.simulators.domains.answer_judge.facts import (
    CLOSINGS,
    OPENINGS,
    PRODUCTS,
    SLOTS,
    VAGUE,
    Fact,
    any_value,
    facts_of,
    judge,
    slots_of,
)

P_MISREAD = 0.05
"""Share of answers of which the strong judge misreads a fact."""
P_OVERLOOKED = 0.6
"""Share of misread answers in which a fact is overlooked; in the others one is imagined."""
P_BLIND = 0.65
"""A known weakness of judges: missing an invented fact beside right ones."""
P_GULLIBLE = 0.3
"""A known weakness of judges: accepting an answer of empty phrases."""
P_HEDGED = 0.15
"""Share of answers with facts that have an empty phrase beside them, which is no flaw."""
P_SHUFFLED = 0.5
P_OPENING = 0.15
P_CLOSING = 0.1
_KIND_WEIGHTS = (30, 18, 22, 12, 10, 8)
"""How often the weak model chooses each kind of answer, in the order of `FLAWS`."""


def _facts_of_wordings() -> dict[str, Fact]:
    facts = {}
    for name, slot in SLOTS.items():
        for number, wordings in enumerate(slot.values):
            facts.update(dict.fromkeys(wordings, Fact(name, number)))
    return facts


_FACT_OF_WORDING = _facts_of_wordings()
_ANY_WORDING = re.compile(pattern_of_any(_FACT_OF_WORDING))


class WeakAnswer(NamedTuple):
    facts: tuple[Fact, ...]
    text: str


def weak_answer(rng: Random, product: str, slot: str) -> WeakAnswer:
    """An answer of any kind.

    A reference of a single fact can't be incomplete: kind 不完整 then gives a complete answer.
    """
    reference = facts_of(product, slot)
    kind = rng.choices(FLAWS, _KIND_WEIGHTS)[0]
    if kind == "含糊":
        return WeakAnswer((), compose(rng, (), rng.choice((1, 2))))
    facts = _stated_facts(rng, reference, kind)
    # Half of the answers keep the reference's order, in which the fact asked for comes first.
    if rng.random() < P_SHUFFLED:
        rng.shuffle(facts)
    empty_phrases = 1 if rng.random() < P_HEDGED else 0
    return WeakAnswer(tuple(facts), compose(rng, facts, empty_phrases))


def _stated_facts(rng: Random, reference: tuple[Fact, ...], kind: str) -> list[Fact]:
    """The facts of an answer of this kind."""
    if kind == "跑题":
        return _invented_facts(rng, reference, rng.choice((1, 2)))
    facts = list(reference)
    if kind == "不完整" and len(facts) > 1:
        facts.pop(rng.randrange(len(facts)))
    elif kind == "编造":
        facts += _invented_facts(rng, reference, 1)
    elif kind == "矛盾":
        place = rng.randrange(len(facts))
        facts[place] = contrary(rng, facts[place])
    return facts


def _invented_facts(rng: Random, reference: tuple[Fact, ...], count: int) -> list[Fact]:
    """Facts of slots about which the reference says nothing."""
    reference_slots = slots_of(reference)
    slots = rng.sample([slot for slot in SLOTS if slot not in reference_slots], count)
    return [any_value(rng, slot) for slot in slots]


def contrary(rng: Random, fact: Fact) -> Fact:
    """Another value of the same slot."""
    values = range(len(SLOTS[fact.slot].values))
    return Fact(fact.slot, rng.choice(all_but(values, fact.value)))


def compose(rng: Random, facts: Sequence[Fact], vague: int) -> str:
    """A sentence of clauses: facts, empty phrases, courtesies.

    Facts are in users' words, never in the reference's. `vague` is the number of empty phrases.
    """
    clauses = [fact.wording(rng.choice((1, 2))) for fact in facts]
    for phrase in rng.sample(VAGUE, vague):
        clauses.insert(rng.randrange(len(clauses) + 1), phrase)
    if rng.random() < P_OPENING:
        clauses.insert(0, rng.choice(OPENINGS))
    if rng.random() < P_CLOSING:
        clauses.append(rng.choice(CLOSINGS))
    return "，".join(clauses) + "。"


def facts_in(text: str) -> list[tuple[Fact, str]]:
    """The facts that a text states, in its order, each with its wording there."""
    return [(_FACT_OF_WORDING[wording], wording) for wording in _ANY_WORDING.findall(text)]


def answer(prompt: str, seed: int) -> str:
    """The weak model: a question → a more or less right answer.

    It consists of empty phrases where the model understands nothing.
    """
    rng = random_of(seed, "answer", prompt)
    subject = _subject_of(prompt)
    if subject is None:
        return compose(rng, (), 2)
    return weak_answer(rng, *subject).text


def _subject_of(prompt: str) -> tuple[str, str] | None:
    """Product and slot of the question in a prompt; the longest name of a product decides."""
    for name, product in _names_longest_first():
        if name not in prompt:
            continue
        for slot_name, slot in SLOTS.items():
            if any(phrasing.format(p=name) in prompt for phrasing in slot.questions):
                return product, slot_name
    return None


def _names_longest_first() -> list[tuple[str, str]]:
    """Every name of a product with the product."""
    names = []
    for product, aliases in PRODUCTS.items():
        for name in (product, *aliases):
            names.append((name, product))
    return sorted(names, key=lambda name_and_product: -len(name_and_product[0]))


def reason(prompt: str, seed: int) -> ReasonedAnswer:
    """The strong model: a question, its reference and an answer → thoughts, and a verdict.

    They are the last three lines of the prompt.
    """
    # A line's label is what comes before its first colon.
    fields = dict(line.split("：", 1) for line in prompt.splitlines() if "：" in line)
    in_reference = facts_in(fields.get("标准答案", ""))
    in_answer = facts_in(fields.get("待评答案", ""))
    noticed = _noticed(random_of(seed, "reason", prompt), in_reference, in_answer)
    reference = tuple(fact for fact, _ in in_reference)
    thoughts = compare(reference, noticed)
    verdict = judge(reference, tuple(fact for fact, _ in noticed))
    return ReasonedAnswer(
        f"<output>{'，'.join(verdict)}</output>", "，".join(thoughts) or "没有要点"
    )


def _noticed(
    rng: Random, in_reference: list[tuple[Fact, str]], in_answer: list[tuple[Fact, str]]
) -> list[tuple[Fact, str]]:
    """Those of an answer's facts that the judge finds in it, and some that it imagines."""
    if not in_answer:
        return in_reference if rng.random() < P_GULLIBLE else []
    noticed = in_answer
    reference = {fact for fact, _ in in_reference}
    has_right_fact = any(fact in reference for fact, _ in in_answer)
    # Only beside right facts is an invented one overlooked: nothing is drawn for other answers.
    if has_right_fact and rng.random() < P_BLIND:
        reference_slots = slots_of(reference)
        noticed = [(fact, wording) for fact, wording in noticed if fact.slot in reference_slots]
    if not in_reference or rng.random() >= P_MISREAD:
        return noticed
    if noticed and rng.random() < P_OVERLOOKED:
        place = rng.randrange(len(noticed))
        return noticed[:place] + noticed[place + 1 :]
    imagined, _ = rng.choice(in_reference)
    return [*noticed, (imagined, imagined.wording())]


def compare(reference: Sequence[Fact], stated: Sequence[tuple[Fact, str]]) -> list[str]:
    """Thoughts: each fact of the reference with its mark, then what is stated beyond it.

    `stated` has facts with their wordings, as `facts_in` finds them.
    """
    stated_facts = [fact for fact, _ in stated]
    thoughts = [fact.wording() + mark_of(fact, stated_facts) for fact in reference]
    reference_slots = slots_of(reference)
    for fact, wording in stated:
        if fact.slot not in reference_slots:
            thoughts.append(f"多{wording}")
    return thoughts


def mark_of(fact: Fact, stated: Sequence[Fact]) -> str:
    """The mark of a fact that is stated (有), contradicted (反) or absent (无)."""
    if fact in stated:
        return "有"
    if fact.slot in slots_of(stated):
        return "反"
    return "无"
