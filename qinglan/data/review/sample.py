"""Chooses the rows to review: those where the signals disagree, and some at random.

Each stratum has its share of the sample; what a stratum cannot fill goes to the others. The control
rows are drawn from all rows that SFT would learn, so that their error rate is that of the dataset.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from qinglan.config import Select
from qinglan.data.dataset.splits import is_leak
from qinglan.rows import INPUT_REASONS, BottomK, Retrieved, Row, hash_fraction

RULE_REASONS = frozenset(
    {
        "answer_too_long",
        "boilerplate",
        "empty_answer",
        "refusal_text",
        "rewrite_too_long",
        "rewrite_too_short",
    }
    | {"teacher_refused", "truncated"}
)
"""Failed for the answer itself, not for its scores; a reviewer may disagree, or write a better
one."""

_LOW_JUDGE, _HIGH_JUDGE, _LOW_PART = 3.0, 4.0, 0.5
_MARGIN = 0.05
"""Of the top-1 score around the selection's threshold."""


class Stratum(NamedTuple):
    name: str
    """In `_CONDITIONS`, too."""
    title: str
    """Its name in the workbook."""
    share: float
    meaning: str


CONTROL = Stratum(
    "control", "随机对照", 0.25, "从全部入选行中随机抽取，用来估计错误率，请务必全部填写"
)
STRATA = (
    CONTROL,
    Stratum("judge_low", "裁判低检索高", 0.15, "裁判分低于 3，但检索得分达到阈值"),
    Stratum("judge_high", "裁判高检索低", 0.10, "裁判分不低于 4，但检索得分未达到阈值"),
    Stratum("just_above", "略高于阈值", 0.10, "检索得分刚刚达到阈值（高出不超过 0.05）"),
    Stratum("just_below", "略低于阈值", 0.10, "检索得分刚刚未达到阈值（低出不超过 0.05）"),
    Stratum("worse_than_original", "不如原问题", 0.10, "改写的检索质量低于原问题"),
    Stratum("gold_missed", "高分未召回标准文档", 0.10, "检索得分达到阈值，但没有召回标准文档"),
    Stratum("by_rule", "规则淘汰", 0.10, "因拒答、套话、过长等规则被淘汰"),
)
"""Of rewrites."""
ANSWER_STRATA = (
    CONTROL,
    Stratum("low_score", "裁判分低", 0.20, "裁判分低于 3"),
    Stratum("high_score_low_part", "裁判高规则低", 0.15, "裁判分不低于 4，但有一项规则分低于 0.5"),
    Stratum("low_part", "规则有扣分", 0.15, "有一项规则分低于 1"),
    Stratum("in_pool", "专门数据池", 0.15, "属于某个数据池（例如红队、金标）的行"),
    Stratum("by_rule_or_failed", "规则淘汰", 0.10, "因格式、拒答、过长等规则被淘汰"),
)


# NaN where there is no value: no comparison with it holds.
def _judge(row: Row) -> float:
    return math.nan if row.judge_score is None else row.judge_score


def _top1(row: Row) -> float:
    return math.nan if row.answer_retrieved is None else row.answer_retrieved.top1_score


def _quality(found: Retrieved | None) -> float:
    return math.nan if found is None else found.quality


def _lowest_part(row: Row) -> float:
    return min((row.parts or {}).values(), default=math.nan)


def _misses_gold(row: Row) -> bool:
    found = row.answer_retrieved
    return found is not None and row.gold_id is not None and not found.rank(row.gold_id)


_CONDITIONS: dict[str, Callable[[Row, Select], bool]] = {
    "control": lambda row, _: (
        row.status == "ok" and bool(row.answer) and row.split in (None, "train")
    ),
    "judge_low": lambda row, select: (
        _judge(row) < _LOW_JUDGE and _top1(row) >= select.min_top1_score
    ),
    "judge_high": lambda row, select: (
        _judge(row) >= _HIGH_JUDGE and _top1(row) < select.min_top1_score
    ),
    "just_above": lambda row, select: (
        select.min_top1_score <= _top1(row) <= select.min_top1_score + _MARGIN
    ),
    "just_below": lambda row, select: (
        select.min_top1_score - _MARGIN <= _top1(row) < select.min_top1_score
    ),
    "worse_than_original": lambda row, _: (
        _quality(row.answer_retrieved) < _quality(row.original_retrieved)
    ),
    "gold_missed": lambda row, select: _top1(row) >= select.min_top1_score and _misses_gold(row),
    "by_rule": lambda row, _: row.reason in RULE_REASONS,
    "low_score": lambda row, _: _judge(row) < _LOW_JUDGE,
    "high_score_low_part": lambda row, _: (
        _judge(row) >= _HIGH_JUDGE and _lowest_part(row) < _LOW_PART
    ),
    "low_part": lambda row, _: _lowest_part(row) < 1,
    "in_pool": lambda row, _: row.pool is not None and bool(row.answer),
    "by_rule_or_failed": lambda row, _: (
        row.reason in RULE_REASONS or (row.status == "failed" and bool(row.answer))
    ),
}


class SampledRow(NamedTuple):
    row: Row
    strata: tuple[Stratum, ...]
    """All that hold for it; `CONTROL` only where it is one of the control rows."""


class ReviewSample(NamedTuple):
    """The rows to review in a random order, so that the first half of them is a sample too."""

    rows: Sequence[SampledRow]
    strata: Sequence[Stratum]
    population: dict[str, int]
    """How many rows each stratum had to draw from, by its name."""


def draw_sample(
    rows: Iterable[Row], config: Select, size: int, strata: Sequence[Stratum] = STRATA
) -> ReviewSample:
    """At most `size` rows of a stream, each once; keeps no more than `size` rows per stratum in
    memory."""
    candidates: dict[str, BottomK[Row]] = {
        stratum.name: BottomK(size, stratum.name) for stratum in strata
    }
    population: Counter[str] = Counter({stratum.name: 0 for stratum in strata})
    for row in rows:
        is_judged = bool(row.answer) or row.reason in RULE_REASONS
        if (
            not is_judged or row.reason in INPUT_REASONS or is_leak(row.reason)
        ):  # no verdict could change it
            continue
        for stratum in strata:
            if _CONDITIONS[stratum.name](row, config):
                population[stratum.name] += 1
                candidates[stratum.name].add(row.id, row)
    ranked = {name: sample.items() for name, sample in candidates.items()}
    chosen, controls = _allot(ranked, size, strata)
    drawn = []
    for row in chosen.values():
        holds = {
            s: row.id in controls if s is CONTROL else _CONDITIONS[s.name](row, config)
            for s in strata
        }
        drawn.append(SampledRow(row, tuple(stratum for stratum in strata if holds[stratum])))
    drawn.sort(key=lambda sampled: hash_fraction(f"order:{sampled.row.id}"))
    return ReviewSample(drawn, strata, dict(population))


def _allot(
    ranked: dict[str, list[Row]], size: int, strata: Sequence[Stratum]
) -> tuple[dict[str, Row], set[str]]:
    """Rows by id, and the ids of the control rows: first each stratum's share, then the rest in
    turn."""
    chosen: dict[str, Row] = {}
    controls: set[str] = set()
    queues = {name: iter(rows) for name, rows in ranked.items()}
    quotas = {stratum.name: int(stratum.share * size) for stratum in strata}
    quotas[CONTROL.name] += size - sum(quotas.values())

    turns = [name for name, quota in quotas.items() for _ in range(quota)] + [*quotas] * size
    for name in turns:
        if len(chosen) == size:
            break
        for row in queues[name]:
            if name == CONTROL.name:
                controls.add(row.id)
            if row.id not in chosen:
                chosen[row.id] = row
                break
    return chosen, controls
