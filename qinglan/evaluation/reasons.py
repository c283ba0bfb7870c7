"""Reasons: a code with values. `texts.yaml` has the sentence of each code in English and in Chinese.

Files hold codes. A reason becomes text where it is shown: on the report's page, in the terminal, Prefect and MLflow.
"""

from collections.abc import Callable
from string import Formatter
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from qinglan import text
from qinglan.evaluation.words import TEXTS, arm_words, listed, rival_words, words
from qinglan.text import Both, Language

SENTENCES = TEXTS["sentences"]


class Reason(BaseModel):
    """What was found, demanded or wrong: the code of a sentence, and the values that fill it in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str
    values: "dict[str, Value]" = {}
    """Words in both languages are a mapping from `en` and `zh`."""

    @model_validator(mode="after")
    def _has_a_sentence(self) -> "Reason":
        if self.code not in SENTENCES:
            raise ValueError(f"{self.code!r} is no reason's code")
        if (wanted := placeholders(SENTENCES[self.code].en)) != self.values.keys():
            raise ValueError(f"reason {self.code!r} takes {sorted(wanted)}, not {sorted(self.values)}")
        return self

    def render(self, language: Language = "en") -> str:
        return _Sentence(language).format(getattr(SENTENCES[self.code], language), **self.values)

    @property
    def words(self) -> Both:
        return Both(*(self.render(language) for language in get_args(Language)))


Value = Reason | str | int | float | list[Reason] | list[str] | list[int] | dict[str, str] | None
Reason.model_rebuild()


def reason(code: str, **values: "Value | Both") -> Reason:
    plain = {name: value._asdict() if isinstance(value, Both) else value for name, value in values.items()}
    return Reason.model_validate({"code": code, "values": plain})


def placeholders(sentence: str) -> set[str]:
    """Names of the values that a sentence takes."""
    return {name for _, name, _, _ in Formatter().parse(sentence) if name}


class _Sentence(Formatter):
    """Fills in a sentence; what stands behind a placeholder's colon says how its value is shown."""

    def __init__(self, language: Language) -> None:
        self.language = language

    def format_field(self, value: Any, how: str) -> str:
        if how in _OPTIONAL:
            form = str(getattr(_OPTIONAL[how], self.language))
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


_COMMA, _SEMICOLON = Both(", ", "、"), Both("; ", "；")
_OPTIONAL = {
    "brackets": Both(" ({})", "（{}）"),
    "colon": Both(": {}", "：{}"),
    "semicolon": Both("; {}", "；{}"),
    "after_comma": Both(", {}", "，{}"),
    "after_space": Both(" {}", "{}"),
}
"""A value with its punctuation before it, or nothing where there is none."""
_WORDS: dict[str, Callable[[str], Both]] = {
    "arm": arm_words,
    "rival": rival_words,
    "alarm": TEXTS["alarms"].__getitem__,
    "words": words,
}
_NUMBERS: dict[str, Callable[[Any], str]] = {
    "count": text.count,
    "usd": text.usd,
    "signed": text.signed,
    "signed2": lambda value: text.signed(value, 2),
    "number": text.number,
    "number0": lambda value: text.number(value, 0),
    "number1": lambda value: text.number(value, 1),
    "number2": lambda value: text.number(value, 2),
    "short": lambda value: f"{value:g}",
    "percent": lambda value: f"{value:.0%}",
    "percent1": lambda value: f"{value:.1%}",
    "share": lambda value: f"{value:.0%}" if value >= 0.01 else f"{value:.1%}",
}
