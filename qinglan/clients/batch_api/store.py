"""What the ledger knows of batches: which there are, whose requests they hold, and which process owns them.

A batch's life: `submitting` before anything is sent, `submitted` once its id is known, `merged` when its answers are
kept or it never came to be. The claims on its requests are the batch's own and outlive every process; the lock on the
batch itself dies with the process that owns it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import ParamSpec, TypeVar

from qinglan.clients.batch_api.service import Result
from qinglan.clients.chat import Account, Request
from qinglan.errors import LedgerError
from qinglan.ledger import BATCH, BatchJob, Ledger
from qinglan.runs.artifacts import hash_of

_HEARTBEAT_S = 15.0
P = ParamSpec("P")
T = TypeVar("T")


def batch_server(server: str, model: str) -> str:
    """The name under which the ledger keeps the batches of one model on one service."""
    return f"{server} {model}"


class BatchStore:
    """The batches of one model on one service; every change is committed on return."""

    def __init__(self, ledger: Ledger, account: Account, server: str) -> None:
        self._ledger, self._account = ledger, account
        self._server = batch_server(server, account.model)
        self._locked: set[str] = set()
        self.reasons: Counter[str] = Counter()
        """Of the failures recorded here."""

    async def open_jobs(self) -> list[BatchJob]:
        """Batches that are not merged yet."""
        return await _to_the_end(self._ledger.open_batches, self._server, self._account.role)

    async def reread(self, job: BatchJob) -> BatchJob | None:
        """The batch as another process may have changed it; None if it is merged."""
        return next((each for each in await self.open_jobs() if each.digest == job.digest), None)

    async def begin(self, requests: Sequence[Request]) -> BatchJob:
        """A locked job of those requests that no other process sends; nothing is sent yet.

        Killed at any point in here it leaves a job that `close` ends without harm.
        """
        hashes = [request.request_hash for request in requests]
        job = BatchJob(
            digest=hash_of(self._account.run_id, time.time_ns(), hashes),
            server=self._server,
            role=self._account.role,
            status="submitting",
            request_hashes=hashes,
            created_s=time.time(),
        )
        await self.lock(job)
        await self.save(job)
        claimed = await _to_the_end(self._ledger.claim, hashes, BATCH + job.digest)
        return await self.save(job, request_hashes=[each for each in hashes if each in claimed])

    async def save(self, job: BatchJob, **changes: object) -> BatchJob:
        """The job with these changes."""
        job = job.model_copy(update=changes)
        await _to_the_end(self._ledger.save_batch, job)
        return job

    async def keep(self, results: Sequence[Result]) -> None:
        """Record answers at the batch API's price; again, after a kill, it changes nothing."""
        known = await _to_the_end(self._ledger.get_many, [each.request_hash for each in results])
        new = [each for each in results if each.request_hash not in known]
        account, factor = self._account, self._account.price.batch_factor
        calls = [account.call(each.request_hash, each.completion, None, factor) for each in new if each.completion]
        await _to_the_end(self._ledger.record, calls)

    async def close(self, job: BatchJob, failures: Mapping[str, str] | None = None) -> None:
        """The batch is done with; its requests, these by hash with their reason among them, are free again."""
        entries = [self._account.failure(each, reason) for each, reason in (failures or {}).items()]
        await _to_the_end(self._ledger.record, [], entries)
        self.reasons.update(entry.reason for entry in entries)
        await _to_the_end(self.forget, job)

    def forget(self, job: BatchJob) -> None:
        """As `close`, without failures and at once, for where nothing can be awaited."""
        self._ledger.release(job.request_hashes, BATCH + job.digest)
        self._ledger.save_batch(job.model_copy(update={"status": "merged"}))

    async def release(self, job: BatchJob) -> None:
        """Let others ask what a batch holds that is still open."""
        # Only the batch's own claims: killed in `begin`, it may list requests that another process holds.
        await _to_the_end(self._ledger.release, job.request_hashes, BATCH + job.digest)

    async def lock(self, job: BatchJob) -> bool:
        """Be the one process that owns a batch, until `hold_locks` ends."""
        name = f"batch-lock:{job.digest}"

        def claim() -> None:
            self._ledger.heartbeat()
            self._locked |= self._ledger.claim([name], self._ledger.holder)

        if name not in self._locked:
            await _to_the_end(claim)
        return name in self._locked

    @asynccontextmanager
    async def hold_locks(self) -> AsyncIterator[None]:
        """Keep locks alive within, and give them up at the end."""
        stop = asyncio.Event()
        beating = asyncio.create_task(self._beat(stop))
        try:
            yield
        finally:
            stop.set()
            await beating
            self._ledger.release(self._locked)

    async def _beat(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            with suppress(LedgerError):  # a call that needs the ledger for more raises it
                await _to_the_end(self._ledger.heartbeat)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _HEARTBEAT_S)


async def _to_the_end(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """In a thread, and finished even if cancelled meanwhile: nobody closes the ledger under a write."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        working.exception()  # retrieved, or asyncio would log it
        raise
