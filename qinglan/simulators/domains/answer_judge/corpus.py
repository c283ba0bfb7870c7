"""The corpus of the judge's tiny base model: notes about products, and short exercises in reading
them.

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
    pairs,
)
from qinglan.simulators.domains.answer_judge.models import compose, contrary, facts_in, mark_of

POINTS, REWORD, CHECKS = "要点", "换个说法", "有没有"
NONE = "没有"
STATED, LACKING, CONTRARY, ADDED = "头一个", "缺的", "反的", "多的"
SYSTEM = "先想再答。格式：<think>想法</think><output>答案</output>。"
"""Asks for an answer in tags."""
PLAIN_WORDS = {
    RIGHT: "对", WRONG: "不对", "完整": "齐全", "不完整": "不齐全", "编造": "瞎编", "矛盾": "相反", "含糊": "不清楚",
    "跑题": "说别的",
}  # fmt: skip
"""Words of verdicts, and what they mean."""
P_ASKED = 0.5
P_QUESTION = 0.3
P_VAGUE = 0.15
P_KEPT, P_CONTRARY = 0.5, 0.2
"""Shares of a note's facts that the second note repeats, and that it contradicts."""


def documents(seed: int, count: int) -> Iterator[str]:
    # Each kind has all lengths: a batch has documents of similar length, and should hold some of
    # every kind.
    rng, kinds = Random(seed), (_glossary, _words, _read, _compared)
    return (rng.choices(kinds, (6, 8, 20, 66))[0](rng) for _ in range(count))


def words() -> list[str]:
    wordings = [text for known in SLOTS.values() for texts in known.values for text in texts]
    prompts = [STUDENT_SYSTEM, "问题：", "标准答案：", "待评答案：", *COURTESIES, SYSTEM]
    tags = ["<output>", "</output>", RIGHT, WRONG, *FLAWS]
    tasks = [POINTS, REWORD, CHECKS, NONE, STATED, LACKING, CONTRARY, ADDED, *PLAIN_WORDS.values()]
    asked = [
        phrasing.removeprefix("{p}") for known in SLOTS.values() for phrasing in known.questions
    ]
    called = [name for product, names in PRODUCTS.items() for name in (product, *names)]
    names = [*called, *asked, *VAGUE, *OPENINGS, *CLOSINGS, *SLOTS]
    return ["system", "user", "assistant", *prompts, *tags, *names, *tasks, *wordings]


def characters() -> list[str]:
    return sorted({*"".join(words()), *"有无反多0123456789，。：；？\n "})


def _glossary(rng: Random) -> str:
    """Other wordings of some facts."""
    entries = []
    for fact in _facts(rng, rng.randint(1, 4)):
        one, other = rng.sample((1, 2), 2)
        entries.append(
            f"{fact.slot}：{fact.wording(one)}，{fact.wording()}，{fact.wording(other)}。\n"
        )
    return "".join(entries)


def _words(rng: Random) -> str:
    known = rng.sample(list(PLAIN_WORDS.items()), rng.randint(1, 4))
    turns = [
        (f"{REWORD}：{asked}", answer) for asked, answer in (rng.sample(pair, 2) for pair in known)
    ]
    return chat(*(text for turn in turns for text in turn))


def _read(rng: Random) -> str:
    """A note's facts, in the reference's words."""
    facts = _facts(rng, rng.randint(1, 4))
    note = compose(rng, facts, int(rng.random() < P_VAGUE))
    return chat(f"{POINTS}：{note}", "，".join(fact.wording() for fact in facts))


def _compared(rng: Random) -> str:
    """Whether a note states each fact of another one, and what it adds; sometimes a question about
    the result."""
    first = _facts(rng, rng.choices((1, 2, 3), (3, 4, 2))[0])
    draws = [(fact, rng.random()) for fact in first]
    second = [
        fact if draw < P_KEPT else contrary(rng, fact)
        for fact, draw in draws
        if draw < P_KEPT + P_CONTRARY
    ]
    free = [
        fact for fact in _facts(rng, len(SLOTS)) if fact.slot not in {known.slot for known in first}
    ]
    second += free[: rng.choices((0, 1, 2), (5, 4, 2))[0]]
    rng.shuffle(second)
    note = compose(rng, second, int(not second or rng.random() < P_VAGUE))
    slots = {fact.slot for fact in first}
    added = [wording for fact, wording in facts_in(note) if fact.slot not in slots]
    marks = [mark_of(fact, second) for fact in first]
    thoughts = "，".join(
        [fact.wording() + mark for fact, mark in zip(first, marks, strict=True)]
        + ["多" + text for text in added]
    )
    lines = f"标准答案：{'，'.join(fact.wording() for fact in first)}。\n待评答案：{note}"
    if rng.random() < P_QUESTION:
        product, slot = rng.choice(pairs("train"))
        question = rng.choice(SLOTS[slot].questions).format(
            p=rng.choice((product, *PRODUCTS[product]))
        )
        lines = f"问题：{question}？\n{lines}"
    if rng.random() > P_ASKED:
        return chat(lines, thoughts)
    found = {
        STATED: marks[0] == "有",
        LACKING: "无" in marks,
        CONTRARY: "反" in marks,
        ADDED: bool(added),
    }
    asked = rng.sample(list(found), 2)
    answer = "，".join("有" if found[one] else NONE for one in asked)
    return chat(
        f"{lines}\n{CHECKS}：{'，'.join(asked)}",
        f"<think>{thoughts}</think><output>{answer}</output>",
        system=SYSTEM,
    )


def _facts(rng: Random, count: int) -> list[Fact]:
    return [
        Fact(slot, rng.randrange(len(SLOTS[slot].values)))
        for slot in rng.sample(list(SLOTS), count)
    ]
