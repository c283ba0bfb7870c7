"""The facts of the sample: supplements, what users ask about them, and how a knowledge base titles them.

The knowledge base has its own wording for five of twelve intents and its own names for three of 44 products.
The simulated teacher does not know these wordings, but sometimes writes an alternative that is one of them:
reinforcement learning has to find it. Standard library only, because everything imports this.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

PRODUCTS: dict[str, tuple[str, ...]] = {
    "胶原蛋白肽": ("胶原蛋白", "胶原肽", "胶原"),
    "虾青素": ("虾青素", "虾红素"),
    "益生菌": ("益生菌", "活性益生菌", "菌粉"),
    "辅酶Q10": ("辅酶", "辅酶q10", "Q10"),
    "深海鱼油": ("鱼油", "欧米伽3", "深海鱼油"),
    "叶黄素": ("叶黄素", "护眼叶黄素"),
    "褪黑素": ("褪黑素", "睡眠软糖"),
    "葡萄籽提取物": ("葡萄籽", "葡萄籽胶囊"),
    "维生素C": ("维C", "维生素c", "VC"),
    "维生素D3": ("维D", "D3", "维生素d"),
    "维生素B族": ("维B", "B族", "复合维b"),
    "碳酸钙": ("钙片", "补钙的钙片", "碳酸钙"),
    "氨基葡萄糖": ("氨糖", "氨基葡萄糖", "护关节的氨糖"),
    "乳清蛋白粉": ("蛋白粉", "乳清蛋白", "增肌粉"),
    "左旋肉碱": ("左旋", "左旋肉碱"),
    "螺旋藻": ("螺旋藻", "螺旋藻片"),
    "灵芝孢子粉": ("灵芝粉", "孢子粉", "灵芝孢子粉"),
    "人参皂苷": ("人参", "人参片", "人参皂苷"),
    "玛咖": ("玛卡", "玛咖"),
    "蔓越莓提取物": ("蔓越莓", "蔓越莓胶囊"),
    "大豆异黄酮": ("大豆异黄酮", "异黄酮"),
    "番茄红素": ("番茄红素", "番茄素"),
    "水飞蓟素": ("奶蓟草", "水飞蓟", "护肝片"),
    "姜黄素": ("姜黄", "姜黄素"),
    "蜂胶": ("蜂胶", "蜂胶软胶囊"),
    "蜂王浆": ("蜂王浆", "王浆"),
    "银杏叶提取物": ("银杏叶", "银杏叶片", "银杏"),
    "红曲": ("红曲", "红曲胶囊"),
    "纳豆激酶": ("纳豆", "纳豆激酶"),
    "透明质酸钠": ("玻尿酸", "口服玻尿酸", "透明质酸"),
    "谷胱甘肽": ("谷胱甘肽", "美白丸"),
    "烟酰胺单核苷酸": ("NMN", "nmn", "烟酰胺单核苷酸"),
    "硫辛酸": ("硫辛酸", "α硫辛酸"),
    "膳食纤维粉": ("膳食纤维", "纤维粉"),
    "低聚果糖": ("低聚果糖", "益生元"),
    "葡萄糖酸锌": ("锌片", "补锌的", "葡萄糖酸锌"),
    "富马酸亚铁": ("铁剂", "补铁的", "富马酸亚铁"),
    "叶酸": ("叶酸", "叶酸片"),
    "牛初乳": ("牛初乳", "初乳粉"),
    "藻油DHA": ("DHA", "藻油", "宝宝DHA"),
    "酵素": ("酵素", "果蔬酵素"),
    "燕窝": ("燕窝", "即食燕窝"),
    "阿胶": ("阿胶", "阿胶糕"),
    "西洋参": ("西洋参", "花旗参"),
}
"""Canonical name, which the knowledge base uses for a product → what users call it."""

NAME_MISMATCH: dict[str, str] = {"透明质酸钠": "玻尿酸", "烟酰胺单核苷酸": "NMN", "水飞蓟素": "奶蓟草"}
"""Canonical name → the colloquial one that the teacher habitually writes instead."""

PRODUCT_TYPOS: dict[str, tuple[str, ...]] = {
    "胶原蛋白肽": ("胶元蛋白", "胶原旦白"),
    "益生菌": ("益生箘", "益身菌"),
    "辅酶Q10": ("辅梅Q10",),
    "叶黄素": ("叶黄速",),
    "褪黑素": ("退黑素", "腿黑素"),
    "左旋肉碱": ("左旋肉减",),
    "灵芝孢子粉": ("灵芝包子粉",),
    "蔓越莓提取物": ("曼越莓",),
    "蜂王浆": ("蜂王桨",),
    "谷胱甘肽": ("谷光甘肽", "谷胱甘太"),
    "酵素": ("孝素", "酵速"),
    "阿胶": ("啊胶",),
    "西洋参": ("西洋身",),
}
"""Misspellings; the teacher reads the first of each and is helpless before the others."""

WORD_TYPOS: dict[str, str] = {
    "怎么": "怎莫", "什么": "什莫", "副作用": "付作用", "孕妇": "运妇", "保存": "保纯", "多久": "多九",
}  # fmt: skip
"""Misspellings of common words; the teacher reads them all."""

PREFIXES = (
    "", "", "", "", "请问", "想问下", "我想知道", "你好，", "医生，", "我妈问", "帮我看看", "问一下",
    "那个，", "嗯，", "在吗，",
)  # fmt: skip
SUFFIXES = ("", "", "", "？", "？", "呢", "啊", "呀", "，谢谢", "?", "，急", "哈")
REFERENCES = ("它", "这个", "这款", "")
"""What stands for the product in a follow-up question."""
HISTORIES = ("上轮问了{p}", "之前咨询过{p}", "刚聊到{p}", "用户在看{p}")
PLAIN_PROFILES = (
    "男，35岁", "女，42岁，上班族", "60岁，退休", "28岁，健身", "女，30岁", "程序员，常熬夜",
    "45岁，血脂偏高", "大学生", "男，50岁，少运动", "老客户",
)  # fmt: skip
"""Profiles that change nothing about what a question means."""

P_FOLLOW_UP = 0.20
P_PROFILE_DECIDES = 0.25
"""Of the questions with one of the intents in `INFORMATIVE_PROFILES`: about 6% of all."""
P_PLAIN_PROFILE = 0.12
P_MISLEADING_PROFILE = 0.02
P_UNRELATED_HISTORY = 0.04
P_PRODUCT_TYPO = 0.05
P_WORD_TYPO = 0.05

INFORMATIVE_PROFILES: dict[str, tuple[str, ...]] = {
    "preg": ("孕28周", "怀孕3个月", "备孕中", "孕妇，31岁", "孕早期"),
    "child": ("给3岁孩子问", "给6岁孩子问", "宝妈，孩子2岁", "替5岁儿子问", "孩子上小学"),
    "mix": ("正在吃降压药", "每天吃降糖药", "在吃感冒药", "长期吃阿司匹林", "在服抗生素"),
}
"""Profiles that decide what an ambiguous question is about."""
AMBIGUOUS = ("{p}能吃吗", "可以吃{p}吗", "{p}能不能吃", "我能吃{p}吗", "{p}可以吃不")
AMBIGUOUS_TEST = ("能吃{p}不", "{p}可不可以吃")


@dataclass(frozen=True)
class Intent:
    """Something that users want to know about a product."""

    kb_term: str
    """How the knowledge base titles it."""
    habit: str
    """How the teacher titles it."""
    alternatives: tuple[tuple[str, float], ...]
    """What the teacher writes instead now and then, with weights."""
    phrasings: tuple[str, ...]
    """Phrasings in train, dev and half of the test rows."""
    test_phrasings: tuple[str, ...]
    """Phrasings in test rows only."""
    bridge: str = ""
    """A sentence in the teacher's wording that some passages carry where the wordings differ."""
    synonyms: tuple[str, ...] = ()
    """Further words that a judge takes for this intent."""

    @property
    def mismatched(self) -> bool:
        """Whether the knowledge base has a wording that the teacher doesn't know by habit."""
        return bool(self.bridge)

    @property
    def accepted_words(self) -> frozenset[str]:
        """All words that name this intent, whoever uses them."""
        terms = (self.kb_term, self.habit, *(term for term, _ in self.alternatives))
        return frozenset(word for term in terms for word in term.split()) | frozenset(self.synonyms)


INTENTS: dict[str, Intent] = {
    "how": Intent(
        kb_term="食用建议 每日摄入量",
        habit="服用方法 推荐用量",
        alternatives=(("食用建议 每日摄入量", 2), ("用法用量", 1), ("吃法 用量", 1)),
        bridge="也就是常说的服用方法和推荐用量。",
        phrasings=(
            "{p}怎么吃", "{p}应该怎么吃", "{p}一天吃多少", "{p}咋吃啊", "{p}要怎么服用", "{p}每天吃几粒",
            "{p}吃法", "{p}一次吃几颗合适", "怎么吃{p}", "{p}的正确吃法", "{p}每次吃多少合适",
            "{p}一日几次", "{p}要冲水喝吗", "{p}吃几片", "{p}的用量是多少", "{p}按什么量吃",
            "{p}一次要几克", "{p}怎样吃才对", "{p}怎么服", "说说{p}怎么吃才有效",
        ),
        test_phrasings=("{p}一天吃几次", "{p}怎么个吃法", "{p}每天要吃多少"),
    ),
    "when": Intent(
        kb_term="服用时间 饭前饭后",
        habit="服用时间 饭前饭后",
        alternatives=(("服用时间", 2), ("饭前 饭后 服用", 1)),
        phrasings=(
            "{p}什么时候吃", "{p}饭前吃还是饭后吃", "{p}早上吃还是晚上吃", "{p}几点吃最好",
            "{p}空腹能吃吗", "什么时间吃{p}好", "{p}睡前吃行不行", "{p}啥时候吃", "{p}哪个时间段吃好",
            "{p}晚上能吃吗", "{p}饭后多久吃", "{p}早饭前吃可以吗", "{p}是早晨吃吗",
            "{p}吃饭时吃还是空着肚子吃", "{p}什么时间服用", "{p}中午吃行吗", "{p}该在几点吃",
            "{p}睡觉前吃好吗",
        ),
        test_phrasings=("{p}早上空腹吃行吗", "{p}什么时候吃比较好", "{p}晚上吃还是早上吃"),
    ),
    "effect": Intent(
        kb_term="功效与作用",
        habit="功效 作用",
        alternatives=(("功效与作用", 2), ("作用 好处", 1)),
        phrasings=(
            "{p}有什么用", "{p}有啥用", "{p}是干嘛的", "吃{p}有什么好处", "{p}管用吗", "{p}的功效",
            "{p}能起什么作用", "{p}到底有没有用", "吃{p}有用吗", "{p}治什么的", "{p}有哪些作用",
            "{p}对身体有什么帮助", "{p}主要干啥的", "{p}能改善什么", "{p}能管什么", "为啥要吃{p}",
            "{p}真有效果吗", "{p}好在哪", "{p}有什么功能", "吃了{p}会怎样改善",
        ),
        test_phrasings=("{p}有什么好处", "{p}是干什么用的", "{p}有哪些功效"),
    ),
    "contra": Intent(
        kb_term="不宜食用者 慎用提示",
        habit="禁忌人群 注意事项",
        alternatives=(("不宜食用者 慎用提示", 2), ("禁忌 慎用", 1), ("禁忌症", 1)),
        bridge="以上即禁忌人群和注意事项。",
        phrasings=(
            "{p}谁不能吃", "哪些人不能吃{p}", "{p}有什么禁忌", "什么人不适合吃{p}", "{p}要注意什么",
            "吃{p}有啥忌讳", "{p}不能给谁吃", "{p}有哪些人不能碰", "{p}有没有什么人要避开",
            "{p}禁忌有哪些", "哪类人最好别吃{p}", "{p}有啥要小心的", "{p}注意事项", "吃{p}需要注意哪些",
            "{p}不适合谁", "谁最好别碰{p}", "{p}忌什么", "{p}使用时注意点啥",
        ),
        test_phrasings=("{p}什么人不能吃", "吃{p}要注意啥", "{p}哪些人不适合"),
        synonyms=("禁忌", "注意事项"),
    ),
    "who": Intent(
        kb_term="适用人群",
        habit="适用人群",
        alternatives=(("适用人群 推荐", 2), ("适合人群", 1)),
        phrasings=(
            "{p}适合谁吃", "什么人适合吃{p}", "{p}给谁吃好", "哪些人需要吃{p}", "{p}适合什么人",
            "{p}多大年纪能吃", "谁该吃{p}", "{p}是给哪类人吃的", "{p}谁适合", "我这种情况适合{p}吗",
            "{p}老人适合吗", "哪种人适合{p}", "{p}哪些人可以吃", "{p}面向什么人", "需要补{p}的是谁",
            "{p}推荐给谁", "{p}年轻人能吃吗",
        ),
        test_phrasings=("{p}适合哪些人吃", "什么人需要{p}", "谁适合吃{p}"),
    ),
    "side": Intent(
        kb_term="不良反应 耐受性评价",
        habit="副作用 安全性",
        alternatives=(("不良反应 耐受性评价", 3), ("副作用 危害", 1), ("安全性", 1)),
        bridge="即通常关心的副作用与安全性。",
        phrasings=(
            "{p}有副作用吗", "{p}吃多了会怎样", "{p}伤身体吗", "{p}安全吗", "长期吃{p}有没有危害",
            "{p}吃了会不会不舒服", "{p}伤肝吗", "{p}有依赖性吗", "{p}会不会有不良反应", "{p}吃了有坏处吗",
            "{p}对身体有害吗", "{p}吃多了有问题吗", "{p}会不会伤胃", "{p}安不安全", "{p}常年吃会不会有事",
            "{p}有没有毒性", "{p}有什么坏处", "天天吃{p}有危险吗",
        ),
        test_phrasings=("{p}有没有副作用", "长期吃{p}安全吗", "{p}吃久了有副作用吗"),
    ),
    "cycle": Intent(
        kb_term="见效时长 疗程安排",
        habit="起效时间 服用周期",
        alternatives=(("见效时长 疗程安排", 2), ("见效时间", 1), ("服用周期", 1)),
        bridge="相当于起效时间和服用周期。",
        phrasings=(
            "{p}吃多久见效", "{p}多久有效果", "{p}要吃多长时间", "{p}吃几个月", "{p}几天能看到效果",
            "{p}一个疗程多久", "{p}要一直吃吗", "{p}多久起作用", "{p}要坚持多久", "{p}一般几周见效",
            "{p}吃多长时间停", "{p}疗程多长", "{p}要连着吃几个月", "{p}什么时候能见效果", "{p}多少天起效",
            "{p}见效快吗", "{p}得吃多久",
        ),
        test_phrasings=("{p}多长时间见效", "{p}要吃几个月", "{p}多久能见效"),
    ),
    "store": Intent(
        kb_term="保存方法 保质期",
        habit="保存方法 保质期",
        alternatives=(("保存方法", 1), ("保质期 储存", 1)),
        phrasings=(
            "{p}怎么保存", "{p}要放冰箱吗", "{p}开封后能放多久", "{p}过期了还能吃吗", "{p}保质期多久",
            "{p}怎么放", "{p}放哪里好", "{p}能不能放冰箱", "{p}打开后几天吃完", "{p}怎么储存",
            "{p}有效期是多久", "{p}受潮了还能吃吗", "{p}存放有什么要求", "{p}可以放几年",
            "{p}打开以后咋存", "{p}保存要注意温度吗",
        ),
        test_phrasings=("{p}开封了怎么放", "{p}能放多久", "{p}怎么存放"),
    ),
    "buy": Intent(
        kb_term="选购要点 质量标准",
        habit="选购要点 质量标准",
        alternatives=(("选购要点", 1), ("质量标准 辨别", 1)),
        phrasings=(
            "{p}怎么选", "{p}怎么挑", "{p}买哪种好", "怎么看{p}的好坏", "{p}真假怎么分", "选{p}看什么",
            "{p}哪个牌子好", "{p}选哪种", "买{p}要看什么指标", "{p}怎么辨别好坏", "{p}怎么判断质量",
            "{p}挑选窍门", "{p}什么样的算好", "购买{p}看哪些", "{p}好坏怎么看", "如何选{p}",
        ),
        test_phrasings=("{p}怎么买", "挑{p}看什么", "{p}怎么选好的"),
    ),
    "preg": Intent(
        kb_term="孕妇 服用禁忌",
        habit="孕妇 服用禁忌",
        alternatives=(("孕妇 禁忌", 1), ("孕期 服用", 1)),
        synonyms=("孕妇", "孕期", "怀孕"),
        phrasings=(
            "孕妇能吃{p}吗", "怀孕了能吃{p}吗", "{p}孕妇可以吃吗", "怀孕期间吃{p}行吗",
            "准妈妈能不能吃{p}", "{p}孕期能用吗", "孕期吃{p}有影响吗", "怀着宝宝能吃{p}吗",
            "孕妈能吃{p}不", "{p}孕妇要忌口吗", "有孕在身可以吃{p}吗", "备孕怀孕能吃{p}吗",
            "孕妇吃{p}安全吗",
        ),
        test_phrasings=("{p}怀孕能吃吗", "孕妇可不可以吃{p}", "孕期可以吃{p}吗"),
    ),
    "child": Intent(
        kb_term="儿童 适用年龄 用量",
        habit="儿童 适用年龄 用量",
        alternatives=(("儿童 用量", 1), ("儿童 适用年龄", 1)),
        synonyms=("儿童",),
        phrasings=(
            "小孩能吃{p}吗", "宝宝可以吃{p}吗", "{p}儿童能吃吗", "孩子吃{p}行吗", "几岁可以吃{p}",
            "{p}孩子几岁能吃", "小孩吃{p}要减量吗", "儿童可以用{p}吗", "{p}给娃吃行吗", "小孩子吃{p}好吗",
            "{p}宝宝吃多少", "{p}适合几岁的小孩", "学生娃能吃{p}吗",
        ),
        test_phrasings=("{p}小朋友能吃吗", "小孩可不可以吃{p}", "孩子可以吃{p}吗"),
    ),
    "mix": Intent(
        kb_term="配伍 联用提示",
        habit="同服 相互作用",
        alternatives=(("配伍 联用提示", 2), ("联合服用", 1), ("药物相互作用", 1)),
        bridge="包括同服与相互作用。",
        phrasings=(
            "{p}能和药一起吃吗", "{p}跟别的保健品能同吃吗", "{p}可以和钙片一起用吗", "吃{p}还能吃别的吗",
            "{p}和药冲突吗", "{p}能搭着别的吃不", "{p}和别的一起吃行吗", "{p}跟感冒药能同吃吗",
            "{p}可以配着维生素吃吗", "吃药期间能吃{p}吗", "{p}和其他保健品相克吗",
            "{p}能跟降压药一块吃吗", "{p}和什么不能一起吃", "{p}与药物有冲突没",
        ),
        test_phrasings=("{p}可不可以跟药一起吃", "{p}跟别的保健品冲突吗", "{p}和药能一起吃吗"),
    ),
}  # fmt: skip


# ---- questions ----


@dataclass(frozen=True)
class RewriteQuestion:
    """What a user says, with what the product remembers of them."""

    query: str
    profile: str = ""
    history: str = ""


_PAIR_SEED = 189
"""Chosen so that every intent, product and mismatched name occurs in the test split in proportion."""


def pair_split(product: str, intent: str) -> Literal["train", "test"]:
    """Which split owns a product × intent pair; 30% are asked about in the test split only."""
    digest = hashlib.sha256(f"{_PAIR_SEED}|{product}|{intent}".encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % 10 < 3 else "train"


@cache
def pairs(split: Literal["train", "test"]) -> tuple[tuple[str, str], ...]:
    """All (product, intent) pairs of a split."""
    return tuple((p, i) for p in PRODUCTS for i in INTENTS if pair_split(p, i) == split)


def ask(rng: Random, product: str, intent: str, unseen: bool = False) -> RewriteQuestion:
    """A colloquial question about a pair; `unseen` draws from the phrasings that only the test split uses."""
    profile = _profile(rng, intent)
    ambiguous = bool(profile) and profile in INFORMATIVE_PROFILES.get(intent, ())
    phrasing = _misspell(rng, rng.choice(_phrasings(intent, ambiguous, unseen)))
    name = _colloquial_name(rng, product)
    if rng.random() < P_FOLLOW_UP:
        query = "那" + phrasing.format(p=rng.choice(REFERENCES)) + rng.choice(("", "", "？", "呢"))
        return RewriteQuestion(query, profile, rng.choice(HISTORIES).format(p=name))
    history = ""
    if rng.random() < P_UNRELATED_HISTORY:
        other = rng.choice([p for p in PRODUCTS if p != product])
        history = rng.choice(HISTORIES).format(p=rng.choice(PRODUCTS[other]))
    return RewriteQuestion(rng.choice(PREFIXES) + phrasing.format(p=name) + rng.choice(SUFFIXES), profile, history)


def _phrasings(intent: str, ambiguous: bool, unseen: bool) -> tuple[str, ...]:
    if ambiguous:
        return AMBIGUOUS_TEST if unseen else AMBIGUOUS
    return INTENTS[intent].test_phrasings if unseen else INTENTS[intent].phrasings


def _profile(rng: Random, intent: str) -> str:
    """A profile that decides (only for the intents that have one), misleads, or doesn't matter."""
    if intent in INFORMATIVE_PROFILES and rng.random() < P_PROFILE_DECIDES:
        return rng.choice(INFORMATIVE_PROFILES[intent])
    draw = rng.random()
    if draw < P_MISLEADING_PROFILE and intent not in INFORMATIVE_PROFILES:
        return rng.choice([profile for profiles in INFORMATIVE_PROFILES.values() for profile in profiles])
    return rng.choice(PLAIN_PROFILES) if draw < P_MISLEADING_PROFILE + P_PLAIN_PROFILE else ""


def _colloquial_name(rng: Random, product: str) -> str:
    if product in PRODUCT_TYPOS and rng.random() < P_PRODUCT_TYPO:
        return rng.choice(PRODUCT_TYPOS[product])
    return rng.choice(PRODUCTS[product])


def _misspell(rng: Random, phrasing: str) -> str:
    for right, wrong in WORD_TYPOS.items():
        if right in phrasing:
            return phrasing.replace(right, wrong) if rng.random() < P_WORD_TYPO else phrasing
    return phrasing


# ---- the knowledge base ----

P_BRIDGE = 0.75
"""Share of the mismatched intents' passages that also carry the teacher's wording."""

_BODY_PARTS = (
    "皮肤", "关节", "眼睛", "肠胃", "睡眠", "免疫力", "心血管", "肝脏", "骨骼", "记忆力", "体力", "血糖",
    "血脂", "头发", "情绪",
)  # fmt: skip
_VERBS = ("改善", "维护", "支持", "帮助调节", "有助于", "增强", "保护")
_USERS = (
    "成年人", "中老年人", "上班族", "熬夜的人", "运动爱好者", "素食者", "学生", "更年期女性",
    "经常用眼的人", "饮食不规律的人",
)  # fmt: skip
_AVOIDERS = ("哺乳期妇女", "婴幼儿", "过敏体质者", "肝肾功能不全者", "正在服药的人", "术后病人", "糖尿病人")


@dataclass(frozen=True)
class Document:
    """One knowledge-base entry."""

    id: str
    title: str
    content: str


def document_id(product: str, intent: str) -> str:
    """Id of the document that answers a pair."""
    return f"{product}-{intent}"


def title(product: str, intent: str) -> str:
    """How the knowledge base titles a pair; as a query, the oracle."""
    return f"{product} {INTENTS[intent].kb_term}"


def passage(rng: Random, product: str, intent: str, bridge: bool | None = None) -> str:
    """A freshly drawn passage; `bridge` forces or forbids the sentence in the teacher's wording."""
    has_bridge = rng.random() < P_BRIDGE if bridge is None else bridge
    return _PASSAGES[intent](rng, product) + (INTENTS[intent].bridge if has_bridge else "")


def documents(seed: int = 5) -> list[Document]:
    """The sample's knowledge base: one document per pair."""
    rng = Random(seed)
    return [Document(document_id(p, i), title(p, i), passage(rng, p, i)) for p in PRODUCTS for i in INTENTS]


def _how(rng: Random, product: str) -> str:
    dose = f"{rng.randint(1, 6)}{rng.choice(('粒', '片', '克', '袋'))}"
    manner = rng.choice(("温水冲饮", "随餐吞服", "拌入粥饮"))
    return f"{product}食用建议：成人每日摄入量{dose}，{manner}，不宜超量。"


def _when(rng: Random, product: str) -> str:
    meal = rng.choice(("早餐", "午餐", "晚餐")) + rng.choice("前后")
    return f"{product}服用时间：饭前饭后均可，建议{meal}半小时服用；避免与浓茶同服，起效快慢与时间关系不大。"


def _effect(rng: Random, product: str) -> str:
    first, second = (rng.choice(_VERBS) + rng.choice(_BODY_PARTS) for _ in range(2))
    return f"{product}功效与作用：{first}，{second}，具体以说明书为准。"


def _contra(rng: Random, product: str) -> str:
    first, second, third = rng.sample(_AVOIDERS, 3)
    return f"{product}不宜食用者：{first}、{second}。慎用提示：{third}先问医师。"


def _who(rng: Random, product: str) -> str:
    first, second = rng.sample(_USERS, 2)
    habit = rng.choice(("久坐", "熬夜", "外食"))
    return f"{product}适用人群：{first}、{second}，长期{habit}者也可考虑，特殊人群另行咨询。"


def _side(rng: Random, product: str) -> str:
    return f"{product}不良反应少见，偶有{rng.choice(_BODY_PARTS)}不适；耐受性评价良好，停用后多可自行缓解。"


def _cycle(rng: Random, product: str) -> str:
    weeks, months = rng.randint(2, 12), rng.randint(1, 6)
    return f"{product}见效时长因人而异，多在{weeks}周左右；疗程安排以{months}个月为一段，期间可评估。"


def _store(rng: Random, product: str) -> str:
    opened, shelf = rng.randint(1, 6), rng.choice((12, 18, 24, 36))
    return f"{product}保存方法：阴凉干燥处密封保存，开封后{opened}个月内用完，保质期{shelf}个月。"


def _buy(rng: Random, product: str) -> str:
    standard = rng.choice(("国标", "团标", "企标"))
    return f"{product}选购要点：看含量、看来源、看批号；质量标准以{standard}为准，周期性抽检。"


def _preg(_rng: Random, product: str) -> str:
    return f"{product}孕妇服用禁忌：孕期安全性资料不足，服用前遵医嘱，哺乳期同此。"


def _child(rng: Random, product: str) -> str:
    return f"{product}儿童适用年龄{rng.randint(1, 12)}岁以上，用量减半，碾碎拌食，推荐家长看护。"


def _mix(rng: Random, product: str) -> str:
    other = rng.choice([p for p in PRODUCTS if p != product])
    return f"{product}配伍原则：与{other}间隔{rng.randint(1, 3)}小时；联用提示：正在用药者先咨询药师。"


_PASSAGES: dict[str, Callable[[Random, str], str]] = {
    "how": _how, "when": _when, "effect": _effect, "contra": _contra, "who": _who, "side": _side,
    "cycle": _cycle, "store": _store, "buy": _buy, "preg": _preg, "child": _child, "mix": _mix,
}  # fmt: skip
