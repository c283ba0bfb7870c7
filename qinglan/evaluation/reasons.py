"""Reasons, which are a code with values, and the report's names of things.

`texts.yaml` has both in English and Chinese. Files hold codes; a reason becomes text where it is
shown. A name that is not in `texts.yaml`, such as a teacher's or a tenant's, was given by a user
and is the same in both languages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from string import Formatter
from typing import Any

import yaml
from pydantic import BaseModel, model_validator

from qinglan import text as formats
from qinglan.text import ARMS, Both, Language, joined
from qinglan.training.alarms import Alarm

_COMMA = Both(", ", "、")
_SEMICOLON = Both("; ", "；")
_AND = Both(" and ", "和")
_FILE = files("qinglan.evaluation").joinpath("texts.yaml")


def _read_texts() -> dict[str, dict[str, Both]]:
    """The tables of `texts.yaml`; a name without English words is called by its key."""
    # libyaml's loader, which is many times as fast as the one in Python.
    source = yaml.load(_FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    tables: dict[str, dict[str, Both]] = {}
    for table, texts in source.items():
        tables[table] = {key: Both(text.get("en", key), text["zh"]) for key, text in texts.items()}
    return tables


TEXTS = _read_texts()
SENTENCES = TEXTS["sentences"]


class Reason(BaseModel, frozen=True, extra="forbid"):
    """A finding, a demand or a flaw: the code of a sentence, and the values that fill it in."""

    code: str
    values: "dict[str, Value]" = {}
    """Words in both languages are a mapping from `en` and `zh`."""

    @model_validator(mode="after")
    def _has_a_sentence(self) -> "Reason":
        if self.code not in SENTENCES:
            raise ValueError(f"{self.code!r} is no reason's code")
        # The Chinese sentence takes the same values; a test compares them.
        names = placeholders(SENTENCES[self.code].en)
        if names != self.values.keys():
            raise ValueError(
                f"reason {self.code!r} takes {sorted(names)}, not {sorted(self.values)}"
            )
        return self

    def render(self, language: Language = "en") -> str:
        sentence = SENTENCES[self.code].in_language(language)
        return _Sentence(language).format(sentence, **self.values)

    @property
    def words(self) -> Both:
        return Both(self.render("en"), self.render("zh"))


Value = Reason | str | int | float | list[Reason] | list[str] | list[int] | dict[str, str] | None
# The type of the values names `Reason`, so its fields are complete only here.
Reason.model_rebuild()


def reason(code: str, **values: "Value | Both") -> Reason:
    """The reason with this code; words in both languages become a mapping, as files hold them."""
    plain: dict[str, Value] = {}
    for name, value in values.items():
        plain[name] = value._asdict() if isinstance(value, Both) else value
    return Reason.model_validate({"code": code, "values": plain})


def placeholders(sentence: str) -> set[str]:
    """Names of the values that a sentence takes."""
    return {name for _, name, _, _ in Formatter().parse(sentence) if name}


@dataclass(frozen=True)
class _Sentence(Formatter):
    """Fills in a sentence; the text behind a placeholder's colon says how its value is shown."""

    language: Language

    def format_field(self, value: Any, how: str) -> str:
        if how in TEXTS["optional"]:
            # A missing value takes the words around it with it.
            form = TEXTS["optional"][how].in_language(self.language)
            return form.format(self.format_field(value, "")) if value else ""
        if isinstance(value, Reason):
            return value.render(self.language)
        if how == "and":
            return listed([part.words for part in value]).in_language(self.language)
        if isinstance(value, list):
            return self._joined(value, how)
        if isinstance(value, dict):
            return str(value[self.language])
        if how in _WORDS:
            return _WORDS[how](str(value)).in_language(self.language)
        if value is None:
            return ""
        show = _NUMBERS.get(how, str)
        return show(value)

    def _joined(self, values: list[Any], how: str) -> str:
        # Reasons have commas of their own, so a list of them needs a stronger sign.
        holds_reasons = any(isinstance(value, Reason) for value in values)
        joint = _SEMICOLON if holds_reasons and how != "comma" else _COMMA
        texts = [self.format_field(value, how) for value in values]
        return joint.in_language(self.language).join(texts)


def arm_words(name: str, *, head: bool = False) -> Both:
    """An arm's name in a sentence, or at the head of a column."""
    names = TEXTS["arm_heads"] if head else ARMS
    return names.get(name) or _as_given(name)


def rival_words(name: str) -> Both:
    """An arm as somebody's rival: `the teacher`; a name that a user gave stays as it is."""
    arm = arm_words(name)
    if name not in ARMS:
        return arm
    return Both(f"the {arm.en}", arm.zh)


def rule_words(name: str) -> Both:
    """A rule of the gate, with the rival that it is about."""
    kind, separator, rival = name.partition("_vs_")
    if separator and kind in TEXTS["rules_against"]:
        form = TEXTS["rules_against"][kind]
        rival_name = rival_words(rival)
        return Both(form.en.format(rival_name.en), form.zh.format(rival_name.zh))
    return TEXTS["rules"].get(name) or _as_given(name.replace("_", " "))


def alarm_words(alarm: Alarm) -> Both:
    """The sentence of an alarm."""
    return Reason.model_validate({"code": alarm.code, "values": alarm.values}).words


def words(name: str, *tables: str) -> Both:
    """The name of a stage, a row's reason, a curve or a slice; a user's own word stays as it is.

    Args:
        tables: tables of `texts.yaml` to look into, in this order.
    """
    for table in tables or ("row_reasons", "phrases"):
        if name in TEXTS[table]:
            return TEXTS[table][name]
    return _as_given(name)


def _as_given(name: str) -> Both:
    """A user's own word, the same in both languages."""
    return Both(name, name)


def listed(texts: list[Both]) -> Both:
    """`a, b and c`."""
    *first_texts, last_text = texts
    if not first_texts:
        return last_text
    return joined([joined(first_texts, _COMMA), last_text], _AND)


def _share(value: float) -> str:
    """Percent, with a decimal below 1%."""
    if value >= 0.01:
        return f"{value:.0%}"
    return f"{value:.1%}"


_WORDS: dict[str, Callable[[str], Both]] = {
    "arm": arm_words,
    "rival": rival_words,
    "alarm": TEXTS["alarms"].__getitem__,
    "words": words,
}
_NUMBERS: dict[str, Callable[[Any], str]] = {
    "count": formats.count,
    "usd": formats.usd,
    "signed": formats.signed,
    "signed2": lambda value: formats.signed(value, 2),
    "number": formats.number,
    "number0": lambda value: formats.number(value, 0),
    "number1": lambda value: formats.number(value, 1),
    "number2": lambda value: formats.number(value, 2),
    "short": lambda value: f"{value:g}",
    "tiny": lambda value: f"{value:.1g}",
    "percent": lambda value: f"{value:.0%}",
    "percent1": lambda value: f"{value:.1%}",
    "share": _share,
}
