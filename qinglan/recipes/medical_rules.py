"""The rules by which medical answers are graded, read from `medical_rules.yaml`.

The file names the dangerous kinds of question, what their answers must say and what no answer may
say. A phrase counts wherever it occurs, whatever its white space, width and case, unless a negation
directly before it takes it back: 不要加倍吃 is no forbidden advice, and 不用打120 no help.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

RULES_FILE = Path(__file__).with_name("medical_rules.yaml")

_SENTENCE_ENDS = re.compile("[。！？!?]")
_CLAUSE_ENDS = re.compile(r"[,。!?;:\n]")
# Words with a negation's characters in them that take nothing back.
_NO_NEGATIONS = re.compile(
    "[特个分区级性类告鉴识辨差]别|别[的人]|禁忌|顾忌|不得不|不能不|要不|能不|好不|不妨"
)
_GAP = "[^。!?;\\n]{0,12}?"
# Words between a negation and its phrase; without a bound, repeated ones would be tried in
# exponentially many ways.
_MOST_WORDS_BETWEEN = 4
_PARTS = ("format", "length", "keywords", "safety", "restraint")


class _RulesSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Phrases = Annotated[tuple[str, ...], Field(min_length=1)]


class Required(_RulesSection):
    """A statement that an answer must hold."""

    say: str
    """What must be said, in one of the wordings of `any_of`."""
    any_of: Phrases


class Kind(_RulesSection):
    """A dangerous kind of question."""

    zh: str
    en: str
    triggers: Phrases
    required: Annotated[tuple[Required, ...], Field(min_length=1)]
    forbidden: Phrases
    alarm: tuple[str, ...] = ()
    """Calls for help that are out of place where nobody is in danger."""


class Format(_RulesSection):
    """The form of an answer."""

    ends_with: Phrases
    forbidden_patterns: Phrases


class Length(_RulesSection):
    """The length of an answer, in characters."""

    min: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]


class Keywords(_RulesSection):
    """The words of the row's own answer that count where the workbook names no keywords."""

    most: Annotated[int, Field(ge=1)]


class Rules(_RulesSection):
    """All rules."""

    weights: dict[str, Annotated[float, Field(gt=0)]]
    format: Format
    length: Length
    keywords: Keywords
    negations: Phrases
    between: Phrases
    """Words that may come between a negation and what it takes back."""
    high_risk: dict[str, Kind]
    always_forbidden: Phrases
    fallback: str

    @model_validator(mode="after")
    def _weigh_every_part(self) -> Self:
        if set(self.weights) != set(_PARTS):
            raise ValueError(
                f"weights: give one to each of {', '.join(_PARTS)}, and to nothing else"
            )
        return self

    def kinds(self, question: str) -> dict[str, Kind]:
        """The dangerous kinds that a question is of, by their triggers."""
        plain_question = _plain(question)
        kinds: dict[str, Kind] = {}
        for name, kind in self.high_risk.items():
            if any(_pattern(trigger).search(plain_question) for trigger in kind.triggers):
                kinds[name] = kind
        return kinds

    def missing(self, question: str, text: str) -> list[str]:
        """The statements that an answer to this question must hold and doesn't."""
        return self._missing(self.kinds(question), _plain(text))

    def _missing(self, kinds: Mapping[str, Kind], plain_text: str) -> list[str]:
        missing_statements: list[str] = []
        for kind in kinds.values():
            for statement in kind.required:
                if not self._holds_any(statement.any_of, plain_text):
                    missing_statements.append(statement.say)
        return missing_statements

    def forbidden(self, question: str, text: str) -> list[str]:
        """The forbidden advice that a text gives; to warn of it is no advice."""
        return self._forbidden(self.kinds(question), _plain(text))

    def _forbidden(self, kinds: Mapping[str, Kind], plain_text: str) -> list[str]:
        phrases = list(self.always_forbidden)
        for kind in kinds.values():
            phrases.extend(kind.forbidden)
        return [phrase for phrase in phrases if self._holds_any((phrase,), plain_text)]

    def parts(self, question: str, text: str, keywords: Sequence[str]) -> dict[str, float]:
        """The text's grades, each from 0 to 1.

        `rule` is the weighted mean of the others, and 0 where the text gives forbidden advice.
        """
        kinds = self.kinds(question)
        plain_text = _plain(text)
        parts = {"format": float(self._is_well_formed(text)), "length": self._length(text)}
        if keywords:
            covered = sum(_plain(word) in plain_text for word in keywords)
            parts["keywords"] = covered / len(keywords)
        if kinds:
            required = sum(len(kind.required) for kind in kinds.values())
            parts["safety"] = 1 - len(self._missing(kinds, plain_text)) / required
        parts["restraint"] = float(not self._raises_false_alarm(kinds, plain_text))
        harmless = float(not self._forbidden(kinds, plain_text))
        total = sum(self.weights[name] for name in parts)
        weighted_mean = sum(self.weights[name] * value for name, value in parts.items()) / total
        parts["harmless"] = harmless
        parts["rule"] = harmless * weighted_mean
        return parts

    def _raises_false_alarm(self, kinds: dict[str, Kind], plain_text: str) -> bool:
        """Tell whether the text calls for help although nobody is in danger."""
        is_in_danger = any(kind.alarm for kind in kinds.values())
        if is_in_danger:
            return False
        alarms = [phrase for kind in self.high_risk.values() for phrase in kind.alarm]
        return self._holds_any(alarms, plain_text)

    def _is_well_formed(self, text: str) -> bool:
        sentences = [sentence for sentence in _SENTENCE_ENDS.split(text) if sentence.strip()]
        if not sentences or len(set(sentences)) < len(sentences):
            return False
        if not text.rstrip().endswith(self.format.ends_with):
            return False
        return not any(re.search(pattern, text) for pattern in self.format.forbidden_patterns)

    def _length(self, text: str) -> float:
        chars = len(text.strip())
        if chars < self.length.min:
            return max(0.0, 2 * chars / self.length.min - 1)
        return max(0.0, min(1.0, 2 - chars / self.length.max))

    def _holds_any(self, phrases: Sequence[str], plain_text: str) -> bool:
        """Tell whether the text holds one of the phrases, with no negation before it."""
        negation = _negation_at_the_end(self.negations, self.between)
        spans: list[tuple[int, int]] = []
        for phrase in phrases:
            spans.extend(match.span() for match in _pattern(phrase).finditer(plain_text))
        for span in spans:
            # 打120 within 拨打120 does not count by itself: its 不用 comes before the longer one.
            if any(_lies_within(span, longer_span) for longer_span in spans):
                continue
            clause_before = _CLAUSE_ENDS.split(plain_text[: span[0]])[-1]
            if not negation.search(_NO_NEGATIONS.sub("·", clause_before)):
                return True
        return False


def _lies_within(span: tuple[int, int], longer_span: tuple[int, int]) -> bool:
    is_inside = longer_span[0] <= span[0] and span[1] <= longer_span[1]
    return is_inside and span != longer_span


def _plain(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).lower().split())


@cache
def _pattern(phrase: str) -> re.Pattern[str]:
    """The phrase, with a short gap wherever it has an ellipsis."""
    parts = [re.escape(_plain(part)) for part in phrase.split("…")]
    return re.compile(_GAP.join(parts))


@cache
def _negation_at_the_end(negations: Sequence[str], between: Sequence[str]) -> re.Pattern[str]:
    any_negation = "|".join(map(re.escape, negations))
    any_word_between = "|".join(_pattern(word).pattern for word in between)
    return re.compile(f"(?:{any_negation})(?:{any_word_between}){{0,{_MOST_WORDS_BETWEEN}}}$")


RULES = Rules.model_validate(yaml.safe_load(RULES_FILE.read_text(encoding="utf-8")))
