"""A RAG's answer, read as `rag.mapping` says.

One that breaks the contract is an error that says in one line what is wrong: the place, what stands
there, and a hint. All that a service sends is untrusted: it is shown shortened.
"""

import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jmespath
from pydantic import BaseModel, ValidationError

from qinglan.config import Rag, RagMapping
from qinglan.errors import RetrievalError
from qinglan.rows import Retrieved
from qinglan.text import shown, some, without_texts

_TITLE_CHARS = 60
PASSAGE_CHARS = 500
"""Most characters of the best passage, title included, that a judge reads."""
_PLAIN_PATH = re.compile(r"\w+(\.\w+)*")
_OTHER_NAMES = {
    "content": ("page_content", "text", "chunk", "passage", "document"),
    "score": ("rerank_score", "relevance_score", "score", "similarity"),
}
"""Names that services give to a field of ours."""
_SHOWN_KEYS = 6
_SHOWN_PLACES = 3
_LIKELY_LOGIT = 25.0
"""Rerankers' logits stay below this; percentages go beyond it."""
_TYPES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


class Passage(BaseModel, coerce_numbers_to_str=True):
    """One passage of an answer."""

    id: str | None = None
    title: str | None = None
    content: str
    reranker_score: float
    """Score in [0, 1]."""


class _FlawError(Exception):
    """An answer has something that is not allowed; the message says it in words."""


def read_passages(
    rag: Rag, content: bytes, url: str, content_type: str = "", hidden: Sequence[str] = ()
) -> list[Passage]:
    """The passages, best first; RetrievalError where an answer breaks the contract or does not fit
    `rag.mapping`.

    Those beyond `top_k` or below `score_threshold` are left out, as not every service can do that.

    Args:
        hidden: texts that no message may quote, though the service may repeat them.
    """
    passages, flaw = _passages_or_flaw(rag.mapping, content, content_type)
    if flaw:
        text = content.decode("utf-8", "surrogateescape")
        quotable = without_texts(text, hidden).encode("utf-8", "surrogateescape")
        _, flaw = _passages_or_flaw(rag.mapping, quotable, content_type)
        raise RetrievalError(f"rag {url}: the answer breaks the contract: {flaw}", "rag_bad_answer")
    return [
        passage
        for passage in passages[: rag.top_k]
        if passage.reranker_score >= rag.score_threshold
    ]


def read_answer(
    rag: Rag,
    content: bytes,
    url: str,
    content_type: str = "",
    hidden: Sequence[str] = (),
    *,
    with_passage: bool = False,
) -> Retrieved:
    """The part of an answer that a row keeps; checked as `read_passages` does."""
    passages = read_passages(rag, content, url, content_type, hidden)
    first_passage = ""
    if with_passage and passages:
        best = passages[0]
        title = f"《{best.title}》" if best.title else ""
        first_passage = f"{title}{best.content}"[:PASSAGE_CHARS]
    return Retrieved(
        ids=tuple(passage.id for passage in passages),
        scores=tuple(passage.reranker_score for passage in passages),
        titles=tuple((passage.title or passage.content)[:_TITLE_CHARS] for passage in passages),
        first_passage=first_passage,
    )


def _passages_or_flaw(
    mapping: RagMapping, content: bytes, content_type: str
) -> tuple[list[Passage], str]:
    try:
        return _parse(mapping, content, content_type), ""
    except ValidationError as error:
        # What only pydantic refuses, such as half a surrogate pair, has pydantic's words.
        return [], shown(error.errors()[0]["msg"], 120)
    except _FlawError as error:
        return [], str(error)


def _parse(mapping: RagMapping, content: bytes, content_type: str) -> list[Passage]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _FlawError(_no_json(content, content_type)) from error
    listed = _find(mapping.passages, answer)
    if not isinstance(listed, list):
        raise _FlawError(_list_flaw(answer, mapping.passages, listed))
    list_name = "" if mapping.passages == "@" else mapping.passages
    passages_fields = [
        _fields(mapping, passage, f"{list_name}[{place}]") for place, passage in enumerate(listed)
    ]
    scores = _scores(mapping, [fields["score"] for fields in passages_fields], list_name)
    _check_order(scores, list_name, mapping.score)
    return [
        Passage(
            id=fields["id"],
            title=fields["title"],
            content=fields["content"],
            reranker_score=score,
        )
        for fields, score in zip(passages_fields, scores, strict=True)
    ]


def _find(expression: str, value: Any) -> Any:
    try:
        return jmespath.search(expression, value)
    except jmespath.exceptions.JMESPathError as error:
        raise _FlawError(f"rag.mapping: `{expression}` fails: {shown(str(error), 120)}") from error


def _fields(mapping: RagMapping, passage: Any, place: str) -> dict[str, Any]:
    """The passage's id, title, content and score as the service sent them."""
    if not isinstance(passage, dict):
        kind = _TYPES[type(passage)]
        raise _FlawError(f"`{place}` is {kind}, not an object with a text and a score")
    fields = {
        name: _find(getattr(mapping, name), passage) for name in ("id", "title", "content", "score")
    }
    for name in ("content", "score"):
        is_needed = name == "content" or mapping.score_as != "rank"
        if fields[name] is None and is_needed:
            path = getattr(mapping, name)
            hint = _missing_hint(name, path, passage)
            raise _FlawError(f"`{place}.{path}` is missing{_keys(passage)}; {hint}")
    for name in ("content", "id", "title"):
        if isinstance(fields[name], dict | list | bool):
            hint = "send a text, or leave it out"
            if name == "content":
                hint = "send the passage's text"
            kind = _TYPES[type(fields[name])]
            raise _FlawError(f"`{place}.{getattr(mapping, name)}` is {kind}; {hint}")
    return fields


def _scores(mapping: RagMapping, sent_scores: Sequence[Any], list_name: str) -> list[float]:
    """The score of each passage, in [0, 1]."""
    if mapping.score_as == "rank":
        return [1 / position for position in range(1, 1 + len(sent_scores))]
    return [
        _score(mapping, sent_scores, index, f"{list_name}[{index}].{mapping.score}")
        for index in range(len(sent_scores))
    ]


def _score(mapping: RagMapping, sent_scores: Sequence[Any], index: int, place: str) -> float:
    """The score of one passage, in [0, 1]."""
    score: float = sent_scores[index]
    if not _is_number(score):
        raise _FlawError(f"`{place}` is {_no_number(score)}; send a number")
    if mapping.score_as == "sigmoid":
        # Equal to 1 / (1 + exp(-score)), which overflows.
        return (1 + math.tanh(score / 2)) / 2
    scaled = score / (mapping.divide_by or 1.0)
    if 0 <= scaled <= 1:
        return scaled
    if mapping.divide_by:
        hint = (
            f"divided by rag.mapping.divide_by it is {scaled:.6g}: set that to the highest score "
            "that there is"
        )
    else:
        hint = _scale_hint(list(filter(_is_number, sent_scores)))
    raise _FlawError(f"`{place}` is {score:.6g}, outside [0, 1]; {hint}")


def _is_number(score: Any) -> bool:
    is_numeric = isinstance(score, int | float) and not isinstance(score, bool)
    # As math.isfinite, which fails for a huge integer.
    return is_numeric and abs(score) <= sys.float_info.max


def _no_number(score: Any) -> str:
    """The score that is no number, in words."""
    kind = _TYPES[type(score)]
    if kind == "a text":
        return f"the text {shown(str(score), 20)}"
    if kind == "a number":
        # NaN, infinity, or an integer beyond what a float can hold.
        return str(score)[:20]
    return kind


def _scale_hint(scores: Sequence[float]) -> str:
    """Guess the scale of scores of which at least one lies outside of [0, 1]."""
    if min(scores) >= -0.01 and max(scores) <= 1.01:
        return "looks like rounding: clip it"
    if min(scores) >= 0 and _LIKELY_LOGIT < max(scores) <= 100:
        return "looks like a percentage: divide by 100 (rag.mapping.score_as: divide_by)"
    if max(map(abs, scores)) <= _LIKELY_LOGIT:
        return (
            "looks like a logit: send its sigmoid, 1 / (1 + exp(-x)) "
            "(rag.mapping.score_as: sigmoid)"
        )
    return "scale it to [0, 1], higher is better (rag.mapping.score_as)"


def _check_order(scores: Sequence[float], list_name: str, score_name: str) -> None:
    """Raise where scores stand above a smaller one."""
    pairs = list(itertools.pairwise(scores))
    rises = [place for place, (earlier, later) in enumerate(pairs, 1) if later > earlier]
    if not rises:
        return
    hint = "sort by it, best first, or set rag.mapping.score_as: rank where another order is meant"
    if all(later >= earlier for earlier, later in pairs):
        hint += "; all of them rise: if it is a distance, send a score for which higher is better"
    places = some([f"{list_name}[{place}]" for place in rises], _SHOWN_PLACES)
    first = rises[0]
    example = f"{scores[first]:.6g} after {scores[first - 1]:.6g}"
    raise _FlawError(
        f"not sorted by {score_name}: {places} above the passage before ({example}); {hint}"
    )


def _no_json(content: bytes, content_type: str) -> str:
    """The flaw of a body that is no JSON."""
    text = content[:2000].decode("utf-8", "replace").strip()
    if not text:
        return "the body is empty; is this the address of the search route?"
    kind = f" (content-type {shown(content_type, 40)})" if content_type else ""
    if text.startswith("<"):
        hint = "is this the address of the search route?"
        return f"it is HTML, not JSON{kind}: {shown(text)}; {hint}"
    if text.startswith(("data:", "event:")) or "event-stream" in content_type:
        hint = "use a route that answers at once, without streaming"
        return f"it is an event stream, not JSON{kind}; {hint}"
    return f"it is not JSON{kind}: {shown(text)}; send JSON in UTF-8"


def _list_flaw(answer: Any, path: str, found_value: Any) -> str:
    """The flaw of an answer that has no list of passages: where the path to it ends.

    Args:
        path: `rag.mapping.passages`.
        found_value: what stands at the path.
    """
    if isinstance(answer, str):
        hint = "return the object itself, do not encode it twice"
        return f"it is a JSON text, not an object: {shown(answer)}; {hint}"
    hint = (
        f"the passages belong under `{path}`, as a list that may be empty; "
        "else correct rag.mapping.passages"
    )
    if not _PLAIN_PATH.fullmatch(path):
        # A longer expression can't be followed step by step.
        value, place = (answer, "it") if path == "@" else (found_value, f"`{path}`")
        return f"{place} is {_TYPES[type(value)]}{_message(answer)}; {hint}"
    value = answer
    place = "it"
    names = path.split(".")
    for depth, name in enumerate(names, 1):
        if not isinstance(value, dict):
            break
        place = f"`{'.'.join(names[:depth])}`"
        if name not in value:
            return f"{place} is missing{_keys(value)}{_message(answer)}; {hint}"
        value = value[name]
    return f"{place} is {_TYPES[type(value)]}{_message(answer)}; {hint}"


def _missing_hint(field: str, path: str, passage: Mapping[str, Any]) -> str:
    """The remedy for a passage that lacks a field, whose text may stand under another name."""
    scale = ", in [0, 1]" if field == "score" else ""
    for name in _OTHER_NAMES[field]:
        if name in passage and name != path:
            return f"send `{name}` under this name{scale}, or set rag.mapping.{field}: {name}"
    content = "the passage's text" if field == "content" else "the reranker's score, in [0, 1]"
    return f"send {content}, or correct rag.mapping.{field}"


def _keys(value: Mapping[str, Any]) -> str:
    names = [shown(str(key), 24).strip('"') for key in itertools.islice(value, _SHOWN_KEYS)]
    if not names:
        return " (the object is empty)"
    more = ", …" if len(value) > _SHOWN_KEYS else ""
    return f" (found: {', '.join(names)}{more})"


def _message(answer: Any) -> str:
    """The service's own words about a failure that it sends with status 200."""
    if not isinstance(answer, dict):
        return ""
    for key in ("msg", "message", "detail", "error"):
        if isinstance(answer.get(key), str):
            return f" and `{key}` says {shown(answer[key])}"
    return ""
