"""The RAG over HTTP: POST a query, get passages, best first, with scores in [0, 1]. `rag.mapping`
says in which shape.

An answer that breaks the contract is an error, never read as "nothing found". It says in one line
what is wrong: the place, what stands there, and a hint. All that a service sends is untrusted: it
is shown shortened.
"""

import itertools
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import httpx2
import jmespath
from pydantic import BaseModel, ValidationError

from qinglan.clients.limits import BodyTooLargeError, Limits, receive, retry_after_s, with_retries
from qinglan.config import Rag, RagMapping, require_secret, uses_proxy
from qinglan.errors import RetrievalError
from qinglan.rows import Retrieved
from qinglan.runs.back_off import BackOff
from qinglan.runs.traces import CallSample
from qinglan.text import shown, some, without_texts

_TITLE_CHARS = 60
PASSAGE_CHARS = 500
"""Of the best passage, title included, that a judge reads at most."""
_BACK_OFF = BackOff(0.2, 10.0, jitter=True)
_PLAIN_PATH = re.compile(r"\w+(\.\w+)*")
_OTHER_NAMES = {
    "content": ("page_content", "text", "chunk", "passage", "document"),
    "score": ("rerank_score", "relevance_score", "score", "similarity"),
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


class Passage(BaseModel, coerce_numbers_to_str=True):
    id: str | None = None
    title: str | None = None
    content: str
    reranker_score: float
    """In [0, 1]."""


class _FlawError(Exception):
    """What an answer has that is not allowed, in words."""


@dataclass
class CallCount:
    """Requests that were sent, repeated ones included, and those of them without a usable
    answer."""

    made: int = 0
    failed: int = 0


class RagClient:
    """Belongs to one event loop."""

    def __init__(
        self,
        rag: Rag,
        url: str,
        tenant_id: str,
        *,
        with_passage: bool = False,
        traced: CallSample | None = None,
    ) -> None:
        """`with_passage`: answers keep how the best passage begins, for a judge; `traced` notes
        what is sent."""
        self._traced = traced or CallSample(0)
        self._rag, self._url, self._tenant_id, self._with_passage = (
            rag,
            address_of(rag, url),
            tenant_id,
            with_passage,
        )
        self._limits = Limits(rag.concurrency)
        self._client = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=rag.concurrency),
            timeout=rag.timeout_s,
            headers=authorization(rag),
            trust_env=uses_proxy(url),
        )
        self._kept: dict[tuple[str, str | None], Retrieved] | None = None
        self.call_count = self.failed_count = self.transient_failures = 0

    def keep_answers(self) -> None:
        """From now on nothing that was answered is asked again."""
        self._kept = self._kept or {}

    async def retrieve(
        self,
        query: str,
        rewritten_query: str | None = None,
        *,
        count: CallCount | None = None,
        max_retries: int | None = None,
    ) -> Retrieved:
        """Passages for a query, or for its rewrite where one is given; RetrievalError after the
        retries.

        Args:
            count: gets the requests that this took.
            max_retries: if not as many as the profile says.
        """
        if self._kept and (known := self._kept.get((query, rewritten_query))):
            return known
        body, count = (
            request_body(self._rag, self._tenant_id, query, rewritten_query),
            count or CallCount(),
        )
        max_retries = self._rag.max_retries if max_retries is None else max_retries
        asked = (query, rewritten_query or "")
        try:
            found = await with_retries(
                lambda: self._post(body, asked, count), max_retries, _BACK_OFF
            )
        except RetrievalError as error:
            self.transient_failures += error.transient
            raise
        if self._kept is not None:
            self._kept[query, rewritten_query] = found
        return found

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(
        self, body: dict[str, Any], asked: Sequence[str], count: CallCount
    ) -> Retrieved:
        start_s = 0.0
        try:
            async with self._limits.slot(1):
                self.call_count += 1
                count.made += 1
                start_s = time.perf_counter()
                response = await self._respond(body, asked)
            kind, keeps = response.headers.get("content-type", ""), self._with_passage
            found = read_answer(
                self._rag, response.content, self._url, kind, asked, with_passage=keeps
            )
        except RetrievalError as error:
            self.failed_count += 1
            count.failed += 1
            self._trace(asked, start_s, failure=error.reason)
            raise
        self._trace(asked, start_s, found)
        return found

    def _trace(
        self,
        asked: Sequence[str],
        start_s: float,
        found: Retrieved | None = None,
        failure: str = "",
    ) -> None:
        """Without the request's constants and headers: they may hold the service's key."""
        latency_ms, inputs = (
            1000 * (time.perf_counter() - start_s),
            {"query": asked[0], "rewritten_query": asked[1]},
        )
        passages = found and [
            {"id": id_, "page_content": title, "metadata": {"score": score}}
            for id_, title, score in zip(found.ids, found.titles, found.scores, strict=True)
        ]
        key = "\x1f".join(("rag", *asked))
        self._traced.add(
            key, "rag", "RETRIEVER", inputs, passages, failure=failure, latency_ms=latency_ms
        )

    async def _respond(self, body: dict[str, Any], asked: Sequence[str]) -> httpx2.Response:
        try:
            request = self._client.build_request("POST", self._url, json=body)
            response = await receive(self._client.send(request, stream=True), request)
        except BodyTooLargeError as error:
            message = f"rag {self._url}: {error}; send fewer or shorter passages"
            raise RetrievalError(message, "rag_bad_answer") from error
        except httpx2.RequestError as error:
            message = f"rag {self._url}: {str(error) or type(error).__name__}"
            raise RetrievalError(
                message, "rag_unavailable", transient=True, retry_after_s=0.0
            ) from error
        status = response.status_code
        if status == 429:
            self._limits.refused()
        if status == 429 or status >= 500:
            message, after_s = f"rag {self._url}: HTTP {status}", retry_after_s(response.headers)
            raise RetrievalError(message, "rag_unavailable", transient=True, retry_after_s=after_s)
        self._limits.answered(response.headers, 1, 1)
        if status >= 300:
            said = shown(without_texts(response.text, asked), 120)
            raise RetrievalError(f"rag {self._url}: HTTP {status}: {said}", "rag_refused")
        return response


def address_of(rag: Rag, url: str) -> str:
    return url.replace("{kb_name}", quote(rag.kb_name, safe=""))


def authorization(rag: Rag) -> dict[str, str]:
    """The header that carries the service's key, where it wants one."""
    if rag.api_key_env is None:
        return {}
    return {
        rag.mapping.key_header: f"{rag.mapping.key_prefix}{require_secret(rag.api_key_env, 'rag')}"
    }


def request_body(
    rag: Rag, tenant_id: str, query: str, rewritten_query: str | None = None
) -> dict[str, Any]:
    """What is posted. Texts are put in as JSON values, so that none of them can change the
    request's shape."""
    values = {
        "{text}": query if rewritten_query is None else rewritten_query,
        "{query}": query,
        "{rewritten_query}": rewritten_query,
        "{top_k}": rag.top_k,
        "{score_threshold}": rag.score_threshold,
        "{tenant_id}": tenant_id,
        "{kb_name}": rag.kb_name,
    }
    return cast(dict[str, Any], _filled(rag.mapping.request, values))


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, list):
        return [_filled(part, values) for part in template]
    if isinstance(template, dict):
        # Without a rewrite its field is left out, so that a service that does not know it sees
        # nothing new.
        absent = [
            key
            for key, part in template.items()
            if isinstance(part, str) and values.get(part, part) is None
        ]
        return {key: _filled(part, values) for key, part in template.items() if key not in absent}
    return values.get(template, template) if isinstance(template, str) else template


def read_passages(
    rag: Rag, content: bytes, url: str, content_type: str = "", asked: Sequence[str] = ()
) -> list[Passage]:
    """The passages, best first; RetrievalError where an answer breaks the contract or does not fit
    `rag.mapping`.

    Those beyond `top_k` or below `score_threshold` are left out, as not every service can do that.
    `asked` are texts that no message may quote, though the service may repeat them.
    """
    passages, flaw = _checked(rag.mapping, content, content_type)
    if flaw:
        quotable = without_texts(content.decode("utf-8", "surrogateescape"), asked).encode(
            "utf-8", "surrogateescape"
        )
        _, flaw = _checked(rag.mapping, quotable, content_type)
        raise RetrievalError(f"rag {url}: the answer breaks the contract: {flaw}", "rag_bad_answer")
    return [
        passage
        for passage in passages[: rag.top_k]
        if passage.reranker_score >= rag.score_threshold
    ]


def _checked(mapping: RagMapping, content: bytes, content_type: str) -> tuple[list[Passage], str]:
    try:
        return _read(mapping, content, content_type), ""
    except (
        ValidationError
    ) as error:  # what only pydantic refuses, such as half a surrogate pair, has pydantic's words
        return [], shown(error.errors()[0]["msg"], 120)
    except _FlawError as error:
        return [], str(error)


def read_answer(
    rag: Rag,
    content: bytes,
    url: str,
    content_type: str = "",
    asked: Sequence[str] = (),
    *,
    with_passage: bool = False,
) -> Retrieved:
    """What a row keeps of an answer; checked as `read_passages` does."""
    passages = read_passages(rag, content, url, content_type, asked)
    first_passage = ""
    if with_passage and passages:
        title = f"《{passages[0].title}》" if passages[0].title else ""
        first_passage = f"{title}{passages[0].content}"[:PASSAGE_CHARS]
    return Retrieved(
        ids=tuple(passage.id for passage in passages),
        scores=tuple(passage.reranker_score for passage in passages),
        titles=tuple((passage.title or passage.content)[:_TITLE_CHARS] for passage in passages),
        first_passage=first_passage,
    )


def _read(mapping: RagMapping, content: bytes, content_type: str) -> list[Passage]:
    try:
        answer = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _FlawError(_no_json(content, content_type)) from error
    found = _find(mapping.passages, answer)
    if not isinstance(found, list):
        raise _FlawError(_list_flaw(answer, mapping.passages, found))
    listed = "" if mapping.passages == "@" else mapping.passages
    fields = [_fields(mapping, passage, f"{listed}[{i}]") for i, passage in enumerate(found)]
    if mapping.score_as == "rank":
        scores = [1 / position for position in range(1, 1 + len(fields))]
    else:
        given = [each["score"] for each in fields]
        scores = [
            _score(mapping, given, i, f"{listed}[{i}].{mapping.score}") for i in range(len(given))
        ]
    _check_order(scores, listed, mapping.score)
    return [
        Passage(**each, reranker_score=score) for each, score in zip(fields, scores, strict=True)
    ]


def _find(expression: str, value: Any) -> Any:
    try:
        return jmespath.search(expression, value)
    except jmespath.exceptions.JMESPathError as error:
        raise _FlawError(f"rag.mapping: `{expression}` fails: {shown(str(error), 120)}") from error


def _check_order(scores: Sequence[float], listed: str, score_name: str) -> None:
    """Raise where scores stand above a smaller one."""
    pairs = list(itertools.pairwise(scores))
    if not (rises := [i for i, (earlier, later) in enumerate(pairs, 1) if later > earlier]):
        return
    first, places = rises[0], some([f"{listed}[{i}]" for i in rises], _SHOWN_PLACES)
    hint = "sort by it, best first, or set rag.mapping.score_as: rank where another order is meant"
    if all(later >= earlier for earlier, later in pairs):
        hint += "; all of them rise: if it is a distance, send a score for which higher is better"
    found = f"{places} above the passage before ({scores[first]:.6g} after {scores[first - 1]:.6g})"
    raise _FlawError(f"not sorted by {score_name}: {found}; {hint}")


def _no_json(content: bytes, content_type: str) -> str:
    if not (text := content[:2000].decode("utf-8", "replace").strip()):
        return "the body is empty; is this the address of the search route?"
    kind = f" (content-type {shown(content_type, 40)})" if content_type else ""
    if text.startswith("<"):
        return (
            f"it is HTML, not JSON{kind}: {shown(text)}; is this the address of the search route?"
        )
    if text.startswith(("data:", "event:")) or "event-stream" in content_type:
        return f"it is an event stream, not JSON{kind}; use a route that answers at once, without streaming"
    return f"it is not JSON{kind}: {shown(text)}; send JSON in UTF-8"


def _list_flaw(answer: Any, path: str, found: Any) -> str:
    """Where the way to the list of passages ends."""
    if isinstance(answer, str):
        return f"it is a JSON text, not an object: {shown(answer)}; return the object itself, do not encode it twice"
    hint = f"the passages belong under `{path}`, as a list that may be empty; else correct rag.mapping.passages"
    names = path.split(".") if _PLAIN_PATH.fullmatch(path) else []
    value, what = (answer, "it") if names or path == "@" else (found, f"`{path}`")
    for i, name in enumerate(names, 1):
        if not isinstance(value, dict):
            break
        what = f"`{'.'.join(names[:i])}`"
        if name not in value:
            return f"{what} is missing{_keys(value)}{_message(answer)}; {hint}"
        value = value[name]
    return f"{what} is {_TYPES[type(value)]}{_message(answer)}; {hint}"


def _fields(mapping: RagMapping, passage: Any, place: str) -> dict[str, Any]:
    if not isinstance(passage, dict):
        raise _FlawError(
            f"`{place}` is {_TYPES[type(passage)]}, not an object with a text and a score"
        )
    found = {
        name: _find(getattr(mapping, name), passage) for name in ("id", "title", "content", "score")
    }
    for name in ("content", "score"):
        if found[name] is None and not (name == "score" and mapping.score_as == "rank"):
            path = getattr(mapping, name)
            raise _FlawError(
                f"`{place}.{path}` is missing{_keys(passage)}; {_hint(name, path, passage)}"
            )
    for name in ("content", "id", "title"):
        if isinstance(found[name], dict | list | bool):
            hint = (
                "send the passage's text" if name == "content" else "send a text, or leave it out"
            )
            kind = _TYPES[type(found[name])]
            raise _FlawError(f"`{place}.{getattr(mapping, name)}` is {kind}; {hint}")
    return found


def _score(mapping: RagMapping, given: Sequence[Any], i: int, place: str) -> float:
    """The score of one passage, in [0, 1]."""
    score: float = given[i]
    if not _is_number(score):
        kind = _TYPES[type(score)]
        what = {"a text": f"the text {shown(str(score), 20)}", "a number": str(score)[:20]}.get(
            kind, kind
        )
        raise _FlawError(f"`{place}` is {what}; send a number")
    if mapping.score_as == "sigmoid":
        return (1 + math.tanh(score / 2)) / 2  # 1 / (1 + exp(-score)), which overflows
    made = score / (mapping.divide_by or 1.0)
    if 0 <= made <= 1:
        return made
    scores = list(filter(_is_number, given))
    if mapping.divide_by:
        hint = f"divided by rag.mapping.divide_by it is {made:.6g}: set that to the highest score that there is"
    elif min(scores) >= -0.01 and max(scores) <= 1.01:
        hint = "looks like rounding: clip it"
    elif min(scores) >= 0 and _LIKELY_LOGIT < max(scores) <= 100:
        hint = "looks like a percentage: divide by 100 (rag.mapping.score_as: divide_by)"
    elif max(map(abs, scores)) <= _LIKELY_LOGIT:
        hint = "looks like a logit: send its sigmoid, 1 / (1 + exp(-x)) (rag.mapping.score_as: sigmoid)"
    else:
        hint = "scale it to [0, 1], higher is better (rag.mapping.score_as)"
    raise _FlawError(f"`{place}` is {score:.6g}, outside [0, 1]; {hint}")


def _is_number(score: Any) -> bool:
    is_one = isinstance(score, int | float) and not isinstance(score, bool)
    return (
        is_one and abs(score) <= sys.float_info.max
    )  # as math.isfinite, which fails for a huge integer


def _hint(field: str, path: str, passage: Mapping[str, Any]) -> str:
    other = next((name for name in _OTHER_NAMES[field] if name in passage and name != path), None)
    if other is None:
        wanted = "the passage's text" if field == "content" else "the reranker's score, in [0, 1]"
        return f"send {wanted}, or correct rag.mapping.{field}"
    scale = ", in [0, 1]" if field == "score" else ""
    return f"send `{other}` under this name{scale}, or set rag.mapping.{field}: {other}"


def _keys(found: Mapping[str, Any]) -> str:
    names = [shown(str(key), 24).strip('"') for key in itertools.islice(found, _SHOWN_KEYS)]
    more = ", …" if len(found) > _SHOWN_KEYS else ""
    return f" (found: {', '.join(names)}{more})" if names else " (the object is empty)"


def _message(answer: Any) -> str:
    """What the service itself says of a failure that it sends with status 200."""
    for key in ("msg", "message", "detail", "error"):
        if isinstance(answer, dict) and isinstance(answer.get(key), str):
            return f" and `{key}` says {shown(answer[key])}"
    return ""
