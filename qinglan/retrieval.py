"""The RAG's HTTP contract: POST a query, get passages best first with `reranker_score` in [0, 1].

An answer that breaks the contract is an error that says what is wrong with it; it is never read as "nothing found".
"""

import asyncio
import itertools
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from qinglan.config import Rag, explain, require_secret, uses_proxy
from qinglan.errors import RetrievalError
from qinglan.rows import Retrieved

_TITLE_CHARS = 60
_MAX_RETRY_AFTER_S = 60.0
_BACK_OFF = wait_random_exponential(multiplier=0.2, max=10)


class _Passage(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str | None = None
    title: str = ""
    content: str
    reranker_score: float = Field(ge=0, le=1)


class _Recall(BaseModel):
    recall: list[_Passage]


class _Envelope(BaseModel):
    data: _Recall


class _TransientError(RetrievalError):
    """Worth another try, after the time that the service asked for."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message, "rag_unavailable", transient=True)
        self.retry_after_s = retry_after_s


class RagClient:
    """Retrieves over HTTP with retries and a concurrency limit. Belongs to one event loop."""

    def __init__(self, rag: Rag, url: str, tenant_id: str) -> None:
        self._rag, self._url, self._tenant_id = rag, url, tenant_id
        self._slots = asyncio.Semaphore(rag.concurrency)
        headers = {}
        if rag.api_key_env:
            headers["authorization"] = f"Bearer {require_secret(rag.api_key_env, 'rag')}"
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=rag.concurrency),
            timeout=rag.timeout_s,
            headers=headers,
            trust_env=uses_proxy(url),
        )
        self.call_count = self.failed_count = 0

    async def retrieve(self, query: str, rewritten_query: str | None = None) -> Retrieved:
        """Passages for a query, or for its rewrite where one is given.

        Raises:
            RetrievalError: no valid answer after the retries.
        """
        body: dict[str, Any] = {
            "query": query,
            "tenant_id": self._tenant_id,
            "kb_name": self._rag.kb_name,
            "top_k": self._rag.top_k,
            "score_threshold": self._rag.score_threshold,
        }
        if rewritten_query is not None:
            body["rewritten_query"] = rewritten_query
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_TransientError),
            stop=stop_after_attempt(self._rag.max_retries + 1),
            wait=_wait_s,
            reraise=True,
        )
        async with self._slots:
            return await retrying(self._post, body)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _post(self, body: dict[str, Any]) -> Retrieved:
        self.call_count += 1
        try:
            return read_answer(await self._content(body), self._url)
        except RetrievalError:
            self.failed_count += 1
            raise

    async def _content(self, body: dict[str, Any]) -> bytes:
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.RequestError as error:
            raise _TransientError(f"rag {self._url}: {str(error) or type(error).__name__}") from error
        status = response.status_code
        if status == 429 or status >= 500:
            raise _TransientError(f"rag {self._url}: HTTP {status}", _retry_after_s(response))
        if status >= 300:
            raise RetrievalError(
                f"rag {self._url}: HTTP {status}: {' '.join(response.text[:120].split())}", "rag_refused"
            )
        return response.content


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", 0)), _MAX_RETRY_AFTER_S)
    except ValueError:  # a date, which is rare: back off as usual
        return 0.0


def _wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_s if isinstance(error, _TransientError) else 0.0
    return max(asked, _BACK_OFF(state))


def read_answer(content: bytes, url: str) -> Retrieved:
    """Check an answer against the contract.

    Raises:
        RetrievalError: the envelope, a score or the order is wrong.
    """
    try:
        passages = _Envelope.model_validate_json(content).data.recall
    except ValidationError as error:
        raise RetrievalError(
            f"rag {url}: the answer breaks the contract: {explain(error, 'answer')}", "rag_bad_answer"
        ) from error
    scores = tuple(passage.reranker_score for passage in passages)
    if any(later > earlier for earlier, later in itertools.pairwise(scores)):
        raise RetrievalError(f"rag {url}: the answer is not sorted by reranker_score, best first", "rag_bad_answer")
    return Retrieved(
        ids=tuple(passage.id for passage in passages),
        scores=scores,
        titles=tuple((passage.title or passage.content)[:_TITLE_CHARS] for passage in passages),
    )
