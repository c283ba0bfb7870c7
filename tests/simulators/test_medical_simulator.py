"""The medical domain: its questions, its answers, and what the base model must not read."""

import json
from itertools import chain, cycle, islice
from random import Random
from typing import get_args

from qinglan.config import Embedded, Tenant
from qinglan.recipes.medical import judge_messages
from qinglan.recipes.medical_rules import RULES
from qinglan.recipes.prompting import undelimited
from qinglan.rows import Row, Split
from qinglan.simulators.domains import parts_in
from qinglan.simulators.domains.medical import build_sample, corpus, judge
from qinglan.simulators.domains.medical import facts as domain
from qinglan.simulators.domains.medical.facts import reveals_held_out, understand

CONFIG = Embedded(sample_train_rows=300, sample_dev_rows=40, sample_test_rows=120)
PAIRS = [pair for split in get_args(Split) for pair in domain.pairs(split)]


def questions(per_pair: int = 6) -> list[domain.MedicalQuestion]:
    """Questions about all pairs, in phrasings of all splits in turn."""
    rng = Random(3)
    asked_questions = []
    for pair in PAIRS:
        for split in islice(cycle(get_args(Split)), per_pair):
            asked_questions.append(domain.ask(rng, *pair, split))
    return asked_questions


def score(question: domain.MedicalQuestion, answer: str) -> float:
    inputs = {"answer": domain.full_answer(question)}
    row = Row(id="1", tenant="t", query=question.text, source="s", inputs=inputs)
    messages = judge_messages(row, answer, Tenant())
    verdict = judge.judge_json(undelimited(messages[1]["content"]), seed=1)
    return float(json.loads(verdict)["score"])


def test_every_question_is_understood_and_the_rules_see_danger_in_dangerous_ones_alone() -> None:
    for question in questions():
        expected = {question.topic} if domain.TOPICS[question.topic].statements else set()
        assert set(RULES.kinds(question.text)) == expected, question.text
        reading = understand(question.text)
        assert reading is not None, question.text
        assert reading.topic == question.topic, question.text
        assert reading.thing == question.thing, question.text
    assert understand("今天天气怎么样") is None


def test_complete_answers_earn_full_marks_and_forbidden_advice_none() -> None:
    for question in questions(per_pair=1):
        facts = domain.facts(question.topic, question.thing)
        assert RULES.parts(question.text, domain.full_answer(question), facts)["rule"] == 1
        statement = domain.statement(question.topic, question.thing)
        for advice in domain.TOPICS[question.topic].forbidden_advice:
            assert RULES.forbidden(question.text, f"{statement}{advice}。") != []


def test_the_judge_wants_facts_safety_and_brevity() -> None:
    question = domain.MedicalQuestion("华法林一次吃几片", "dosage", "华法林")
    full = domain.full_answer(question)
    score_of_full = score(question, full)
    score_of_facts = score(question, domain.statement("dosage", "华法林"))
    assert score_of_full >= 4.5
    assert score_of_full > score_of_facts > score(question, "请遵医嘱，不要自行加量。")
    assert score(question, full + "请立即拨打120。") < score_of_full
    assert score(question, full + "多吃几片没事。") <= 1


def test_the_judge_compares_answers_about_things_unknown_to_the_domain() -> None:
    prompt = "膝盖疼三天了\n资料中的回答：减少爬楼，必要时拍片\n待评回答："
    assert json.loads(judge.judge_json(prompt + "减少爬楼，必要时拍片"))["score"] >= 4.5


def test_dev_and_test_ask_what_no_other_split_asks() -> None:
    rows = build_sample(CONFIG)
    assert len({row.question.text for row in rows}) == len(rows) == 460
    for row in rows:
        assert row.split == domain.pair_split(row.question.topic, row.question.thing)
        assert reveals_held_out(row.question.text) == (row.split != "train")
    for topic in domain.TOPICS.values():
        phrasings = list(chain.from_iterable(topic.phrasings.values()))
        assert len(phrasings) == len(set(phrasings))
    for split in get_args(Split):
        assert {topic for topic, _ in domain.pairs(split)} == set(domain.TOPICS), split


def test_the_base_model_reads_nothing_of_dev_and_test_and_no_answer_to_a_question() -> None:
    answers = {domain.statement(*pair) for pair in PAIRS}
    for text in corpus.documents(seed=5, count=800):
        assert not reveals_held_out(text), text
        is_dialogue = "<|im_start|>" in text
        if is_dialogue:
            assert parts_in(text, answers) == [], text
