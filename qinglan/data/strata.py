"""Kinds of rows that a reviewer should see: where signals disagree, and some at random."""

import math
from collections.abc import Callable
from typing import NamedTuple

from qinglan.config import Select
from qinglan.rows import Retrieved, Row

RULE_REASONS = frozenset(
    {
        "answer_too_long",
        "boilerplate",
        "empty_answer",
        "refusal_text",
        "rewrite_too_long",
        "rewrite_too_short",
        "teacher_refused",
        "truncated",
    }
)
"""Reasons that lie in the answer itself, not in its scores.

A reviewer may disagree with them, or write a better answer.
"""

_LOW_JUDGE = 3.0
_HIGH_JUDGE = 4.0
_LOW_PART = 0.5
_MARGIN = 0.05
"""Distance from the selection's threshold within which a top-1 score is close to it."""


class Stratum(NamedTuple):
    """A kind of rows that a reviewer should see, and its share of the sample."""

    name: str
    title: str
    """Its name in the workbook."""
    share: float
    meaning: str
    holds: Callable[[Row, Select], bool]
    """Tells whether a row belongs to the stratum."""


# NaN where there is no value: no comparison with it holds.
def _judge(row: Row) -> float:
    return math.nan if row.judge_score is None else row.judge_score


def _top1(row: Row) -> float:
    return math.nan if row.answer_retrieved is None else row.answer_retrieved.top1_score


def _quality(retrieved: Retrieved | None) -> float:
    return math.nan if retrieved is None else retrieved.quality


def _lowest_part(row: Row) -> float:
    return min((row.parts or {}).values(), default=math.nan)


def _would_teach(row: Row, _: Select) -> bool:
    return row.status == "ok" and bool(row.answer) and row.split in (None, "train")


def _judge_low(row: Row, select: Select) -> bool:
    return _judge(row) < _LOW_JUDGE and _top1(row) >= select.min_top1_score


def _judge_high(row: Row, select: Select) -> bool:
    return _judge(row) >= _HIGH_JUDGE and _top1(row) < select.min_top1_score


def _just_above(row: Row, select: Select) -> bool:
    return select.min_top1_score <= _top1(row) <= select.min_top1_score + _MARGIN


def _just_below(row: Row, select: Select) -> bool:
    return select.min_top1_score - _MARGIN <= _top1(row) < select.min_top1_score


def _worse_than_original(row: Row, _: Select) -> bool:
    return _quality(row.answer_retrieved) < _quality(row.original_retrieved)


def _gold_missed(row: Row, select: Select) -> bool:
    if row.answer_retrieved is None or row.gold_id is None:
        return False
    is_missed = row.answer_retrieved.rank(row.gold_id) == 0
    return is_missed and _top1(row) >= select.min_top1_score


def _by_rule(row: Row, _: Select) -> bool:
    return row.reason in RULE_REASONS


def _low_score(row: Row, _: Select) -> bool:
    return _judge(row) < _LOW_JUDGE


def _high_score_low_part(row: Row, _: Select) -> bool:
    return _judge(row) >= _HIGH_JUDGE and _lowest_part(row) < _LOW_PART


def _low_part(row: Row, _: Select) -> bool:
    return _lowest_part(row) < 1


def _in_pool(row: Row, _: Select) -> bool:
    return row.pool is not None and bool(row.answer)


def _by_rule_or_failed(row: Row, _: Select) -> bool:
    is_failed_answer = row.status == "failed" and bool(row.answer)
    return row.reason in RULE_REASONS or is_failed_answer


CONTROL = Stratum(
    "control",
    "随机对照",
    0.25,
    "从全部入选行中随机抽取，用来估计错误率，请务必全部填写",
    _would_teach,
)
REWRITE_STRATA = (
    CONTROL,
    Stratum("judge_low", "裁判低检索高", 0.15, "裁判分低于 3，但检索得分达到阈值", _judge_low),
    Stratum(
        "judge_high", "裁判高检索低", 0.10, "裁判分不低于 4，但检索得分未达到阈值", _judge_high
    ),
    Stratum(
        "just_above", "略高于阈值", 0.10, "检索得分刚刚达到阈值（高出不超过 0.05）", _just_above
    ),
    Stratum(
        "just_below", "略低于阈值", 0.10, "检索得分刚刚未达到阈值（低出不超过 0.05）", _just_below
    ),
    Stratum(
        "worse_than_original", "不如原问题", 0.10, "改写的检索质量低于原问题", _worse_than_original
    ),
    Stratum(
        "gold_missed",
        "高分未召回标准文档",
        0.10,
        "检索得分达到阈值，但没有召回标准文档",
        _gold_missed,
    ),
    Stratum("by_rule", "规则淘汰", 0.10, "因拒答、套话、过长等规则被淘汰", _by_rule),
)
"""Strata of rewrites, by what they retrieve."""
ANSWER_STRATA = (
    CONTROL,
    Stratum("low_score", "裁判分低", 0.20, "裁判分低于 3", _low_score),
    Stratum(
        "high_score_low_part",
        "裁判高规则低",
        0.15,
        "裁判分不低于 4，但有一项规则分低于 0.5",
        _high_score_low_part,
    ),
    Stratum("low_part", "规则有扣分", 0.15, "有一项规则分低于 1", _low_part),
    Stratum("in_pool", "专门数据池", 0.15, "属于某个数据池（例如红队、金标）的行", _in_pool),
    Stratum(
        "by_rule_or_failed", "规则淘汰", 0.10, "因格式、拒答、过长等规则被淘汰", _by_rule_or_failed
    ),
)
"""Strata of answers, by their rules."""
