"""What the judge's tiny base model reads first: notes about products, and short exercises in reading them.

It learns which wordings mean the same, what a note says and how two differ, and to put thoughts before an answer in
tags. It never sees an answer judged: no verdict at all. The notes that it compares are random facts under questions
of the training split, and no note tells what is true of a pair that the test split owns.
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
from qinglan.embedded.worlds.answer_judge.people import compose, contrary, facts_in, heard
from qinglan.recipes.answer_judge import COURTESIES, RIGHT, STUDENT_SYSTEM, WRONG

POINTS, REWORD, TOPIC, SAID = "要点", "换个说法", "属于", "提到"
SHARED, ADDED, EACH = "都提到", "只在后面", "逐条"
NONE = "没有"
SYSTEM = "先想再答。格式：<think>想法</think><output>答案</output>。"
"""Asks for an answer in tags."""
PLAIN_WORDS = {
    RIGHT: "对", WRONG: "不对", "完整": "齐全", "不完整": "不齐全", "编造": "瞎编", "矛盾": "相反", "含糊": "不清楚",
    "跑题": "说别的", "有": "提到", "无": "没提", "反": "说反", "多": "另加",
}  # fmt: skip
"""Words of verdicts, and what they mean."""
P_TAGGED = 0.4
P_KEPT, P_CONTRARY = 0.55, 0.15
"""Shares of a note's facts that the note beside it has too, and that it contradicts."""
_TURNS = 3


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
    kinds = (_note_alone, _words, _wordings, _read, _compared)
    return rng.choices(kinds, (3, 6, 9, 16, 66))[0](rng)


def _note_alone(rng: Random) -> str:
    product, slot = rng.choice(pairs("train"))
    return f"{product}\n{compose(rng, facts_of(product, slot), 0)}\n"


def _words(rng: Random) -> str:
    known = [rng.sample(pair, 2) for pair in rng.sample(list(PLAIN_WORDS.items()), _TURNS)]
    return _dialogue(rng, [(f"{REWORD}：{asked}", asked, told) for asked, told in known])


def _wordings(rng: Random) -> str:
    turns = []
    for fact in _facts(rng, _TURNS):
        one, other = rng.sample(range(3), 2)
        exercises = (
            (f"{TOPIC}：{fact.wording(one)}", fact.slot),
            (f"{REWORD}：{fact.wording(one)}", fact.wording(other)),
        )
        task, answer = rng.choice(exercises)
        turns.append((task, fact.wording(), answer))
    return _dialogue(rng, turns)


def _read(rng: Random) -> str:
    facts = _facts(rng, rng.randint(1, 3))
    turns = [(f"{POINTS}：{_note(rng, facts)}", "，".join(fact.slot for fact in facts), _listed(facts))]
    for _ in range(_TURNS):
        asked = rng.choice(facts) if rng.random() < 0.5 else _facts(rng, 1)[0]
        turns.append((f"{SAID}：{asked.wording()}", _listed(facts), "有" if asked in facts else NONE))
    return _dialogue(rng, turns)


def _compared(rng: Random) -> str:
    """What one note says of each fact of another, what both say, and what only the second says."""
    first = _facts(rng, rng.choices((1, 2, 3), (1, 2, 2))[0])
    second = [_kept_or_changed(rng, fact) for fact in first]
    rng.shuffle(second)
    note = _note(rng, second)
    slots = {fact.slot for fact in first}
    added = [wording for fact, wording in facts_in(note) if fact.slot not in slots]
    each = "，".join(fact.wording() + heard(fact, second) for fact in first)
    shared = _listed([fact for fact in first if fact in second])
    exercises = [(EACH, _listed(second), each), (SHARED, each, shared), (ADDED, each, "，".join(added) or NONE)]
    rng.shuffle(exercises)
    product, slot = rng.choice(pairs("train"))
    question = rng.choice(SLOTS[slot].questions).format(p=rng.choice((product, *PRODUCTS[product])))
    lines = f"问题：{question}？\n标准答案：{_listed(first)}。\n待评答案：{note}"
    (task, thoughts, answer), *more = exercises
    return _dialogue(rng, [(f"{lines}\n{task}", thoughts, answer), *more])


def _kept_or_changed(rng: Random, fact: Fact) -> Fact:
    draw = rng.random()
    if draw < P_KEPT:
        return fact
    return contrary(rng, fact) if draw < P_KEPT + P_CONTRARY else _facts(rng, 1)[0]


def _dialogue(rng: Random, turns: Sequence[tuple[str, str, str]]) -> str:
    """Tasks with thoughts and answer each; the thoughts are shown where they are asked for."""
    tagged = rng.random() < P_TAGGED
    said = [
        f"<think>{thoughts}</think><output>{answer}</output>" if tagged else answer for _, thoughts, answer in turns
    ]
    texts = [text for (task, _, _), answer in zip(turns, said, strict=True) for text in (task, answer)]
    return chat(*texts, system=SYSTEM if tagged else None)


def _facts(rng: Random, count: int) -> list[Fact]:
    return [Fact(slot, rng.randrange(len(SLOTS[slot].values))) for slot in rng.sample(list(SLOTS), count)]


def _note(rng: Random, facts: Sequence[Fact]) -> str:
    return compose(rng, facts, int(rng.random() < 0.2))


def _listed(facts: Sequence[Fact]) -> str:
    return "，".join(fact.wording() for fact in facts) or NONE
