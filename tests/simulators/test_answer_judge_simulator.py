"""The judge's domain: answers of every kind, a judge that is nearly always right, and a sample that leaks nothing."""

from collections import Counter
from random import Random

import pytest

from qinglan.config import Embedded, Tenant
from qinglan.errors import ConfigError
from qinglan.recipes.answer_judge import FLAWS as ASKED
from qinglan.recipes.answer_judge import RECIPE
from qinglan.rows import Row
from qinglan.simulators import tokenizer
from qinglan.simulators.domains.answer_judge import DOMAIN
from qinglan.simulators.domains.answer_judge.facts import FLAWS, SLOTS, AnswerVerdict, Fact, facts_of, judge, pairs
from qinglan.simulators.domains.answer_judge.models import answer, facts_in, reason, reference_text, weak_answer
from qinglan.simulators.domains.answer_judge.sample import JudgeSampleRow, build_rows

CONFIG = Embedded(sample_train_rows=60, sample_dev_rows=20, sample_test_rows=400)
DAILY, TWICE, BEFORE_MEALS, COLD = Fact("频次", 0), Fact("频次", 1), Fact("时机", 0), Fact("储存", 0)


@pytest.fixture(scope="module")
def rows() -> list[JudgeSampleRow]:
    return build_rows(CONFIG)


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ((BEFORE_MEALS, DAILY), AnswerVerdict(True, "完整")),
        ((DAILY,), AnswerVerdict(True, "不完整")),
        ((BEFORE_MEALS,), AnswerVerdict(False, "不完整")),
        ((DAILY, BEFORE_MEALS, COLD), AnswerVerdict(False, "编造")),
        ((TWICE, BEFORE_MEALS, COLD), AnswerVerdict(False, "矛盾")),
        ((COLD,), AnswerVerdict(False, "跑题")),
        ((), AnswerVerdict(False, "含糊")),
    ],
)
def test_the_truth_about_an_answer(said: tuple[Fact, ...], verdict: AnswerVerdict):
    assert judge((DAILY, BEFORE_MEALS), said) == verdict


def test_the_domain_and_the_recipe_know_the_same_flaws():
    assert FLAWS == ASKED


def test_no_wording_belongs_to_two_facts_or_hides_in_another():
    wordings = [text for known in SLOTS.values() for texts in known.values for text in texts]
    assert len(wordings) == len(set(wordings))
    assert max(map(len, wordings)) <= 6
    assert [facts_in(text)[0][1] for text in wordings] == wordings


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
        said = reason(RECIPE.teacher_messages(row, Tenant())[-1]["content"], 7)
        assert said.reasoning and sample.truth
        right.setdefault(sample.truth.flaw, []).append(f"{sample.truth.words[0]}，" in said.answer)
    share = {flaw: sum(found) / len(found) for flaw, found in right.items()}
    assert share["编造"] < 0.6 < share["含糊"] < 0.95
    assert min(share[flaw] for flaw in ("完整", "不完整", "矛盾", "跑题")) > 0.85


def test_dev_test_and_a_part_of_train_have_verdicts(rows: list[JudgeSampleRow]):
    assert Counter(row.split for row in rows) == {"train": 60, "dev": 20, "test": 400}
    assert all(bool(row.candidate) == bool(row.truth) for row in rows)
    assert {row.split for row in rows if not row.truth} == {"train"}
    assert 10 < sum(row.split == "train" and bool(row.truth) for row in rows) < 35
    assert all(bool(row.reworded) == (row.split == "test") for row in rows)


def test_a_reworded_answer_says_the_same(rows: list[JudgeSampleRow]):
    for row in rows:
        if row.reworded:
            assert {fact for fact, _ in facts_in(row.reworded)} == {fact for fact, _ in facts_in(row.candidate)}


def test_the_test_split_asks_what_training_never_does(rows: list[JudgeSampleRow]):
    assert not set(pairs("train")) & set(pairs("test"))
    asked = {split: {row.query for row in rows if row.split == split} for split in ("train", "dev", "test")}
    assert not asked["test"] & (asked["train"] | asked["dev"])


def test_pretraining_shows_no_verdict_and_no_question_of_the_test_split(rows: list[JudgeSampleRow]):
    texts = list(DOMAIN.documents(3, 4000))
    assert not any("正确，" in text or "错误，" in text for text in texts)
    asked = {row.query for row in rows if row.split == "test"}
    assert not any(line.removeprefix("问题：") in asked for text in texts for line in text.splitlines())


def test_every_wording_is_one_token():
    tok = tokenizer.build(DOMAIN)
    wordings = [text for known in SLOTS.values() for texts in known.values for text in texts]
    assert [text for text in wordings if len(tok.encode(text, add_special_tokens=False)) > 1] == []


def test_more_rows_than_there_are_questions_is_refused():
    with pytest.raises(ConfigError, match="sample_train_rows: 90000 is too many"):
        build_rows(CONFIG.model_copy(update={"sample_train_rows": 90_000}))


def test_a_reference_states_its_facts_in_order():
    for pair in pairs("test"):
        assert tuple(fact for fact, _ in facts_in(reference_text(*pair))) == facts_of(*pair)
