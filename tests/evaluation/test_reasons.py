"""Every reason has a sentence in both languages, and the code gives each the values that its
sentences take."""

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError
from report_fixture import english_in

import qinglan
from qinglan.clients.row_batches import RETRYABLE_REASONS
from qinglan.config import AlarmName
from qinglan.evaluation.models import SharedThing
from qinglan.evaluation.reasons import SENTENCES, TEXTS, Reason, placeholders, reason
from qinglan.grading.by_retrieval import RL_REASONS
from qinglan.recipes.answer_judge import RECIPE as ANSWER_JUDGE
from qinglan.recipes.medical import RECIPE as MEDICAL
from qinglan.rows import INPUT_REASONS
from qinglan.text import Both
from qinglan.training import alarms
from qinglan.training.engines.verl import STEP_METRICS

SENTENCE_TERMS = """
    RAG RUN NAME PROFILE qinglan release approve reviewer profile gate approval prices evaluate
    latency_queries docs reference reward compare tolerable_loss max_cost_ratio null rows SFT run
    pipeline train total_steps SHA rl actor_lr critic_lr ppo_epochs clip_ratio entropy_coefficient
    kl coefficient algorithm grpo temperature extra rollouts_per_prompt samples jsonl token nat
    dtype
"""
NAME_TERMS = "KL MRR RAG SFT log nDCG recall token top"


@pytest.mark.parametrize("code", SENTENCES)
def test_a_reason_has_a_sentence_in_both_languages(code: str):
    english, chinese = SENTENCES[code]
    assert english
    assert chinese
    assert not english_in(chinese, SENTENCE_TERMS)
    assert placeholders(english) == placeholders(chinese)


def test_the_code_and_the_sentences_agree():
    uses: list[tuple[str, set[str | None]]] = []
    """Codes that our modules give reasons, each with the names of its values."""
    for path in Path(qinglan.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "reason"
            ):
                codes = [
                    constant.value
                    for constant in ast.walk(node.args[0])
                    if isinstance(constant, ast.Constant)
                ]
                uses += [
                    (code, {keyword.arg for keyword in node.keywords})
                    for code in codes
                    if code in SENTENCES
                ]
    raised = set(re.findall(r'"(alarm_\w+)"', Path(alarms.__file__).read_text(encoding="utf-8")))
    assert {code for code, _ in uses} | raised | {"approved", "refused"} == SENTENCES.keys()
    spread = {None}  # `**values`, which are checked when the reason is made
    assert not [
        (code, v) for code, v in uses if v != placeholders(SENTENCES[code].en) and not v & spread
    ]


@pytest.mark.parametrize(
    ("code", "values"), [("no_such_code", {}), ("cases_passed", {"passed": 1}), ("empty", {"n": 1})]
)
def test_a_reason_without_its_sentence_or_values_is_refused(code: str, values: dict[str, int]):
    with pytest.raises(ValidationError, match=code):
        Reason(code=code, values=values)


def test_a_reason_survives_a_round_trip():
    original = reason(
        "gain_open",
        rival="sft",
        metric=Both("main verdict", "主结论"),
        why=reason("rows_for_difference", rows=2333),
    )
    assert Reason.model_validate_json(original.model_dump_json()) == original
    assert "主结论是否优于SFT 学生尚无定论：需要 2,333 行" in original.words.zh


def test_lists_are_joined_as_the_language_does():
    steps_by_alarm = {"kl_runaway": [3, 9], "reward_down": [4]}
    raised = [
        reason("alarm_at_steps", name=name, steps=steps) for name, steps in steps_by_alarm.items()
    ]
    assert reason("p95", ms=9.0, load=None).words == ("p95 9 ms", "p95 9 毫秒"), (
        "no value, no brackets"
    )
    assert reason("alarms", alarms=raised).words == (
        "kl_runaway (step 3, 9), reward_down (step 4)",
        "策略偏移过大（KL 失控）（第 3、9 步）、奖励下降（第 4 步）",
    )


@pytest.mark.parametrize("table", sorted(TEXTS.keys() - {"sentences", "alarm_actions"}))
def test_every_name_has_a_chinese_one(table: str):
    assert not [
        key
        for key, both in TEXTS[table].items()
        if not both.en or not both.zh or english_in(both.zh, NAME_TERMS)
    ]


def test_every_stage_alarm_figure_of_a_step_reason_of_a_row_and_shared_thing_has_a_name():
    recipes = RL_REASONS | ANSWER_JUDGE.grader.rl_reasons | MEDICAL.grader.rl_reasons
    rows = INPUT_REASONS | RETRYABLE_REASONS | recipes | {"prompt_too_long"}
    assert rows - {None} <= TEXTS["row_reasons"].keys()
    tasks = "".join(
        path.read_text(encoding="utf-8")
        for path in Path(qinglan.__file__).parent.glob("tasks/*.py")
    )
    assert set(re.findall(r'perform\(run, "(\w+)"', tasks)) <= TEXTS["phrases"].keys()
    assert STEP_METRICS.keys() <= TEXTS["training"].keys()
    assert TEXTS["alarms"].keys() == set(get_args(AlarmName))
    assert TEXTS["shared"].keys() == set(get_args(SharedThing))
