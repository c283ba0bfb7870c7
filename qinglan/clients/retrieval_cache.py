"""The RAG's answers from memory, from the ledger, or from the service, which is waited for.

A cache belongs to one event loop. Within its scope the same request has the same answer.
"""

import asyncio
from contextlib import suppress
from typing import NamedTuple

from qinglan.clients.outages import OutageWait
from qinglan.clients.rag import CallCount, RagClient, request_body
from qinglan.config import Rag
from qinglan.errors import LedgerError
from qinglan.ledger import Ledger, Retrieval
from qinglan.ledger.queue import LedgerQueue
from qinglan.rows import Retrieved
from qinglan.runs.artifacts import hash_of

_MAX_IN_MEMORY = 20_000


class CachedRetrieval(NamedTuple):
    """The RAG's answer, and whether it was known or asked for already."""

    retrieved: Retrieved
    is_cached: bool


class RetrievalCache:
    """Asks the RAG nothing twice, and waits while it is down."""

    def __init__(
        self,
        rag: RagClient,
        settings: Rag,
        tenant_id: str,
        scope: str,
        ledger: Ledger,
        queue: LedgerQueue,
        wait: OutageWait,
    ) -> None:
        """Open the cache.

        Args:
            scope: where answers hold: one run, or one state of a knowledge base.
            queue: keeps new answers in the ledger.
        """
        self._rag = rag
        self._settings = settings
        self._tenant_id = tenant_id
        self._scope = scope
        self._queue = queue
        self._wait = wait
        self._keys_in_ledger = ledger.retrieval_keys(scope)
        self._recent: dict[str, Retrieved] = {}
        self._under_way: dict[str, asyncio.Task[CachedRetrieval]] = {}

    async def retrieve(
        self,
        query: str,
        rewrite: str | None,
        count: CallCount,
        answered_rewrite: str | None = None,
    ) -> CachedRetrieval:
        """The passages for a query, or for its rewrite where one is given.

        Args:
            count: counts the calls that this takes, with those that check whether the service is
                down.
            answered_rewrite: a rewrite of the query that the service answered before, to check with
                whether it is down.
        """
        key = self._key(query, rewrite)
        if key in self._recent:
            return CachedRetrieval(self._recent[key], is_cached=True)
        is_under_way = key in self._under_way
        if not is_under_way:
            fetch = self._fetch(key, query, rewrite, count, answered_rewrite)
            task = asyncio.create_task(fetch)
            self._under_way[key] = task
            task.add_done_callback(lambda _: self._under_way.pop(key))
            # Reads the error of a task for which nobody waits any more, or asyncio would log it.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A cancelled caller must not cancel the request for the others.
        answer = await asyncio.shield(self._under_way[key])
        return CachedRetrieval(answer.retrieved, is_cached=is_under_way or answer.is_cached)

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _key(self, query: str, rewrite: str | None) -> str:
        body = request_body(self._settings, self._tenant_id, query, rewrite)
        # The configured address, as that of an embedded RAG differs between runs; and the fields
        # that are stored.
        stored_fields = sorted(Retrieved.model_fields)
        return hash_of(self._scope, self._settings.answer_key, stored_fields, body)

    async def _fetch(
        self,
        key: str,
        query: str,
        rewrite: str | None,
        count: CallCount,
        answered_rewrite: str | None,
    ) -> CachedRetrieval:
        retrieved = None
        if key in self._keys_in_ledger:
            # Where the ledger can't be read, the RAG is asked again.
            with suppress(LedgerError):
                retrieved = await self._queue.find_retrieval(key)
        is_stored = retrieved is not None
        if retrieved is None:
            retrieved = await self._wait.call(
                lambda: self._rag.retrieve(query, rewrite, count=count),
                probe=lambda: self._rag.retrieve(
                    query, answered_rewrite, count=count, max_retries=0
                ),
            )
            self._queue.keep_retrieval(Retrieval(key=key, scope=self._scope, found=retrieved))
            self._keys_in_ledger.add(key)
        self._remember(key, retrieved)
        return CachedRetrieval(retrieved, is_cached=is_stored)

    def _remember(self, key: str, retrieved: Retrieved) -> None:
        self._recent[key] = retrieved
        if len(self._recent) > _MAX_IN_MEMORY:
            oldest_key = next(iter(self._recent))
            self._recent.pop(oldest_key)
