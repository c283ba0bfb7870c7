"""Selection marks rows; it never loses, reorders or rewrites them."""

from typing import Any

import pytest
from pydantic import ValidationError

from qinglan.config import Select
from qinglan.recipes import query_rewrite
from qinglan.rows import Retrieved, Row

select = query_rewrite.RECIPE.select
CONFIG = Select(min_top1_score=0.6, min_rewrite_chars=2, max_rewrite_chars=10)


def scored(*scores: float) -> Retrieved:
    return Retrieved(ids=tuple("abc"[: len(scores)]), scores=scores, titles=("",) * len(scores))


def row(**changes: Any) -> Row:
    good = {"answer": "头疼 缓解", "answer_retrieved": scored(0.9, 0.8, 0.7), "original_retrieved": scored(0.5)}
    return Row(id="1", tenant="t", query="头疼", source="q.csv:2", **(good | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"answer": None}, "empty_answer"),
        ({"answer": " \n"}, "empty_answer"),
        ({"answer": "抱歉，我无法改写"}, "refusal_text"),
        ({"answer": "改写后：头疼"}, "boilerplate"),
        ({"answer": "疼，。 ！"}, "rewrite_too_short"),
        ({"answer": "疼", "answer_retrieved": None}, "rewrite_too_short"),
        ({"answer_retrieved": None}, "not_validated"),
        ({"original_retrieved": None}, "not_validated"),
        ({"answer_retrieved": scored()}, "nothing_recalled"),
        ({"answer": "长" * 10}, None),
        ({"answer": "长" * 11}, "rewrite_too_long"),
        # RL may use a row that is too long, not one without a baseline.
        ({"answer": "长" * 11, "answer_retrieved": scored()}, "nothing_recalled"),
        ({"answer_retrieved": scored(0.6)}, None),
        ({"answer_retrieved": scored(0.59, 0.59, 0.59)}, "below_threshold"),
        ({"original_retrieved": scored(0.9, 0.8, 0.7)}, None),
        ({"original_retrieved": scored(0.9, 0.8, 0.8)}, "worse_than_original"),
    ],
)
def test_first_reason_that_applies(changes: dict[str, Any], reason: str | None) -> None:
    (selected,) = select([row(**changes)], CONFIG)
    assert (selected.reason, selected.status) == (reason, "failed" if reason else "ok")
    assert selected.model_copy(update={"status": "ok", "reason": None}) == row(**changes)


def test_comparison_with_the_original_can_be_switched_off() -> None:
    config = Select(not_worse_than_original=False)
    rows = [row(original_retrieved=scored(1, 1, 1)), row(original_retrieved=None)]
    assert [r.reason for r in select(rows, config)] == [None, None]


def test_earlier_failures_and_order_are_kept() -> None:
    rows = [row(answer=None).failed("teacher_refused"), row(), row(answer="")]
    selected = list(select(rows, CONFIG))
    assert [r.reason for r in selected] == ["teacher_refused", None, "empty_answer"]
    assert selected[:2] == rows[:2]


LONGER = Select(min_top1_score=0.6)


def reason_of(rewrite: str, config: Select = LONGER) -> str | None:
    (selected,) = select([row(answer=rewrite)], config)
    return selected.reason


@pytest.mark.parametrize(
    "text",
    [
        "抱歉，我无法回答这个问题", "非常抱歉，这个问题超出范围", "对不起！这里不能提供诊断", "抱歉 我不能协助",
        "很遗憾，我无法为您改写", "我无法回答该问题", "无法提供医疗建议", "作为AI，我不能判断",
        "作为一个人工智能语言模型，我没有", "我是AI助手，请问", "I'm sorry, but I can't help with that.",
        "I’m really sorry", "Sorry, I cannot answer", "I cannot provide medical advice",
        "Unfortunately, I am unable to rewrite this", "As an AI language model, I",
    ],
)  # fmt: skip
def test_refusals_in_words(text: str) -> None:
    assert reason_of(text) == "refusal_text"


@pytest.mark.parametrize(
    "text",
    [
        "改写后：虾青素 服用方法", "改写后的查询是：虾青素", "改写：虾青素", "以下是改写后的查询 虾青素",
        "以下为检索关键词：虾青素", "好的，虾青素 服用方法", "关键词：虾青素 用法", "检索词: 虾青素",
        "当前问题：虾青素咋吃", "用户画像：老年人 虾青素", "```虾青素```", "**虾青素** 服用方法", "# 虾青素",
        "- 虾青素", '{"query": "虾青素"}', '"rewrite": "虾青素"', "[虾青素, 用法]",
        "1. 虾青素 用法 2. 虾青素 副作用", "1、虾青素\n2、叶黄素", "虾青素\n叶黄素",
        "<think>用户想知道</think> 虾青素", "Rewritten query: astaxanthin dosage",
        "Sure, here is the rewritten query: astaxanthin",
    ],
)  # fmt: skip
def test_leftovers_of_an_answer(text: str) -> None:
    assert reason_of(text) == "boilerplate"


@pytest.mark.parametrize(
    "text",
    [
        "对不起 英语 表达方式", "孩子不会说抱歉 怎么教育", "我无法提供发票 如何退货", "无法入睡 失眠 治疗",
        "不能提供剧烈运动的膝盖 护理", "AI 语言模型 医疗应用", "作为AI产品经理 岗位职责",
        "I cannot sleep at night remedies", "维生素D3 1.5 微克 2.5 微克 区别", "1 型糖尿病 2 型糖尿病 区别",
        "改写 作文 技巧", "关键词提取 方法", "检查结果 解读", "C++ 与 C# 区别", "好的 益生菌 品牌", "omega-3 用量",
        "answer sheet printing",
    ],
)  # fmt: skip
def test_questions_that_look_like_them_may_teach(text: str) -> None:
    assert reason_of(text) is None


def test_a_sites_own_boilerplate() -> None:
    config = Select(boilerplate=(r"^\[检索\]", "客服您好"))
    assert [reason_of(text, config) for text in ("[检索]钙片 用量", "钙片 客服您好", "钙片 用量")] == [
        "boilerplate",
        "boilerplate",
        None,
    ]


def test_a_broken_expression_is_refused_with_its_text() -> None:
    with pytest.raises(ValidationError, match=r"boilerplate '\(钙片' is no regular expression: missing \)"):
        Select(boilerplate=("ok", "(钙片"))


@pytest.mark.parametrize(
    ("changes", "earlier", "reason"),
    [
        ({"review": "reject"}, None, "rejected_by_reviewer"),
        ({"review": "reject"}, "below_threshold", "rejected_by_reviewer"),
        ({"review": "accept", "answer": "抱歉，我无法改写"}, None, None),
        ({"review": "accept", "answer_retrieved": scored(0.1)}, None, None),
        ({"review": "accept"}, "rag_unavailable", None),
        ({"review": "accept", "answer": None}, "teacher_refused", "teacher_refused"),
        ({"review": "accept", "answer": None}, None, "empty_answer"),
        ({"review": "correct", "corrected": "头痛 缓解"}, None, None),
        ({"review": "correct", "corrected": "头痛 缓解", "answer": None}, "teacher_refused", None),
        ({"review": "correct", "corrected": " "}, "teacher_refused", "teacher_refused"),
        ({"review": "accept"}, "duplicate", "duplicate"),
        ({"review": "reject"}, "query_too_long", "query_too_long"),
    ],
)
def test_a_persons_verdict_outranks(changes: dict[str, Any], earlier: str | None, reason: str | None) -> None:
    before = row(**changes).failed(earlier) if earlier else row(**changes)
    (selected,) = select([before], CONFIG)
    assert (selected.reason, selected.status) == (reason, "failed" if reason else "ok")


def test_rows_are_taken_one_at_a_time() -> None:
    taken = iter([row(), row()])
    next(select(taken, CONFIG))
    assert len(list(taken)) == 1
