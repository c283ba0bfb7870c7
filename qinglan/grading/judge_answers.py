"""Reads the scores in a judge's answer, whatever text surrounds them."""

import json
import math
from contextlib import suppress
from typing import Any

from qinglan.errors import TeacherError

CONTRADICTORY = "contradictory_answer"
"""The reason where an answer says several things that differ."""
_UNREADABLE = "judge_unreadable"
# Reads an object as its pairs, as a key may come twice.
_PAIRS = json.JSONDecoder(object_pairs_hook=list)
_SAID_CHARS = 80


def object_schema(**properties: dict[str, Any]) -> dict[str, Any]:
    """JSON schema of an object with all of these keys and no other.

    It is for models that support structured output.
    """
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCORE_SCHEMA = object_schema(score={"type": "number"}, reason={"type": "string"})
"""JSON schema of an answer that `parse_score` reads."""
PANEL_SCHEMA = object_schema(scores={"type": "array", "items": {"type": "number"}})
"""JSON schema of an answer that `parse_scores` reads."""


def read_json(text: str, key: str) -> Any:
    """The value of a key in the JSON objects of an answer; None where there is none.

    Raises:
        TeacherError: the answer gives the key several values that differ.
    """
    values: list[Any] = []
    start = text.find("{")
    while start >= 0:
        try:
            pairs, end = _PAIRS.raw_decode(text, start)
        except (ValueError, RecursionError):
            # Nobody knows what the whole object would say.
            return None
        values.extend(value for name, value in pairs if name == key)
        start = text.find("{", end)
    if not values:
        return None
    if any(value != values[0] for value in values[1:]):
        said = text[:_SAID_CHARS]
        raise TeacherError(f"the answer has more than one {key}", CONTRADICTORY, said=said)
    return values[0]


def parse_score(text: str) -> float:
    """The score, 0–5, from a judge's answer such as `{"score": 4, "reason": "…"}`.

    Raises:
        TeacherError: there is no score in it (`judge_unreadable`).
    """
    return _score_of(read_json(text, "score"), text)


def parse_scores(text: str, count: int) -> list[float]:
    """The scores, 0–5, from a judge's answer such as `{"scores": [4, 2.5]}`.

    Raises:
        TeacherError: there are not exactly `count` scores in it (`judge_unreadable`).
    """
    values = read_json(text, "scores")
    if not isinstance(values, list) or len(values) != count:
        said = text[:_SAID_CHARS]
        raise TeacherError(f"the judge's answer has not {count} scores", _UNREADABLE, said=said)
    return [_score_of(value, text) for value in values]


def _score_of(value: Any, text: str) -> float:
    score = math.nan
    # True is a number for Python, and no score.
    if not isinstance(value, bool):
        with suppress(ValueError, TypeError, OverflowError):
            score = float(value)
    if not 0 <= score <= 5:
        message = "the judge's answer has no score from 0 to 5"
        raise TeacherError(message, _UNREADABLE, said=text[:_SAID_CHARS])
    return score
