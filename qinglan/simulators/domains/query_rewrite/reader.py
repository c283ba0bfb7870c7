"""How the simulated teacher reads a user's text: which product it is about, and what the user wants to know.

A lexicon finds the product, ordered cues find the intent; history and profile count only where the question itself
gives nothing. The reader does not know the knowledge base.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import cache

from qinglan.simulators.domains.query_rewrite.facts import PRODUCT_TYPOS, PRODUCTS, WORD_TYPOS

_FIELDS = {"用户画像：": "profile", "历史摘要：": "history", "当前问题：": "query"}

_QUESTION_CUES: tuple[tuple[str, str], ...] = (
    ("preg", "孕|怀着宝宝|准妈妈"),
    ("child", "小孩|宝宝|儿童|孩子|娃|小朋友|几岁"),
    ("mix", "一起|同吃|同服|一块吃|冲突|相克|吃别的|搭着|配着|吃药期间"),
    ("store", "保存|储存|存放|冰箱|开封|打开|过期|保质|有效期|受潮|放哪|怎么放|放多久|放几年|咋存"),
    ("contra", "不能给|不适合|禁|忌|注意|小心|别碰|别吃|避开|[人谁].{0,2}不能"),
    ("who", "适合|给谁|谁该|哪些人|哪类人|什么人|多大年纪|老人|年轻人|需要补|面向|需要.{0,6}的是谁"),
    ("side", "副作用|吃多了|吃久了|伤|安全|危害|危险|不舒服|依赖|不良反应|坏处|有害|有事|毒"),
    ("cycle", "见效|起效|起作用|疗程|一直吃|坚持|几周|几个月|多长时间|看到效果|多久有效|吃多久|多少天"),
    ("when", "什么时候|啥时候|饭前|饭后|早上|晚上|几点|空腹|空着肚|什么时间|睡前|睡觉|时间段|早饭|早晨|中午|吃饭时"),
    ("buy", "选|挑|买|真假|牌子|好坏|质量|算好"),
    ("effect", "什么用|啥用|干嘛|干啥|干什么|好处|管用|功效|作用|有用|治什么|帮助|改善|管什|为啥|效果|好在哪|功能"),
    ("how", "怎么吃|怎么个吃|怎样吃|咋吃|怎么服|吃多少|多少合适|吃法|服用|几粒|几颗|几片|几克|几次|冲水|用量|什么量"),
)  # fmt: skip
_PROFILE_CUES = (("preg", "孕"), ("child", "孩子|儿子|女儿|宝妈"), ("mix", "药|抗生素|阿司匹林"))


@dataclass(frozen=True)
class Reading:
    """What a text is about; None where the reader does not find it."""

    product: str | None
    intent: str | None


def split_fields(text: str) -> dict[str, str]:
    """`user_text` undone: query, profile and history; a text without labels is a query."""
    fields = {"query": "", "profile": "", "history": ""}
    current = "query"
    for line in text.split("\n"):
        label = next((label for label in _FIELDS if line.startswith(label)), None)
        current = _FIELDS[label] if label else current
        fields[current] += line.removeprefix(label or "")
    return fields


def understand(text: str, reads_every_typo: bool = False) -> Reading:
    """Read a text as `user_text` renders it. A judge reads typos that the teacher doesn't."""
    fields = {name: _clean(value) for name, value in split_fields(text).items()}
    product, rest = _find_product(fields["query"], reads_every_typo)
    if product is None and fields["history"]:
        product, _ = _find_product(fields["history"], reads_every_typo)
    cues = [(intent, cue, rest) for intent, cue in _QUESTION_CUES]
    cues += [(intent, cue, fields["profile"]) for intent, cue in _PROFILE_CUES]
    return Reading(product, next((intent for intent, cue, read in cues if re.search(cue, read)), None))


@cache
def _lexicon(with_every_typo: bool) -> tuple[re.Pattern[str], dict[str, str]]:
    """A pattern that finds the longest name first (but not what it is to be taken *with*), and name → product."""
    names: dict[str, str] = {}
    for product, aliases in PRODUCTS.items():
        typos = PRODUCT_TYPOS.get(product, ())
        for name in (product, *aliases, *(typos if with_every_typo else typos[:1])):
            names[_clean(name)] = product
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(?<![和跟与])(" + "|".join(map(re.escape, longest_first)) + ")"), names


def _find_product(text: str, with_every_typo: bool) -> tuple[str | None, str]:
    """The first product named, and the text without its name."""
    pattern, names = _lexicon(with_every_typo)
    match = pattern.search(text)
    if match is None:
        return None, text
    return names[match.group()], text[: match.start()] + text[match.end() :]


def _clean(text: str) -> str:
    text = unicodedata.normalize("NFKC", text).lower()
    for right, wrong in WORD_TYPOS.items():
        text = text.replace(wrong, right)
    return text
