"""The judge's facts: what is known of a product, how users word it, and what can be wrong with an answer.

A fact is a slot with one of its values ("频次" is "每日两次"); slots are exclusive, so another value of the same slot
contradicts it. Every value has wordings of its own; the first one is what reference answers use. Standard library
only.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal, NamedTuple

from qinglan.simulators.domains.query_rewrite.facts import PRODUCTS as PRODUCTS


class Slot(NamedTuple):
    """One thing that can be known of a product."""

    questions: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    """Each value's wordings, the reference's first; each is one token."""


SLOTS: dict[str, Slot] = {
    "频次": Slot(
        ("{p}一天吃几次", "{p}多久吃一回", "{p}要吃多勤"),
        (
            ("每日一次", "一天吃一回", "每天只一次"),
            ("每日两次", "一天吃两回", "早晚各一次"),
            ("每日三次", "一天吃三回", "三餐各一次"),
        ),
    ),
    "时机": Slot(
        ("{p}什么时候吃", "{p}饭前饭后吃", "{p}啥时间吃好"),
        (
            ("饭前服用", "吃饭之前吃", "餐前吃"),
            ("饭后服用", "吃完饭再吃", "餐后吃"),
            ("睡前服用", "睡觉前吃", "临睡时吃"),
        ),
    ),
    "储存": Slot(
        ("{p}怎么保存", "{p}要放冰箱吗", "{p}买回来放哪"),
        (
            ("冷藏保存", "放冰箱冷藏", "搁冰箱里"),
            ("常温保存", "室温放着", "不用进冰箱"),
            ("冷冻保存", "放冷冻室", "冻起来存"),
        ),
    ),
    "孕期": Slot(
        ("{p}孕妇能吃吗", "{p}怀孕能吃吗", "{p}备孕能吃吗"),
        (
            ("孕期可用", "怀孕能吃", "孕妇放心吃"),
            ("孕期禁用", "怀孕不能吃", "孕妇别吃"),
            ("孕期减量", "怀孕少吃点", "孕妇减半吃"),
        ),
    ),
    "反应": Slot(
        ("{p}有副作用吗", "{p}吃了难受吗", "{p}有没有坏处"),
        (
            ("可能腹胀", "肚子会胀", "会胀气"),
            ("可能便秘", "大便会干", "排便费劲"),
            ("可能腹泻", "会拉肚子", "会闹肚子"),
        ),
    ),
    "功效": Slot(
        ("{p}有什么用", "{p}对什么好", "{p}吃了图个啥"),
        (
            ("强健骨骼", "对骨头好", "让骨头结实"),
            ("改善睡眠", "睡得更好", "帮助入睡"),
            ("保护视力", "对眼睛好", "缓解眼疲劳"),
        ),
    ),
}

VAGUE = ("因人而异", "请遵医嘱", "适量就好", "视情况而定")
OPENINGS = ("您好", "根据资料")
CLOSINGS = ("祝您健康", "有问题再问我")
P_TEST_PAIR = 0.35

Flaw = Literal["完整", "不完整", "编造", "矛盾", "含糊", "跑题"]
FLAWS: tuple[Flaw, ...] = ("完整", "不完整", "编造", "矛盾", "含糊", "跑题")


@dataclass(frozen=True)
class Fact:
    """A slot and the number of its value."""

    slot: str
    value: int

    def wording(self, number: int = 0) -> str:
        """One of its wordings; 0 is the reference's."""
        return SLOTS[self.slot].values[self.value][number]


class AnswerVerdict(NamedTuple):
    """Whether the answer is acceptable, and what is wrong with it."""

    right: bool
    flaw: Flaw

    @property
    def words(self) -> tuple[str, str]:
        """The verdict in the judge's words."""
        return ("正确" if self.right else "错误"), self.flaw


def _number(*key: str) -> int:
    return int.from_bytes(hashlib.sha256("|".join(key).encode()).digest()[:8])


@cache
def facts_of(product: str, slot: str) -> tuple[Fact, ...]:
    """The facts of a reference answer to a question about `slot`: the fact asked for, then perhaps another."""
    rng = Random(_number("facts", product, slot))
    others = rng.sample([name for name in SLOTS if name != slot], rng.choices((0, 1), (2, 3))[0])
    return tuple(value_of(product, name) for name in (slot, *others))


@cache
def value_of(product: str, slot: str) -> Fact:
    """The one thing that is true of a product."""
    return Fact(slot, _number("value", product, slot) % len(SLOTS[slot].values))


def pair_split(product: str, slot: str) -> Literal["train", "test"]:
    """Which split owns the questions about this slot of this product."""
    return "test" if _number("split", product, slot) % 1000 < P_TEST_PAIR * 1000 else "train"


def pairs(split: Literal["train", "test"]) -> list[tuple[str, str]]:
    """All (product, slot) of a split."""
    return [(product, slot) for product in PRODUCTS for slot in SLOTS if pair_split(product, slot) == split]


def judge(reference: tuple[Fact, ...], stated: tuple[Fact, ...]) -> AnswerVerdict:
    """The truth about an answer: its first flaw in order of gravity.

    An incomplete answer is acceptable if it states the fact asked for.
    """
    known = {fact.slot: fact for fact in reference}
    found = [fact for fact in reference if fact in stated]
    contradicted = any(fact.slot in known and fact != known[fact.slot] for fact in stated)
    invented = any(fact.slot not in known for fact in stated)
    if not found and not contradicted:
        return AnswerVerdict(False, "跑题" if invented else "含糊")
    if contradicted or invented:
        return AnswerVerdict(False, "矛盾" if contradicted else "编造")
    return AnswerVerdict(reference[0] in found, "完整" if len(found) == len(reference) else "不完整")
