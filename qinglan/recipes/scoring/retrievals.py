"""What the RAG found for samples: from memory, from the ledger, or from the service; never asked for twice at once."""

import asyncio
from contextlib import suppress

from qinglan.clients.rag import CallCount, RagClient, request_body
from qinglan.errors import LedgerError
from qinglan.ledger import Ledger, Retrieval
from qinglan.ledger.queue import LedgerQueue
from qinglan.recipes.scoring.outages import Patience
from qinglan.recipes.scoring.service import Baseline, RewardService
from qinglan.rows import Retrieved
from qinglan.runs.artifacts import hash_of

_IN_MEMORY = 20_000


class Retrievals:
    """The RAG's answers within a scope, where the same request has the same answer. Belongs to one event loop."""

    def __init__(
        self, service: RewardService, rag: RagClient, ledger: Ledger, queue: LedgerQueue, patience: Patience
    ) -> None:
        self._service, self._rag, self._queue, self._patience = service, rag, queue, patience
        assert service.rag is not None, "who retrieves has a RAG"
        self._settings = service.rag
        self._kept = ledger.retrieval_keys(service.retrieval_scope)
        self._recent: dict[str, Retrieved] = {}
        self._under_way: dict[str, asyncio.Task[tuple[Retrieved, bool]]] = {}

    async def find(self, baseline: Baseline, rewrite: str, count: CallCount) -> tuple[Retrieved, bool]:
        """What a rewrite retrieves, and whether it was known or asked for already.

        Args:
            count: is told the calls that this took, those to find out whether the service is down among them.

        Raises:
            RetrievalError: the RAG refuses this request, or failed it again and again while it answers others.
            OutageError: the RAG was down for too long.
        """
        key = self._key(baseline.question, rewrite)
        if key in self._recent:
            return self._recent[key], True
        joined = key in self._under_way
        found, stored = await asyncio.shield(self._under_way.get(key) or self._start(key, baseline, rewrite, count))
        return found, joined or stored

    async def close(self) -> None:
        """Drop what is under way."""
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _key(self, question: str, rewrite: str) -> str:
        """By the configured address, as that of an embedded RAG is another one in every run, and by what is kept."""
        rag = self._settings
        body = request_body(rag, self._service.tenant.id, question, rewrite)
        return hash_of(self._service.retrieval_scope, rag.url, sorted(Retrieved.model_fields), body)

    def _start(
        self, key: str, baseline: Baseline, rewrite: str, count: CallCount
    ) -> "asyncio.Task[tuple[Retrieved, bool]]":
        task = self._under_way[key] = asyncio.create_task(self._fetch(key, baseline, rewrite, count))
        task.add_done_callback(lambda _: self._under_way.pop(key))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _fetch(self, key: str, baseline: Baseline, rewrite: str, count: CallCount) -> tuple[Retrieved, bool]:
        found = await self._stored(key) if key in self._kept else None
        if found is not None:
            self._remember(key, found)
            return found, True
        question, answered_before = baseline.question, baseline.teacher_rewrite or None
        found = await self._patience.call(
            lambda: self._rag.retrieve(question, rewrite, count=count),
            probe=lambda: self._rag.retrieve(question, answered_before, count=count, max_retries=0),
        )
        self._queue.keep_retrieval(Retrieval(key=key, scope=self._service.retrieval_scope, found=found))
        self._kept.add(key)
        self._remember(key, found)
        return found, False

    async def _stored(self, key: str) -> Retrieved | None:
        with suppress(LedgerError):  # then the RAG is asked again
            return await self._queue.find_retrieval(key)
        return None

    def _remember(self, key: str, found: Retrieved) -> None:
        self._recent[key] = found
        if len(self._recent) > _IN_MEMORY:
            self._recent.pop(next(iter(self._recent)))
