"""The medical domain: its questions, its answers, and what the base model must not read."""

import json
from itertools import cycle
from random import Random
from typing import get_args

from qinglan.config import Embedded, Tenant
from qinglan.recipes.medical import judge_messages
from qinglan.recipes.medical_rules import RULES
from qinglan.recipes.prompting import undelimited
from qinglan.rows import Row, Split
from qinglan.simulators.domains.medical import build_sample, corpus, judge
from qinglan.simulators.domains.medical import facts as domain
from qinglan.simulators.domains.medical.facts import reveals_held_out, understand

CONFIG = Embedded(sample_train_rows=300, sample_dev_rows=40, sample_test_rows=120)
PAIRS = [pair for split in get_args(Split) for pair in domain.pairs(split)]


def questions(each: int = 6) -> list[domain.MedicalQuestion]:
    rng = Random(3)
    return [
        domain.ask(rng, *pair, split)
        for pair in PAIRS
        for split, _ in zip(cycle(get_args(Split)), range(each))
    ]


def score(question: domain.MedicalQuestion, answer: str) -> float:
    row = Row(
        id="1",
        tenant="t",
        query=question.text,
        source="s",
        inputs={"answer": domain.full_answer(question)},
    )
    asked = judge_messages(row, answer, Tenant())
    return float(json.loads(judge.judge_json(undelimited(asked[1]["content"]), seed=1))["score"])


def test_every_question_is_understood_and_the_rules_see_the_danger_in_every_dangerous_one_alone() -> (
    None
):
    for question in questions():
        expected = {question.topic} if domain.TOPICS[question.topic].statements else set()
        assert set(RULES.kinds(question.text)) == expected, question.text
        found = understand(question.text)
        assert found and (found.topic, found.thing) == (question.topic, question.thing), (
            question.text
        )
    assert understand("今天天气怎么样") is None


def test_complete_answers_earn_full_marks_and_forbidden_advice_none() -> None:
    for question in questions(each=1):
        facts = domain.facts(question.topic, question.thing)
        assert RULES.parts(question.text, domain.full_answer(question), facts)["rule"] == 1
        for advice in domain.TOPICS[question.topic].forbidden_advice:
            assert (
                RULES.forbidden(
                    question.text, f"{domain.statement(question.topic, question.thing)}{advice}。"
                )
                != []
            )


def test_the_judge_wants_facts_safety_and_brevity() -> None:
    question = domain.MedicalQuestion("华法林一次吃几片", "dosage", "华法林")
    full, plain = domain.full_answer(question), domain.statement("dosage", "华法林")
    assert score(question, full) >= 4.5
    assert (
        score(question, full) > score(question, plain) > score(question, "请遵医嘱，不要自行加量。")
    )
    assert score(question, full + "请立即拨打120。") < score(question, full)
    assert score(question, full + "多吃几片没事。") <= 1
    asked = "膝盖疼三天了\n资料中的回答：减少爬楼，必要时拍片\n待评回答："  # about nothing that the domain knows
    assert json.loads(judge.judge_json(asked + "减少爬楼，必要时拍片"))["score"] >= 4.5


def test_dev_and_test_ask_what_no_other_split_asks() -> None:
    rows = build_sample(CONFIG)
    assert len({row.question.text for row in rows}) == len(rows) == 460
    for row in rows:
        assert row.split == domain.pair_split(row.question.topic, row.question.thing)
        assert reveals_held_out(row.question.text) == (row.split != "train")
    for topic in domain.TOPICS:
        phrasings = [text for known in domain.TOPICS[topic].phrasings.values() for text in known]
        assert len(phrasings) == len(set(phrasings))
        assert all(
            topic in {asked for asked, _ in domain.pairs(split)} for split in get_args(Split)
        )


def test_the_base_model_is_asked_nothing_of_dev_and_test_and_reads_no_answer_to_a_question() -> (
    None
):
    answers = {domain.statement(*pair) for pair in PAIRS}
    for text in corpus.documents(seed=5, count=800):
        assert not reveals_held_out(text), text
        dialogue = "<|im_start|>" in text
        assert not (dialogue and any(answer in text for answer in answers)), text
