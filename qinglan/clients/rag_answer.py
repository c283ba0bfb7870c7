"""What is wrong with a RAG's answer, in one line: the place, what stands there, and a hint.

All that a service sends is untrusted: it is shown shortened and on one line.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from qinglan.text import one_line

_SHAPE = '{"data": {"recall": [{"id", "content", "reranker_score"}, …]}}'
_OTHER_NAMES = {
    "content": ("page_content", "text", "chunk", "passage", "document"),
    "reranker_score": ("rerank_score", "relevance_score", "score", "similarity"),
}
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


def shown(text: str, chars: int = 60) -> str:
    """Untrusted text in quotes, on one line, without control characters, shortened."""
    line = one_line(text[: 4 * chars])
    return f'"{line[:chars]}…"' if len(line) > chars or len(text) > 4 * chars else f'"{line}"'


def flaw_of(content: bytes, content_type: str = "") -> str:
    """The first thing about an answer that the contract does not allow."""
    try:
        answer = json.loads(content)
    except (UnicodeDecodeError, ValueError, RecursionError):
        return _no_json(content, content_type)
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict) or not isinstance(data.get("recall"), list):
        return _envelope_flaw(answer)
    recall = data["recall"]
    flaws = (_passage_flaw(passage, f"data.recall[{i}]", recall) for i, passage in enumerate(recall))
    return next((flaw for flaw in flaws if flaw), None) or order_flaw([p["reranker_score"] for p in recall]) or ""


def order_flaw(scores: Sequence[float]) -> str:
    """Which scores stand above a smaller one; empty where all are in order."""
    pairs = list(itertools.pairwise(scores))
    rises = [i for i, (earlier, later) in enumerate(pairs, 1) if later > earlier]
    if not rises:
        return ""
    first = rises[0]
    places = ", ".join(f"data.recall[{i}]" for i in rises[:_SHOWN_PLACES])
    places += f" and {len(rises) - _SHOWN_PLACES} more" if len(rises) > _SHOWN_PLACES else ""
    hint = "sort by it, best first"
    if all(later >= earlier for earlier, later in pairs):
        hint += "; all of them rise: if it is a distance, send a score for which higher is better"
    return (
        f"not sorted by reranker_score: {places} above the passage before "
        f"({scores[first]:.6g} after {scores[first - 1]:.6g}); {hint}"
    )


def _no_json(content: bytes, content_type: str) -> str:
    text = content[:2000].decode("utf-8", "replace").strip()
    if not text:
        return f"the body is empty; send {_SHAPE}"
    kind = f" (content-type {shown(content_type, 40)})" if content_type else ""
    if text.startswith("<"):
        return f"it is HTML, not JSON{kind}: {shown(text)}; is this the address of the search route?"
    if text.startswith(("data:", "event:")) or "event-stream" in content_type:
        return f"it is an event stream, not JSON{kind}; use a route that answers at once, without streaming"
    return f"it is not JSON{kind}: {shown(text)}; send {_SHAPE} in UTF-8"


def _envelope_flaw(answer: Any) -> str:
    if isinstance(answer, str):
        return f"it is a JSON text, not an object: {shown(answer)}; return the object itself, do not encode it twice"
    if not isinstance(answer, dict):
        return f"it is {_TYPES[type(answer)]}, not an object; wrap the passages as {_SHAPE}"
    if "data" not in answer:
        return f"`data` is missing{_keys(answer)}; wrap the passages as {_SHAPE}"
    data = answer["data"]
    if isinstance(data, list):
        return "`data` is a list; the passages belong one level deeper, under `data.recall`"
    if not isinstance(data, dict):
        return (
            f"`data` is {_TYPES[type(data)]}{_message(answer)}; send {_SHAPE}, and an HTTP error status for a failure"
        )
    if "recall" not in data:
        return f"`data.recall` is missing{_keys(data)}; the passages belong there"
    return f"`data.recall` is {_TYPES[type(data['recall'])]}, not a list; nothing found is []"


def _passage_flaw(passage: Any, place: str, recall: Sequence[Any]) -> str:
    if not isinstance(passage, dict):
        return f"`{place}` is {_TYPES[type(passage)]}, not an object with `content` and `reranker_score`"
    for field in ("content", "reranker_score"):
        if field not in passage:
            return f"`{place}.{field}` is missing{_keys(passage)}; {_hint(field, passage)}"
    if not isinstance(passage["content"], str | int | float) or isinstance(passage["content"], bool):
        return f"`{place}.content` is {_TYPES[type(passage['content'])]}; send the passage's text"
    for field in ("id", "title"):
        value = passage.get(field)
        if isinstance(value, dict | list | bool):
            return f"`{place}.{field}` is {_TYPES[type(value)]}; send a text, or leave it out"
    return _score_flaw(passage["reranker_score"], f"{place}.reranker_score", recall)


def _score_flaw(score: Any, place: str, recall: Sequence[Any]) -> str:
    if isinstance(score, str):
        return f"`{place}` is the text {shown(score, 20)}; send a number in [0, 1]"
    if isinstance(score, bool) or not isinstance(score, int | float):
        return f"`{place}` is {_TYPES[type(score)]}; send a number in [0, 1]"
    if not math.isfinite(score):
        return f"`{place}` is {score}; send a number in [0, 1]"
    if 0 <= score <= 1:
        return ""
    given = (p.get("reranker_score") for p in recall if isinstance(p, dict))
    scores = [s for s in given if isinstance(s, int | float) and not isinstance(s, bool) and math.isfinite(s)]
    if min(scores) >= -0.01 and max(scores) <= 1.01:
        hint = "looks like rounding: clip it"
    elif min(scores) >= 0 and _LIKELY_LOGIT < max(scores) <= 100:
        hint = "looks like a percentage: divide by 100"
    elif max(map(abs, scores)) <= _LIKELY_LOGIT:
        hint = "looks like a logit: send its sigmoid, 1 / (1 + exp(-x))"
    else:
        hint = "scale it to [0, 1], higher is better"
    return f"`{place}` is {score:.6g}, outside [0, 1]; {hint}"


def _hint(field: str, passage: Mapping[str, Any]) -> str:
    other = next((name for name in _OTHER_NAMES[field] if name in passage), None)
    if field == "content":
        return f"send `{other}` under this name" if other else "send the passage's text"
    return f"send `{other}` under this name, in [0, 1]" if other else "send the reranker's score, in [0, 1]"


def _keys(found: Mapping[str, Any]) -> str:
    names = [shown(str(key), 24).strip('"') for key in itertools.islice(found, _SHOWN_KEYS)]
    more = ", …" if len(found) > _SHOWN_KEYS else ""
    return f" (found: {', '.join(names)}{more})" if names else " (the object is empty)"


def _message(answer: Mapping[str, Any]) -> str:
    """What the service itself says of a failure that it sends with status 200."""
    for key in ("msg", "message", "detail", "error"):
        if isinstance(answer.get(key), str):
            return f" and `{key}` says {shown(answer[key])}"
    return ""
