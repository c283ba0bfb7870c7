"""The RAG over HTTP: POST a query, get passages, best first, with scores in [0, 1]. `rag.mapping`
says in which shape.

An answer that breaks the contract is an error, never read as "nothing found".
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote

import httpx2

from qinglan.clients.limits import BodyTooLargeError, Limits, receive, retry_after_s, with_retries
from qinglan.clients.rag.answers import read_answer
from qinglan.config import Rag, require_secret, uses_proxy
from qinglan.errors import RetrievalError
from qinglan.rows import Retrieved
from qinglan.runs.back_off import BackOff
from qinglan.runs.traces import CallSample
from qinglan.text import shown, without_texts

_BACK_OFF = BackOff(0.2, 10.0, jitter=True)


@dataclass
class CallCount:
    """Requests that were sent, repeated ones included, and those of them without a usable
    answer."""

    made: int = 0
    failed: int = 0


class RagClient:
    """Asks one RAG for one tenant; belongs to one event loop."""

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
        self._rag = rag
        self._url = address_of(rag, url)
        self._tenant_id = tenant_id
        self._with_passage = with_passage
        self._limits = Limits(rag.concurrency)
        self._client = httpx2.AsyncClient(
            limits=httpx2.Limits(max_connections=rag.concurrency),
            timeout=rag.timeout_s,
            headers=authorization(rag),
            trust_env=uses_proxy(url),
        )
        self._keeps_answers = False
        self._kept_answers: dict[tuple[str, str | None], Retrieved] = {}
        self.call_count = 0
        self.failed_count = 0
        self.transient_failures = 0

    def keep_answers(self) -> None:
        """Ask nothing again from now on that was answered."""
        self._keeps_answers = True

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
        key = (query, rewritten_query)
        if key in self._kept_answers:
            return self._kept_answers[key]
        body = request_body(self._rag, self._tenant_id, query, rewritten_query)
        texts = (query, rewritten_query or "")
        call_count = count or CallCount()
        if max_retries is None:
            max_retries = self._rag.max_retries
        try:
            retrieved = await with_retries(
                lambda: self._post(body, texts, call_count), max_retries, _BACK_OFF
            )
        except RetrievalError as error:
            self.transient_failures += error.transient
            raise
        if self._keeps_answers:
            self._kept_answers[key] = retrieved
        return retrieved

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(
        self, body: dict[str, Any], texts: Sequence[str], count: CallCount
    ) -> Retrieved:
        """Send one request and read its answer; no message quotes `texts`, the query and its
        rewrite."""
        start_s = 0.0
        try:
            async with self._limits.slot(1):
                self.call_count += 1
                count.made += 1
                start_s = time.perf_counter()
                response = await self._respond(body, texts)
            retrieved = read_answer(
                self._rag,
                response.content,
                self._url,
                response.headers.get("content-type", ""),
                texts,
                with_passage=self._with_passage,
            )
        except RetrievalError as error:
            self.failed_count += 1
            count.failed += 1
            self._trace(texts, start_s, failure=error.reason)
            raise
        self._trace(texts, start_s, retrieved)
        return retrieved

    def _trace(
        self,
        texts: Sequence[str],
        start_s: float,
        retrieved: Retrieved | None = None,
        failure: str = "",
    ) -> None:
        latency_ms = 1000 * (time.perf_counter() - start_s)
        passages = None
        if retrieved is not None:
            passages = [
                {"id": id_, "page_content": title, "metadata": {"score": score}}
                for id_, title, score in zip(
                    retrieved.ids, retrieved.titles, retrieved.scores, strict=True
                )
            ]
        # Without the request's constants and headers: they may hold the service's key.
        query, rewritten_query = texts
        self._traced.add(
            "\x1f".join(("rag", query, rewritten_query)),
            "rag",
            "RETRIEVER",
            {"query": query, "rewritten_query": rewritten_query},
            passages,
            failure=failure,
            latency_ms=latency_ms,
        )

    async def _respond(self, body: dict[str, Any], texts: Sequence[str]) -> httpx2.Response:
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
            raise RetrievalError(
                f"rag {self._url}: HTTP {status}",
                "rag_unavailable",
                transient=True,
                retry_after_s=retry_after_s(response.headers),
            )
        self._limits.answered(response.headers, 1, 1)
        if status >= 300:
            said = shown(without_texts(response.text, texts), 120)
            raise RetrievalError(f"rag {self._url}: HTTP {status}: {said}", "rag_refused")
        return response


def address_of(rag: Rag, url: str) -> str:
    return url.replace("{kb_name}", quote(rag.kb_name, safe=""))


def authorization(rag: Rag) -> dict[str, str]:
    """The header that carries the service's key, where it wants one."""
    if rag.api_key_env is None:
        return {}
    key = require_secret(rag.api_key_env, "rag")
    return {rag.mapping.key_header: f"{rag.mapping.key_prefix}{key}"}


def request_body(
    rag: Rag, tenant_id: str, query: str, rewritten_query: str | None = None
) -> dict[str, Any]:
    """The JSON object that is posted.

    Texts are put in as JSON values, so that none of them can change the request's shape.
    """
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
    """The template with a value in place of each placeholder."""
    if isinstance(template, list):
        return [_filled(part, values) for part in template]
    if isinstance(template, dict):
        filled = {}
        for key, part in template.items():
            # Without a rewrite its field is left out, so that a service that does not know it sees
            # nothing new.
            is_absent = isinstance(part, str) and values.get(part, part) is None
            if not is_absent:
                filled[key] = _filled(part, values)
        return filled
    if isinstance(template, str):
        return values.get(template, template)
    return template
