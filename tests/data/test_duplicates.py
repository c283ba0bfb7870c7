"""Near-duplicate groups: exact where texts are near, and no slower for a thousand of a kind."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from question_rows import LONG, SAME, random_rows, row

from qinglan.data.dataset import duplicates
from qinglan.data.dataset.duplicates import Questions, near_duplicate_groups
from qinglan.rows import Row, normalise

LETTERS = [chr(0x4E00 + i) for i in range(3000)]


def groups_of(rows: list[Row], jaccard: float = 0.85) -> list[int]:
    with Questions() as questions:
        for question in rows:
            questions.add(question)
        return near_duplicate_groups(questions, jaccard)[0].tolist()


def grouped(*rows: Row) -> bool:
    return len(set(groups_of(list(rows)))) == 1


def by_brute_force(rows: list[Row], jaccard: float) -> list[int]:
    """Today's definition, every pair compared."""

    def grams(text: str) -> set[str]:
        return {text[i : i + 3] for i in range(max(1, len(text) - 2))}

    def near(a: set[str], b: set[str]) -> bool:
        return len(a & b) / len(a | b) >= jaccard

    queries = [normalise(r.query) for r in rows]
    contexts = [normalise(r.history + r.profile) for r in rows]
    of_query = [grams(query) for query in queries]
    of_whole = [grams(query + context) for query, context in zip(queries, contexts, strict=True)]
    groups = list(range(len(rows)))
    for a, b in itertools.combinations(range(len(rows)), 2):
        if near(of_query[a], of_query[b]) and near(of_whole[a], of_whole[b]):
            low, high = sorted((groups[a], groups[b]))
            for place, group in enumerate(groups):
                if group == high:
                    groups[place] = low
    return groups


def variants(count: int, seed: int) -> list[Row]:
    """Short texts around a few themes, some with a context, from nearly the same to nothing
    alike."""
    source = random.Random(seed)
    themes = ["".join(source.sample(LETTERS, source.randint(3, 30))) for _ in range(count // 10)]

    def noisy(text: str) -> str:
        return "".join(letter for letter in text if source.random() > 0.05) or text

    rows = []
    for _ in range(count):
        history = noisy(source.choice(themes)) if source.random() < 0.3 else ""
        rows.append(row(noisy(source.choice(themes)), history=history))
    return rows


def test_which_questions_are_the_same() -> None:
    assert grouped(row(LONG), row(SAME))
    assert grouped(row("疼", history=LONG), row("疼。", history=SAME))
    assert grouped(row("钙片 怎么吃"), row("钙片怎么吃？"))
    assert not grouped(row(LONG), row(LONG.replace("高血压", "糖尿病").replace("头晕", "口渴")))
    assert not grouped(row("能吃蛋白粉吗", profile=LONG * 2), row("能喝鱼油吗", profile=LONG * 2))
    assert not grouped(
        row("多少钱一瓶", history="问过钙片"), row("多少钱一瓶", history="问过褪黑素")
    )
    assert not grouped(row("疼"), row("痒"))
    chain = [row(LONG), row(SAME), row(SAME + "谢谢")]
    assert groups_of(chain) == groups_of(chain[::-1]) == [0, 0, 0]
    assert groups_of([]) == []


@pytest.mark.parametrize("jaccard", [0.6, 0.85, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_groups_are_those_of_comparing_every_pair(seed: int, jaccard: float) -> None:
    rows = variants(300, seed)
    assert groups_of(rows, jaccard) == by_brute_force(rows, jaccard)


KINDS: dict[str, Callable[[str], Row]] = {
    "template": lambda word: row(
        f"请问一下医生我平时每天早上空腹吃{word}的话会不会伤害到胃有没有什么副作用"
    ),
    "copies": lambda word: row(LONG * 3 + word),
    "context": lambda word: row(word * 3, profile=LONG * 5),
    "bare": lambda word: row(
        "多少钱一瓶", history=f"上一轮问了{word}，接下来想知道它的价格和在哪里可以买到"
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_of_a_kind_are_not_compared_pair_by_pair(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(1)
    comparisons: list[int] = []
    original = duplicates._same

    def counting(*args: Any) -> bool:
        comparisons.append(1)
        return original(*args)

    monkeypatch.setattr(duplicates, "_same", counting)
    rows = [KINDS[kind]("".join(source.sample(LETTERS, 3))) for _ in range(1000)]
    assert len(set(groups_of(rows))) == (1 if kind == "copies" else 1000)
    assert len(comparisons) < 20_000, "of 499,500 pairs"


def test_evaluation_questions_mark_the_groups_they_repeat_and_merge_none() -> None:
    near = row(LONG)
    far = row(LONG + "谢谢您的回答啊啊")
    between = row(LONG + "谢谢您啊")
    assert not grouped(near, far)
    assert grouped(near, between)
    assert grouped(between, far)
    rows = [near, *random_rows(50), far, random_rows(1, seed=5)[0]]
    with Questions() as questions:
        for question in rows:
            questions.add(question)
        for question in (between, *random_rows(1, seed=5), *random_rows(50, seed=6)):
            questions.add_evaluation(question)
        groups, is_repeat = near_duplicate_groups(questions, 0.85)
    assert groups.tolist() == list(range(len(rows)))
    assert is_repeat.nonzero()[0].tolist() == [0, 51, 52]
