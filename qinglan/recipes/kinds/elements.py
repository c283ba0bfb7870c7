"""What recipes are made of: inputs, metrics, findings and messages."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from qinglan.recipes.kinds.untrusted import without_markers
from qinglan.text import Both

Message = dict[str, str]

JUDGE = "judge"
"""The part of a reward that the judge gives: its score / 5. Beside the parts its score is logged as
it is, 0–5."""
QUALITY = "quality"
"""The metric that is the judge's score, 0–5."""


def object_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an object with all of these keys and no other, for models that support
    structured output."""
    names = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


SCORE_SCHEMA = object_schema(score={"type": "number"}, reason={"type": "string"})
"""Of a judge's answer that `parse_score` reads."""

_COURTESIES = frozenset(
    (
        "您好", "你好", "请问", "谢谢", "大夫", "医生", "进行", "咨询", "一下", "建议", "可以", "一般", "情况", "需要",
        "之前", "之后", "最近", "有些", "没什么", "这个", "怎么回事", "注意", "平时", "及时", "引起", "期望", "解答",
        "祝您", "帮助", "希望", "健康", "患者", "病人", "朋友", "通过", "出现", "导致",
    )
)  # fmt: skip
"""Words that say nothing about what a text is about."""


@dataclass(frozen=True)
class Input:
    """A further column of the workbook."""

    name: str
    """Key in `Row.inputs` and in `data.columns.inputs`."""
    column: str
    """The column's head, where the profile names no other."""
    required: bool = False
    """Without the column the workbook is refused; a row whose cell is empty fails
    (`empty_input`)."""
    identifies: bool = True
    """It is part of what is asked, so of the row's id; False for labels and answers that the row
    brings."""
    distilled: bool = False
    """A row may lack it, as `distill` gets it; the student can't be asked without it."""

    @property
    def is_asked(self) -> bool:
        """The student can't be asked without it."""
        return self.identifies and (self.required or self.distilled)


@dataclass(frozen=True)
class Metric:
    """A figure of one row's text. `quality` is the judge's score, 0–5, in every recipe; the gate
    has a rule for it.

    `en` and `zh` are nouns, which sentences use: `RL student 0.91 vs SFT student 0.84 keyword
    coverage`.
    """

    name: str
    en: str
    zh: str
    maximum: float = 1.0
    """Of its scale, which begins at 0: 5 for a judge's score."""
    proportion: bool = True
    """Of one row it is 0 or 1: McNemar's test applies, and the report's short table shows it."""
    digits: int = 3
    interval: bool = True
    """An arm's mean is shown with one. Only such metrics are shown by slice, and decide which
    teacher to buy."""
    compared: bool = True
    """Between arms."""

    @property
    def words(self) -> Both:
        return Both(self.en, self.zh)


class PrimaryMetric(NamedTuple):
    """The part of the reward that says how good the policy is, such as `gold_top1`, and its name in
    a sentence."""

    part: str
    words: str


class FindingRow(BaseModel):
    """A line of a finding."""

    label: Both
    values: tuple[bool | float | None, ...]
    """As many as the finding has columns; None where there is no value."""


class Finding(BaseModel):
    """A table that a recipe adds to the report."""

    title: Both
    columns: tuple[Both, ...]
    """Heads of the numbers; the labels' column has none."""
    rows: tuple[FindingRow, ...]
    digits: int = 3


def prompt(system: str, user: str, rules: str = "") -> list[Message]:
    """The messages, a tenant's further `rules` last in the instructions; no special token of a chat
    template is left in what the user wrote."""
    system = f"{system}\n{rules.strip()}" if rules else system
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": without_markers(user)},
    ]


def identifying(values: Mapping[str, str], inputs: Sequence[Input]) -> dict[str, str]:
    """Those of a row's further inputs that are part of what is asked."""
    return {
        each.name: values[each.name] for each in inputs if each.identifies and each.name in values
    }


def placeholders(inputs: Sequence[Input], text: str) -> dict[str, str]:
    """The inputs that a prompt needs, all with the same text: for a prompt without a real
    question."""
    return {each.name: text for each in inputs if each.is_asked}


def distinctive_words(text: str, count: int) -> list[str]:
    """Up to `count` words of two characters or more, the most distinctive first."""
    tags = extractor().extract_tags(text, topK=count + len(_COURTESIES))
    return [tag for tag in tags if len(tag) > 1 and tag not in _COURTESIES and not tag.isascii()][
        :count
    ]


@cache
def extractor() -> Any:
    """jieba's TF-IDF with a dictionary of its own: loading it the usual way writes a cache into the
    shared tmp."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # jieba's own: pkg_resources, invalid escapes, files left open
        import jieba
        import jieba.analyse

        tokenizer = jieba.Tokenizer()
        tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
        tokenizer.initialized = True
        found = jieba.analyse.TFIDF()
        found.tokenizer = tokenizer
    return found
