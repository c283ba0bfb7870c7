"""Which rows a person should look at: those where the signals disagree, and some at random.

Every kind of risk has its share of the places; what a kind cannot fill goes to the others. Within a kind the rows with
the smallest hash of their id are taken, so the same rows give the same sample in any order. The control rows are drawn
from all rows that teach, whatever else holds for them, so that their error rate is that of the dataset.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qinglan.config import Select
from qinglan.recipes import Recipe
from qinglan.rows import INPUT_REASONS, Row, hash_fraction

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
"""Failed for what the answer is, not for its scores; a person may see it otherwise, or write a better one."""

_LOW_JUDGE, _HIGH_JUDGE = 3.0, 4.0
_LOW_PART = 0.5
_MARGIN = 0.05
"""Of the top-1 score around the selection's threshold."""


class Stratum(NamedTuple):
    """A kind of row and its share of the sample."""

    name: str
    title: str
    """What the workbook calls it."""
    share: float
    meaning: str
    holds: Callable[[Row, Select], bool]


def _teaches(row: Row, _: Select) -> bool:
    return row.status == "ok" and bool(row.answer)


def _judge_low(row: Row, config: Select) -> bool:
    top1 = _top1(row)
    return (
        row.judge_score is not None
        and row.judge_score < _LOW_JUDGE
        and top1 is not None
        and top1 >= config.min_top1_score
    )


def _judge_high(row: Row, config: Select) -> bool:
    top1 = _top1(row)
    return (
        row.judge_score is not None
        and row.judge_score >= _HIGH_JUDGE
        and top1 is not None
        and top1 < config.min_top1_score
    )


def _just_above(row: Row, config: Select) -> bool:
    top1 = _top1(row)
    return top1 is not None and config.min_top1_score <= top1 <= config.min_top1_score + _MARGIN


def _just_below(row: Row, config: Select) -> bool:
    top1 = _top1(row)
    return top1 is not None and config.min_top1_score - _MARGIN <= top1 < config.min_top1_score


def _worse_than_original(row: Row, _: Select) -> bool:
    found, original = row.answer_retrieved, row.original_retrieved
    return found is not None and original is not None and found.quality < original.quality


def _gold_missed(row: Row, config: Select) -> bool:
    found = row.answer_retrieved
    return (
        found is not None
        and row.gold_id is not None
        and found.top1_score >= config.min_top1_score
        and found.rank(row.gold_id) == 0
    )


def _by_rule(row: Row, _: Select) -> bool:
    return row.reason in RULE_REASONS


def _low_score(row: Row, _: Select) -> bool:
    return row.judge_score is not None and row.judge_score < _LOW_JUDGE


def _high_score_low_part(row: Row, _: Select) -> bool:
    return row.judge_score is not None and row.judge_score >= _HIGH_JUDGE and _lowest_part(row) < _LOW_PART


def _low_part(row: Row, _: Select) -> bool:
    return _lowest_part(row) < 1


def _lowest_part(row: Row) -> float:
    return min((row.parts or {}).values(), default=1.0)


def _in_pool(row: Row, _: Select) -> bool:
    return row.pool is not None and bool(row.answer)


def _fallen(row: Row, config: Select) -> bool:
    """For what the answer is, by the recipe's rules or by those that hold for all."""
    return _by_rule(row, config) or (row.status == "failed" and bool(row.answer))


def _top1(row: Row) -> float | None:
    return row.answer_retrieved.top1_score if row.answer_retrieved else None


CONTROL = Stratum("control", "随机对照", 0.25, "从全部入选行中随机抽取，用来估计错误率，请务必全部填写", _teaches)
STRATA = (
    CONTROL,
    Stratum("judge_low", "裁判低检索高", 0.15, "裁判分低于 3，但检索得分达到阈值", _judge_low),
    Stratum("judge_high", "裁判高检索低", 0.10, "裁判分不低于 4，但检索得分未达到阈值", _judge_high),
    Stratum("just_above", "略高于阈值", 0.10, "检索得分刚刚达到阈值（高出不超过 0.05）", _just_above),
    Stratum("just_below", "略低于阈值", 0.10, "检索得分刚刚未达到阈值（低出不超过 0.05）", _just_below),
    Stratum("worse_than_original", "不如原问题", 0.10, "改写的检索质量低于原问题", _worse_than_original),
    Stratum("gold_missed", "高分未召回标准文档", 0.10, "检索得分达到阈值，但没有召回标准文档", _gold_missed),
    Stratum("by_rule", "规则淘汰", 0.10, "因拒答、套话、过长等规则被淘汰", _by_rule),
)
"""Of rewrites."""
ANSWER_STRATA = (
    CONTROL,
    Stratum("low_score", "裁判分低", 0.20, "裁判分低于 3", _low_score),
    Stratum(
        "high_score_low_part", "裁判高规则低", 0.15, "裁判分不低于 4，但有一项规则分低于 0.5", _high_score_low_part
    ),
    Stratum("low_part", "规则有扣分", 0.15, "有一项规则分低于 1", _low_part),
    Stratum("in_pool", "专门数据池", 0.15, "属于某个数据池（例如红队、金标）的行", _in_pool),
    Stratum("by_rule", "规则淘汰", 0.10, "因格式、拒答、过长等规则被淘汰", _fallen),
)


def strata_of(recipe: Recipe) -> tuple[Stratum, ...]:
    """The kinds of rows to look at, the control rows first."""
    return STRATA if recipe.retrieves else ANSWER_STRATA


class Drawn(NamedTuple):
    """A row of the sample."""

    row: Row
    strata: tuple[Stratum, ...]
    """All that hold for it; `CONTROL` only where it is one of the control rows."""


@dataclass(frozen=True)
class Sample:
    """The rows to look at, in an order of chance, so that the first half of them is a sample too."""

    drawn: Sequence[Drawn]
    strata: Sequence[Stratum]
    population: dict[str, int]
    """How many rows each stratum had to draw from, by its name."""


def draw(rows: Iterable[Row], config: Select, places: int, strata: Sequence[Stratum] = STRATA) -> Sample:
    """At most `places` rows of a stream, each once; keeps no more than `places` rows per stratum in memory."""
    candidates = {stratum.name: _Smallest(places, stratum.name) for stratum in strata}
    for row in rows:
        if not _can_be_reviewed(row):
            continue
        for stratum in strata:
            if stratum.holds(row, config):
                candidates[stratum.name].offer(row)
    ranked = {name: smallest.ranked() for name, smallest in candidates.items()}
    chosen, controls = _allot(ranked, places, strata)
    drawn = [Drawn(row, _strata_of(row, config, controls, strata)) for row in chosen.values()]
    drawn.sort(key=lambda each: hash_fraction(f"order:{each.row.id}"))
    return Sample(drawn, strata, {name: smallest.offered for name, smallest in candidates.items()})


def _can_be_reviewed(row: Row) -> bool:
    """There is something to judge, and the verdict would change something: a leak stays out whatever people say."""
    judged = bool(row.answer) or row.reason in RULE_REASONS
    return judged and row.reason not in INPUT_REASONS and not (row.reason or "").startswith("near_duplicate_of_")


class _Smallest:
    """The rows with the smallest hashes out of a stream."""

    def __init__(self, places: int, salt: str) -> None:
        self.offered = 0
        self._places, self._salt = places, salt
        self._heap: list[tuple[float, int, Row]] = []

    def offer(self, row: Row) -> None:
        self.offered += 1
        entry = (
            -hash_fraction(f"{self._salt}:{row.id}"),
            self.offered,
            row,
        )  # the number keeps rows from being compared
        if len(self._heap) < self._places:
            heapq.heappush(self._heap, entry)
        elif entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def ranked(self) -> list[Row]:
        return [row for _, _, row in sorted(self._heap, reverse=True)]


def _allot(ranked: dict[str, list[Row]], places: int, strata: Sequence[Stratum]) -> tuple[dict[str, Row], set[str]]:
    """Rows by id, and the ids of the control rows: first each stratum's share, then one by one what is left."""
    chosen: dict[str, Row] = {}
    controls: set[str] = set()
    queues = {name: iter(rows) for name, rows in ranked.items()}
    quotas = {stratum.name: int(stratum.share * places) for stratum in strata}
    quotas[CONTROL.name] += places - sum(quotas.values())

    def take(name: str) -> bool:
        for row in queues[name]:
            if name == CONTROL.name:
                controls.add(row.id)
            if row.id not in chosen:
                chosen[row.id] = row
                return True
        return False

    for name, quota in quotas.items():
        for _ in range(quota):
            take(name)
    open_strata = list(quotas)
    while open_strata and len(chosen) < places:
        for name in tuple(open_strata):
            if len(chosen) < places and not take(name):
                open_strata.remove(name)
    return chosen, controls


def _strata_of(row: Row, config: Select, controls: set[str], strata: Sequence[Stratum]) -> tuple[Stratum, ...]:
    return tuple(s for s in strata if (row.id in controls if s is CONTROL else s.holds(row, config)))
