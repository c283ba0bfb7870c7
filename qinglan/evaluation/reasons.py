"""Reasons, a code with values, and what the report calls things; `texts.yaml` has both in English
and Chinese.

Files hold codes; a reason becomes text where it is shown. A name that is not in `texts.yaml`, such
as a teacher's or a tenant's, was given by a user and is the same in both languages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from string import Formatter
from typing import Any, get_args

import yaml
from pydantic import BaseModel, model_validator

from qinglan import text as formats
from qinglan.text import ARMS, Both, Language
from qinglan.training.alarms import Alarm

_FILE = files("qinglan.evaluation").joinpath("texts.yaml")
TEXTS = {
    table: {key: Both(**{"en": key} | text) for key, text in texts.items()}
    for table, texts in yaml.load(_FILE.read_text(encoding="utf-8"), yaml.CSafeLoader).items()
}
SENTENCES = TEXTS["sentences"]


class Reason(BaseModel, frozen=True, extra="forbid"):
    """What was found, demanded or wrong: the code of a sentence, and the values that fill it in."""

    code: str
    values: "dict[str, Value]" = {}
    """Words in both languages are a mapping from `en` and `zh`."""

    @model_validator(mode="after")
    def _has_a_sentence(self) -> "Reason":
        if self.code not in SENTENCES:
            raise ValueError(f"{self.code!r} is no reason's code")
        if (wanted := placeholders(SENTENCES[self.code].en)) != self.values.keys():
            raise ValueError(
                f"reason {self.code!r} takes {sorted(wanted)}, not {sorted(self.values)}"
            )
        return self

    def render(self, language: Language = "en") -> str:
        return _Sentence(language).format(getattr(SENTENCES[self.code], language), **self.values)

    @property
    def words(self) -> Both:
        return Both(*(self.render(language) for language in get_args(Language)))


Value = Reason | str | int | float | list[Reason] | list[str] | list[int] | dict[str, str] | None
Reason.model_rebuild()


def reason(code: str, **values: "Value | Both") -> Reason:
    plain = {
        name: value._asdict() if isinstance(value, Both) else value
        for name, value in values.items()
    }
    return Reason.model_validate({"code": code, "values": plain})


def placeholders(sentence: str) -> set[str]:
    """Names of the values that a sentence takes."""
    return {name for _, name, _, _ in Formatter().parse(sentence) if name}


@dataclass(frozen=True)
class _Sentence(Formatter):
    """Fills in a sentence; what stands behind a placeholder's colon says how its value is shown."""

    language: Language

    def format_field(self, value: Any, how: str) -> str:
        if how in TEXTS["optional"]:
            form = str(getattr(TEXTS["optional"][how], self.language))
            return form.format(self.format_field(value, "")) if value else ""
        if isinstance(value, Reason):
            return value.render(self.language)
        if how == "and":
            return str(getattr(listed([each.words for each in value]), self.language))
        if isinstance(value, list):
            nested = how != "comma" and any(isinstance(each, Reason) for each in value)
            joint = str(getattr(_SEMICOLON if nested else _COMMA, self.language))
            return joint.join(self.format_field(each, how) for each in value)
        if isinstance(value, dict):
            return str(value[self.language])
        if how in _WORDS:
            return str(getattr(_WORDS[how](value), self.language))
        return "" if value is None else _NUMBERS.get(how, str)(value)


def arm_words(name: str, *, head: bool = False) -> Both:
    """An arm's name in a sentence, or at the head of a column."""
    return (TEXTS["arm_heads"] if head else ARMS).get(name) or Both(name, name)


def rival_words(name: str) -> Both:
    """An arm as somebody's rival: `the teacher`; a name that a user gave stays as it is."""
    arm = arm_words(name)
    return Both(f"the {arm.en}", arm.zh) if name in ARMS else arm


def rule_words(name: str) -> Both:
    """A rule of the gate, whatever arm or version it carries."""
    what, against, rival = name.partition("_vs_")
    if against and what in TEXTS["rules_against"]:
        form, named = TEXTS["rules_against"][what], rival_words(rival)
        return Both(form.en.format(named.en), form.zh.format(named.zh))
    return TEXTS["rules"].get(name) or Both(name.replace("_", " "), name.replace("_", " "))


def alarm_words(alarm: Alarm) -> Both:
    """What an alarm has seen."""
    return Reason.model_validate({"code": alarm.code, "values": alarm.values}).words


def words(name: str, *tables: str) -> Both:
    """What a stage, a row's reason, a curve or a slice is called; a user's own word stays as it
    is."""
    found = [
        TEXTS[table][name] for table in tables or ("row_reasons", "phrases") if name in TEXTS[table]
    ]
    return found[0] if found else Both(name, name)


def listed(texts: list[Both]) -> Both:
    """`a, b and c`."""

    def joined(language: Language, joint: str, final: str) -> str:
        *others, last = (getattr(text, language) for text in texts)
        return f"{joint.join(others)}{final}{last}" if others else last

    return Both(joined("en", ", ", " and "), joined("zh", "、", "和"))


_COMMA, _SEMICOLON = Both(", ", "、"), Both("; ", "；")
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
    "share": lambda value: f"{value:.0%}" if value >= 0.01 else f"{value:.1%}",
}
