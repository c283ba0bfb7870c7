"""The corpus of the judge's tiny base model: notes about products, and exercises in reading them.

The model learns which wordings mean the same, what a note states, how two notes differ, and to
write thoughts before an answer in tags. The corpus holds no verdict. The notes are random facts
under questions of the training split, so no note states what is true of a pair in the test split.
"""

from collections.abc import Iterator
from random import Random

from qinglan.recipes.answer_judge import COURTESIES, FLAWS, STUDENT_SYSTEM
from qinglan.recipes.passage_judge import RIGHT, WRONG
from qinglan.simulators.domains import chat
from qinglan.simulators.domains.answer_judge.facts import (
    CLOSINGS,
    OPENINGS,
    PRODUCTS,
    SLOTS,
    VAGUE,
    Fact,
    any_value,
    in_reference_words,
    pairs,
    slots_of,
)
from qinglan.simulators.domains.answer_judge.models import (
    compare,
    compose,
    contrary,
    facts_in,
    mark_of,
)

POINTS = "要点"
REWORD = "换个说法"
CHECKS = "有没有"
NONE = "没有"
STATED = "头一个"
LACKING = "缺的"
CONTRARY = "反的"
ADDED = "多的"
SYSTEM = "先想再答。格式：<think>想法</think><output>答案</output>。"
"""Asks for an answer in tags."""
PLAIN_WORDS = {
    RIGHT: "对",
    WRONG: "不对",
    "完整": "齐全",
    "不完整": "不齐全",
    "编造": "瞎编",
    "矛盾": "相反",
    "含糊": "不清楚",
    "跑题": "说别的",
}
"""Words of verdicts, and their meanings."""
P_ASKED = 0.5
P_QUESTION = 0.3
P_VAGUE = 0.15
P_KEPT = 0.5
"""Share of a note's facts that the second note repeats."""
P_CONTRARY = 0.2
"""Share of a note's facts that the second note contradicts."""
_KIND_WEIGHTS = (6, 8, 20, 66)
"""Frequency of glossaries, words, notes to be read, and notes to be compared."""


def documents(seed: int, count: int) -> Iterator[str]:
    # Each kind has all lengths: a batch has documents of similar length, and should hold some of
    # every kind.
    rng = Random(seed)
    kinds = (_glossary, _words, _read, _compared)
    for _ in range(count):
        draw = rng.choices(kinds, _KIND_WEIGHTS)[0]
        yield draw(rng)


def words() -> list[str]:
    prompts = [STUDENT_SYSTEM, "问题：", "标准答案：", "待评答案：", *COURTESIES, SYSTEM]
    tags = ["<output>", "</output>", RIGHT, WRONG, *FLAWS]
    tasks = [POINTS, REWORD, CHECKS, NONE, STATED, LACKING, CONTRARY, ADDED, *PLAIN_WORDS.values()]
    names: list[str] = []
    for product, aliases in PRODUCTS.items():
        names += [product, *aliases]
    questions: list[str] = []
    wordings: list[str] = []
    for slot in SLOTS.values():
        questions += [phrasing.removeprefix("{p}") for phrasing in slot.questions]
        for value in slot.values:
            wordings += value
    return [
        "system",
        "user",
        "assistant",
        *prompts,
        *tags,
        *names,
        *questions,
        *VAGUE,
        *OPENINGS,
        *CLOSINGS,
        *SLOTS,
        *tasks,
        *wordings,
    ]


def characters() -> list[str]:
    return sorted({*"".join(words()), *"有无反多0123456789，。：；？\n "})


def _glossary(rng: Random) -> str:
    """Other wordings of some facts."""
    entries = []
    for fact in _draw_facts(rng, rng.randint(1, 4)):
        before, after = rng.sample((1, 2), 2)
        wordings = (fact.wording(before), fact.wording(), fact.wording(after))
        entries.append(f"{fact.slot}：{'，'.join(wordings)}。\n")
    return "".join(entries)


def _words(rng: Random) -> str:
    """Words of verdicts, each asked for by its meaning or the other way round."""
    turns = []
    for pair in rng.sample(list(PLAIN_WORDS.items()), rng.randint(1, 4)):
        word, synonym = rng.sample(pair, 2)
        turns += [f"{REWORD}：{word}", synonym]
    return chat(*turns)


def _read(rng: Random) -> str:
    """A note's facts, in the reference's words."""
    facts = _draw_facts(rng, rng.randint(1, 4))
    note = compose(rng, facts, 1 if rng.random() < P_VAGUE else 0)
    return chat(f"{POINTS}：{note}", in_reference_words(facts))


def _compared(rng: Random) -> str:
    """A comparison of two notes: which facts of the first does the second state, what does it add?

    Half of the time questions about the result follow.
    """
    first = _draw_facts(rng, rng.choices((1, 2, 3), (3, 4, 2))[0])
    second = _draw_second_note(rng, first)
    # A note without facts has an empty phrase, as it must have something.
    empty_phrases = 1 if not second or rng.random() < P_VAGUE else 0
    note = compose(rng, second, empty_phrases)
    thoughts = "，".join(compare(first, facts_in(note)))
    lines = f"标准答案：{in_reference_words(first)}。\n待评答案：{note}"
    if rng.random() < P_QUESTION:
        lines = f"问题：{_draw_question(rng)}？\n{lines}"
    if rng.random() > P_ASKED:
        return chat(lines, thoughts)
    marks = [mark_of(fact, second) for fact in first]
    results = {
        STATED: marks[0] == "有",
        LACKING: "无" in marks,
        CONTRARY: "反" in marks,
        ADDED: not slots_of(second) <= slots_of(first),
    }
    checks = rng.sample(list(results), 2)
    answer = "，".join("有" if results[check] else NONE for check in checks)
    return chat(
        f"{lines}\n{CHECKS}：{'，'.join(checks)}",
        f"<think>{thoughts}</think><output>{answer}</output>",
        system=SYSTEM,
    )


def _draw_second_note(rng: Random, first: list[Fact]) -> list[Fact]:
    """Facts that repeat, contradict or leave out those of the first note, and some of its own."""
    # All are drawn before the first contrary fact: this order is a part of the corpus.
    draws = [rng.random() for _ in first]
    second = []
    for fact, draw in zip(first, draws, strict=True):
        if draw < P_KEPT:
            second.append(fact)
        elif draw < P_KEPT + P_CONTRARY:
            second.append(contrary(rng, fact))
    first_slots = slots_of(first)
    further_facts = [fact for fact in _draw_facts(rng, len(SLOTS)) if fact.slot not in first_slots]
    second += further_facts[: rng.choices((0, 1, 2), (5, 4, 2))[0]]
    rng.shuffle(second)
    return second


def _draw_question(rng: Random) -> str:
    product, slot = rng.choice(pairs("train"))
    phrasing = rng.choice(SLOTS[slot].questions)
    return phrasing.format(p=rng.choice((product, *PRODUCTS[product])))


def _draw_facts(rng: Random, count: int) -> list[Fact]:
    """Any values of different slots."""
    return [any_value(rng, slot) for slot in rng.sample(list(SLOTS), count)]
