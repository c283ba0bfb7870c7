"""The RAG's HTTP contract: POST a query, get passages best first with `reranker_score` in [0, 1].

An answer that breaks the contract is an error that says what is wrong with it; it is never read as "nothing found".
"""

from dataclasses import dataclass
from typing import Any

import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qinglan.clients.limits import Limits, retry_after_s, with_retries
from qinglan.clients.rag_answer import flaw_of, order_flaw, shown
from qinglan.config import Rag, require_secret, uses_proxy
from qinglan.errors import RetrievalError
from qinglan.rows import Retrieved
from qinglan.runs.back_off import BackOff

_TITLE_CHARS = 60
PASSAGE_CHARS = 500
"""Of the best passage, title included, that a judge reads at most."""
_BACK_OFF = BackOff(0.2, 10.0, jitter=True)


class Passage(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

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
            raise self._unavailable(str(error) or type(error).__name__) from error
        status = response.status_code
        if status == 429:
            self._limits.refused()
        if status == 429 or status >= 500:
            raise self._unavailable(f"HTTP {status}", retry_after_s(response.headers))
        self._limits.answered(response.headers, 1, 1)
        if status >= 300:
            raise RetrievalError(f"rag {self._url}: HTTP {status}: {shown(response.text, 120)}", "rag_refused")
        return response

    def _unavailable(self, why: str, after_s: float = 0.0) -> RetrievalError:
        return RetrievalError(f"rag {self._url}: {why}", "rag_unavailable", transient=True, retry_after_s=after_s)


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
