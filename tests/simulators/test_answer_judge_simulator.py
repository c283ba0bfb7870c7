"""The judge's domain: its answers, its judge, and a sample that leaks nothing."""

from collections import Counter
from itertools import combinations
from random import Random
from statistics import fmean
from typing import get_args

import pytest

from qinglan.config import Embedded, Tenant
from qinglan.recipes.answer_judge import FLAWS, RECIPE
from qinglan.recipes.prompting import undelimited
from qinglan.rows import Row, Split
from qinglan.simulators.domains.answer_judge import DOMAIN, JudgeSampleRow, build_rows
from qinglan.simulators.domains.answer_judge.facts import SLOTS, facts_of, judge, pairs
from qinglan.simulators.domains.answer_judge.models import answer, facts_in, reason, weak_answer

CONFIG = Embedded(sample_train_rows=60, sample_dev_rows=20, sample_test_rows=400)


@pytest.fixture(scope="module")
def rows() -> list[JudgeSampleRow]:
    return build_rows(CONFIG)


def test_no_wording_belongs_to_two_facts_or_hides_in_another():
    wordings: list[str] = []
    for slot in SLOTS.values():
        for value in slot.values:
            wordings += value
    assert len(wordings) == len(set(wordings))
    assert max(map(len, wordings)) <= 6
    assert [facts_in(text)[0][1] for text in wordings] == wordings
    from qinglan.simulators.pretrain import build_tokenizer  # loads torch

    tokenizer = build_tokenizer(DOMAIN)
    tokens = {text: tokenizer.encode(text, add_special_tokens=False) for text in wordings}
    assert [text for text, ids in tokens.items() if len(ids) > 1] == []


def test_the_weak_model_answers_in_every_way():
    rng = Random(0)
    pair = pairs("train")[0]
    reference = facts_of(*pair)
    flaws = Counter(judge(reference, weak_answer(rng, *pair).facts).flaw for _ in range(400))
    assert set(flaws) >= set(FLAWS) - {"不完整"}
    assert answer("辅酶Q10一天吃几次？", 7) == answer("辅酶Q10一天吃几次？", 7)
    assert facts_in(answer("今天天气如何？", 7)) == []


def test_the_strong_model_overlooks_what_judges_are_known_to_overlook(rows: list[JudgeSampleRow]):
    verdicts_right: dict[str, list[bool]] = {}
    for sample in rows:
        if sample.truth is None:
            continue
        inputs = {"reference": sample.reference, "candidate": sample.candidate}
        row = Row(id="x", tenant="t", query=sample.query, inputs=inputs, source="x")
        prompt = RECIPE.teacher_messages(row, Tenant())[-1]["content"]
        reply = reason(undelimited(prompt), 7)
        assert reply.reasoning
        is_right = f"{sample.truth.main}，" in reply.answer
        verdicts_right.setdefault(sample.truth.flaw, []).append(is_right)
    share = {flaw: fmean(verdicts) for flaw, verdicts in verdicts_right.items()}
    assert share["编造"] < 0.6
    assert 0.6 < share["含糊"] < 0.95
    assert min(share[flaw] for flaw in ("完整", "不完整", "矛盾", "跑题")) > 0.85


def test_no_two_splits_ask_the_same_and_pretraining_shows_no_verdict_and_no_test_question(
    rows: list[JudgeSampleRow],
):
    questions: dict[Split, set[str]] = {split: set() for split in get_args(Split)}
    for row in rows:
        questions[row.split].add(row.query)
    for split, other_split in combinations(get_args(Split), 2):
        assert set(pairs(split)) & set(pairs(other_split)) == set()
        assert questions[split] & questions[other_split] == set()
    for text in DOMAIN.documents(3, 4000):
        assert "正确，" not in text
        assert "错误，" not in text
        lines = {line.removeprefix("问题：") for line in text.splitlines()}
        assert lines & questions["test"] == set()
