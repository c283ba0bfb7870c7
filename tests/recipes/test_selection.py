"""Selection marks rows; it never loses, reorders or rewrites them."""

from typing import Any

import pytest

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
        ({"answer": " \n"}, "empty_answer"),
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
    rows = [row(original_retrieved=scored(1, 1, 1)), row(original_retrieved=None)]
    assert [each.reason for each in select(rows, Select(not_worse_than_original=False))] == [None, None]


@pytest.mark.parametrize(
    ("reason", "texts"),
    [
        ("refusal_text", [
            "非常抱歉，这个问题超出范围", "抱歉 我不能协助", "很遗憾，我无法为您改写", "无法提供医疗建议",
            "作为一个人工智能语言模型，我没有", "I’m really sorry", "I cannot provide medical advice",
            "Unfortunately, I am unable to rewrite this", "As an AI language model, I",
        ]),
        ("boilerplate", [
            "改写后的查询是：虾青素", "以下为检索关键词：虾青素", "好的，虾青素 服用方法", "关键词：虾青素 用法",
            "用户画像：老年人 虾青素", "```虾青素```", "- 虾青素", '{"query": "虾青素"}', "[虾青素, 用法]",
            "1. 虾青素 用法 2. 虾青素 副作用", "虾青素\n叶黄素", "<think>用户想知道</think> 虾青素",
            "Rewritten query: astaxanthin dosage", "Sure, here is the rewritten query: astaxanthin",
            "[检索]钙片 用量", "钙片 客服您好",
        ]),
        (None, [
            "对不起 英语 表达方式", "孩子不会说抱歉 怎么教育", "我无法提供发票 如何退货", "不能提供剧烈运动的膝盖 护理",
            "作为AI产品经理 岗位职责", "I cannot sleep at night remedies", "维生素D3 1.5 微克 2.5 微克 区别",
            "改写 作文 技巧", "关键词提取 方法", "C++ 与 C# 区别", "好的 益生菌 品牌", "answer sheet printing",
        ]),
    ],
)  # fmt: skip
def test_refusals_and_leftovers_of_an_answer_are_no_rewrites(reason: str | None, texts: list[str]) -> None:
    config = Select(min_top1_score=0.6, boilerplate=(r"^\[检索\]", "客服您好"))
    selected = select([row(answer=text) for text in texts], config)
    assert [(each.answer, each.reason) for each in selected] == [(text, reason) for text in texts]


@pytest.mark.parametrize(
    ("changes", "earlier", "reason"),
    [
        ({"review": "reject"}, "below_threshold", "rejected_by_reviewer"),
        ({"review": "accept", "answer": "抱歉，我无法改写"}, None, None),
        ({"review": "accept"}, "rag_unavailable", None),
        ({"review": "accept", "answer": None}, "teacher_refused", "teacher_refused"),
        ({"review": "correct", "corrected": "头痛 缓解", "answer": None}, "teacher_refused", None),
        ({"review": "correct", "corrected": " "}, "teacher_refused", "teacher_refused"),
        ({"review": "reject"}, "query_too_long", "query_too_long"),
    ],
)
def test_a_persons_verdict_outranks(changes: dict[str, Any], earlier: str | None, reason: str | None) -> None:
    before = row(**changes).failed(earlier) if earlier else row(**changes)
    (selected,) = select([before], CONFIG)
    assert (selected.reason, selected.status) == (reason, "failed" if reason else "ok")
