"""The RAG's HTTP contract: POST a query, get passages best first with `reranker_score` in [0, 1].

An answer that breaks the contract is an error, never read as "nothing found". It says in one line what is wrong: the
place, what stands there, and a hint. All that a service sends is untrusted: it is shown shortened.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2
from pydantic import BaseModel, Field, ValidationError

from qinglan.clients.limits import Limits, retry_after_s, with_retries
from qinglan.config import Rag, require_secret, uses_proxy
from qinglan.errors import RetrievalError
from qinglan.rows import Retrieved
from qinglan.runs.back_off import BackOff
from qinglan.text import shown

_TITLE_CHARS = 60
PASSAGE_CHARS = 500
"""Of the best passage, title included, that a judge reads at most."""
_BACK_OFF = BackOff(0.2, 10.0, jitter=True)
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


class Passage(BaseModel, coerce_numbers_to_str=True):
    id: str | None = None
    title: str | None = None
    content: str
    reranker_score: float = Field(ge=0, le=1, strict=True)


class _Recall(BaseModel):
    recall: list[Passage]


class _Envelope(BaseModel):
    data: _Recall


@dataclass
class CallCount:
    """Requests that were sent, repeated ones included, and those of them without a usable answer."""

    made: int = 0
    failed: int = 0


class RagClient:
    """Belongs to one event loop."""

    def __init__(self, rag: Rag, url: str, tenant_id: str, *, with_passage: bool = False) -> None:
        """`with_passage`: answers keep the beginning of the best passage, for a judge to read."""
        self._rag, self._url, self._tenant_id, self._with_passage = rag, url, tenant_id, with_passage
        self._limits = Limits(rag.concurrency)
        self._client = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=rag.concurrency),
            timeout=rag.timeout_s,
            headers=authorization(rag),
            trust_env=uses_proxy(url),
        )
        self.call_count = self.failed_count = 0

    async def retrieve(
        self,
        query: str,
        rewritten_query: str | None = None,
        *,
        count: CallCount | None = None,
        max_retries: int | None = None,
    ) -> Retrieved:
        """Passages for a query, or for its rewrite where one is given.

        Args:
            count: gets the requests that this took.
            max_retries: if not as many as the profile says.

        Raises:
            RetrievalError: no valid answer after the retries.
        """
        body = request_body(self._rag, self._tenant_id, query, rewritten_query)
        count = count or CallCount()
        max_retries = self._rag.max_retries if max_retries is None else max_retries
        return await with_retries(lambda: self._post(body, count), max_retries, _BACK_OFF)

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(self, body: dict[str, Any], count: CallCount) -> Retrieved:
        try:
            async with self._limits.slot(1):
                self.call_count += 1
                count.made += 1
                response = await self._respond(body)
            content_type = response.headers.get("content-type", "")
            return read_answer(response.content, self._url, content_type, with_passage=self._with_passage)
        except RetrievalError:
            self.failed_count += 1
            count.failed += 1
            raise

    async def _respond(self, body: dict[str, Any]) -> httpx2.Response:
        try:
            response = await self._client.post(self._url, json=body)
        except httpx2.RequestError as error:
            message = f"rag {self._url}: {str(error) or type(error).__name__}"
            raise RetrievalError(message, "rag_unavailable", transient=True, retry_after_s=0.0) from error
        status = response.status_code
        if status == 429:
            self._limits.refused()
        if status == 429 or status >= 500:
            message, after_s = f"rag {self._url}: HTTP {status}", retry_after_s(response.headers)
            raise RetrievalError(message, "rag_unavailable", transient=True, retry_after_s=after_s)
        self._limits.answered(response.headers, 1, 1)
        if status >= 300:
            raise RetrievalError(f"rag {self._url}: HTTP {status}: {shown(response.text, 120)}", "rag_refused")
        return response


def authorization(rag: Rag) -> dict[str, str]:
    """The header that carries the service's key, where it wants one."""
    return {"authorization": f"Bearer {require_secret(rag.api_key_env, 'rag')}"} if rag.api_key_env else {}


def request_body(rag: Rag, tenant_id: str, query: str, rewritten_query: str | None = None) -> dict[str, Any]:
    """What is posted; without a rewrite the field is left out, so that an unpatched service sees nothing new."""
    body: dict[str, Any] = {
        "query": query,
        "tenant_id": tenant_id,
        "kb_name": rag.kb_name,
        "top_k": rag.top_k,
        "score_threshold": rag.score_threshold,
    }
    return body if rewritten_query is None else body | {"rewritten_query": rewritten_query}


def read_passages(content: bytes, url: str, content_type: str = "") -> list[Passage]:
    """Check an answer against the contract; the passages are best first.

    Raises:
        RetrievalError: the envelope, a field, a score or the order is wrong.
    """
    passages: list[Passage] = []
    try:
        passages = _Envelope.model_validate_json(content).data.recall
        flaw = order_flaw([passage.reranker_score for passage in passages])
    except ValidationError as error:
        # What only pydantic refuses, such as UTF-16 or half a surrogate pair, has pydantic's words.
        flaw = flaw_of(content, content_type) or shown(error.errors()[0]["msg"], 120)
    if flaw:
        raise RetrievalError(f"rag {url}: the answer breaks the contract: {flaw}", "rag_bad_answer")
    return passages


def read_answer(content: bytes, url: str, content_type: str = "", *, with_passage: bool = False) -> Retrieved:
    """What a row keeps of an answer; checked as `read_passages` does."""
    passages = read_passages(content, url, content_type)
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
