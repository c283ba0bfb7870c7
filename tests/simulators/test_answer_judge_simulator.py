"""The judge's domain: answers of every kind, a judge that is nearly always right, and a sample that
leaks nothing."""

from collections import Counter
from itertools import combinations
from random import Random
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
    wordings = [text for known in SLOTS.values() for texts in known.values for text in texts]
    assert len(wordings) == len(set(wordings))
    assert max(map(len, wordings)) <= 6
    assert [facts_in(text)[0][1] for text in wordings] == wordings
    from qinglan.simulators.pretrain import build_tokenizer  # loads torch

    tok = build_tokenizer(DOMAIN)
    assert [text for text in wordings if len(tok.encode(text, add_special_tokens=False)) > 1] == []


def test_the_weak_model_answers_in_every_way():
    rng, pair = Random(0), pairs("train")[0]
    found = Counter(judge(facts_of(*pair), weak_answer(rng, *pair).facts).flaw for _ in range(400))
    assert set(found) >= set(FLAWS) - {"不完整"}
    said = answer("辅酶Q10一天吃几次？", 7)
    assert said == answer("辅酶Q10一天吃几次？", 7)
    assert facts_in(answer("今天天气如何？", 7)) == []


def test_the_strong_model_overlooks_what_judges_are_known_to_overlook(rows: list[JudgeSampleRow]):
    right: dict[str, list[bool]] = {}
    for sample in (row for row in rows if row.truth):
        inputs = {"reference": sample.reference, "candidate": sample.candidate}
        row = Row(id="x", tenant="t", query=sample.query, inputs=inputs, source="x")
        said = reason(undelimited(RECIPE.teacher_messages(row, Tenant())[-1]["content"]), 7)
        assert said.reasoning and sample.truth
        right.setdefault(sample.truth.flaw, []).append(f"{sample.truth.main}，" in said.answer)
    share = {flaw: sum(found) / len(found) for flaw, found in right.items()}
    assert share["编造"] < 0.6 < share["含糊"] < 0.95
    assert min(share[flaw] for flaw in ("完整", "不完整", "矛盾", "跑题")) > 0.85


def test_no_two_splits_ask_the_same_and_pretraining_shows_no_verdict_and_no_test_question(
    rows: list[JudgeSampleRow],
):
    asked = {split: {row.query for row in rows if row.split == split} for split in get_args(Split)}
    for one, other in combinations(get_args(Split), 2):
        assert not set(pairs(one)) & set(pairs(other))
        assert not asked[one] & asked[other]
    texts = list(DOMAIN.documents(3, 4000))
    assert not any("正确，" in text or "错误，" in text for text in texts)
    assert not any(
        line.removeprefix("问题：") in asked["test"] for text in texts for line in text.splitlines()
    )
