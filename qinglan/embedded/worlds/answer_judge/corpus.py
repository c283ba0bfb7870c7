"""What the judge's tiny base model reads first: notes about products, and short exercises in reading them.

It learns which wordings mean the same, what a note says and what two notes share, and to put thoughts before an answer
in tags. It never sees an answer judged: neither the prompt's form nor a verdict on anything, and no note about a
question that the test split owns.
"""

from collections.abc import Iterator, Sequence
from random import Random

from qinglan.embedded.dialogue import chat
from qinglan.embedded.worlds.answer_judge.domain import (
    CLOSINGS,
    FLAWS,
    OPENINGS,
    PRODUCTS,
    SLOTS,
    VAGUE,
    Fact,
    facts_of,
    pairs,
)  # fmt: skip
from qinglan.embedded.worlds.answer_judge.people import compose
from qinglan.recipes.answer_judge import COURTESIES, RIGHT, STUDENT_SYSTEM, WRONG

POINTS, REWORD, TOPIC, SAID = "要点", "换个说法", "属于", "提到"
SHARED, ADDED, EACH = "都提到", "只在后面", "逐条"
NONE = "没有"
SYSTEM = "先想再答。格式：<think>想法</think><output>答案</output>。"
"""Asks for an answer in tags."""
PLAIN_WORDS = {
    RIGHT: "对", WRONG: "不对", "完整": "齐全", "不完整": "不齐全", "编造": "瞎编", "矛盾": "相反", "含糊": "不清楚",
    "跑题": "说别的", "有": "提到", "无": "没提", "反": "倒", "多": "另外",
}  # fmt: skip
"""Words of verdicts, and what they mean."""
P_TAGGED = 0.5
P_KEPT = 0.6
"""Share of a note's facts that the note beside it has too."""


def documents(seed: int, count: int) -> Iterator[str]:
    """`count` documents; the same seed gives the same ones."""
    rng = Random(seed)
    return (_document(rng) for _ in range(count))


def words() -> list[str]:
    """Prompts, tags, verdicts, and every wording of a fact."""
    wordings = [text for known in SLOTS.values() for texts in known.values for text in texts]
    prompts = [STUDENT_SYSTEM, "问题：", "标准答案：", "待评答案：", *COURTESIES, SYSTEM]
    tags = ["<output>", "</output>", RIGHT, WRONG, *FLAWS]
    tasks = [POINTS, REWORD, TOPIC, SAID, SHARED, ADDED, EACH, NONE, *PLAIN_WORDS.values()]
    names = [*PRODUCTS, *VAGUE, *OPENINGS, *CLOSINGS, *SLOTS]
    return ["system", "user", "assistant", *prompts, *tags, *names, *tasks, *wordings]


def characters() -> list[str]:
    """Those of the words, names and questions."""
    names = [name for known in PRODUCTS.values() for name in known]
    questions = [phrasing for known in SLOTS.values() for phrasing in known.questions]
    return sorted({*"".join((*words(), *names, *questions)), *"有无反多0123456789，。：；？\n "})


def _document(rng: Random) -> str:
    kinds = (_note_alone, _reword, _word, _topic, _said, _points, _compared, _each)
    return rng.choices(kinds, (5, 10, 6, 5, 10, 16, 18, 30))[0](rng)


def _note_alone(rng: Random) -> str:
    product, slot = rng.choice(pairs("train"))
    return f"{product}\n{compose(rng, facts_of(product, slot), 0)}\n"


def _reword(rng: Random) -> str:
    (fact,), (one, other) = _facts(rng, 1), rng.sample(range(3), 2)
    return _exercise(rng, f"{REWORD}：{fact.wording(one)}", fact.slot, fact.wording(other))


def _word(rng: Random) -> str:
    word, plain = rng.choice(list(PLAIN_WORDS.items()))
    asked, told = rng.sample((word, plain), 2)
    return _exercise(rng, f"{REWORD}：{asked}", asked, told)


def _topic(rng: Random) -> str:
    (fact,) = _facts(rng, 1)
    return _exercise(rng, f"{TOPIC}：{fact.wording(rng.randrange(3))}", fact.wording(), fact.slot)


def _said(rng: Random) -> str:
    facts = _facts(rng, rng.randint(1, 3))
    asked = rng.choice(facts) if rng.random() < 0.5 else _facts(rng, 1)[0]
    task = f"{SAID}{asked.wording()}：{_note(rng, facts)}"
    return _exercise(rng, task, _listed(facts), "有" if asked in facts else "无")


def _points(rng: Random) -> str:
    facts = _facts(rng, rng.randint(1, 3))
    return _exercise(rng, f"{POINTS}：{_note(rng, facts)}", "，".join(fact.slot for fact in facts), _listed(facts))


def _compared(rng: Random) -> str:
    first, second = _two_notes(rng)
    shared, added = [fact for fact in first if fact in second], [fact for fact in second if fact not in first]
    task, wanted = rng.choice(((SHARED, shared), (ADDED, added)))
    return _exercise(rng, f"{task}：{_listed(first)}。\n{_note(rng, second)}", _listed(second), _listed(wanted))


def _each(rng: Random) -> str:
    first, second = _two_notes(rng)
    found = "，".join(f"{fact.wording()}{'提到' if fact in second else '没提'}" for fact in first)
    return _exercise(rng, f"{EACH}：{_listed(first)}。\n{_note(rng, second)}", _listed(second), found)


def _two_notes(rng: Random) -> tuple[list[Fact], list[Fact]]:
    first = _facts(rng, rng.randint(1, 3))
    second = [fact if rng.random() < P_KEPT else _facts(rng, 1)[0] for fact in first]
    rng.shuffle(second)
    return first, second


def _exercise(rng: Random, task: str, thoughts: str, answer: str) -> str:
    if rng.random() < P_TAGGED:
        return chat(task, f"<think>{thoughts}</think><output>{answer}</output>", system=SYSTEM)
    return chat(task, answer)


def _facts(rng: Random, count: int) -> list[Fact]:
    return [Fact(slot, rng.randrange(len(SLOTS[slot].values))) for slot in rng.sample(list(SLOTS), count)]


def _note(rng: Random, facts: Sequence[Fact]) -> str:
    return compose(rng, facts, int(rng.random() < 0.2))


def _listed(facts: Sequence[Fact]) -> str:
    return "，".join(fact.wording() for fact in facts) or NONE
