"""The batches as the ledger knows them.

The claims on a batch's requests are the batch's own and outlive every process; the lock on the
batch itself dies with the process that owns it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf

from qinglan.clients.batch_api.service import Result
from qinglan.clients.completions import Account, Request, most_usd, unanswered
from qinglan.config import Price
from qinglan.errors import LedgerError
from qinglan.ledger import BATCH, BatchJob, Call, Failure, Ledger
from qinglan.ledger.queue import send_heartbeats, to_the_end
from qinglan.runs.artifacts import hash_of


def batch_server(server: str, model: str) -> str:
    """The name under which the ledger keeps the batches of one model on one service."""
    return f"{server} {model}"


class BatchStore:
    """The batches of one model on one service; every change is committed on return."""

    def __init__(
        self, ledger: Ledger, account: Account, server: str, requests: Mapping[str, Request]
    ) -> None:
        full_price = account.price
        price = Price(
            input_per_million_usd=full_price.batch_factor * full_price.input_per_million_usd,
            output_per_million_usd=full_price.batch_factor * full_price.output_per_million_usd,
        )
        self._ledger = ledger
        self._account = replace(account, price=price)
        self._server = batch_server(server, account.model)
        self._requests = requests
        # Another call's questions are not known here: each is taken to be as long as the longest of
        # this one's.
        empty = Request("", {"messages": []})
        self._longest = max(
            requests.values(), key=lambda request: most_usd(request, price), default=empty
        )
        self._locked: set[str] = set()
        self.reasons: Counter[str] = Counter()
        """Reasons of the failures recorded here."""
        self._failed = set[str]()
        """Paid lines without an answer, recorded here: they come again where a batch's files are
        read again."""

    async def open_jobs(self) -> list[BatchJob]:
        return await to_the_end(
            self._ledger.open_batches, server=self._server, role=self._account.role
        )

    async def reread(self, job: BatchJob) -> BatchJob | None:
        """The batch as another process may have changed it; None if it is merged."""
        for open_job in await self.open_jobs():
            if open_job.digest == job.digest:
                return open_job
        return None

    async def begin(self, requests: Sequence[Request]) -> BatchJob:
        """A locked job of those requests that no other process sends; one that a kill in here
        leaves is harmless."""
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
        claimed = await to_the_end(self._ledger.claim, hashes, BATCH + job.digest)
        claimed_in_order = [request_hash for request_hash in hashes if request_hash in claimed]
        return await self.save(job.with_requests(claimed_in_order))

    async def save(self, job: BatchJob) -> BatchJob:
        """Commit the job; returns it."""
        await to_the_end(self._ledger.save_batch, job)
        return job

    async def keep(self, results: Sequence[Result]) -> None:
        """Record what was paid for, at the batch API's price; for nothing where it was bought
        elsewhere meanwhile."""
        calls_in_ledger = await to_the_end(
            self._ledger.get_many, [result.request_hash for result in results]
        )
        answers: list[Call] = []
        failures: list[Failure] = []
        for result in results:
            earlier = calls_in_ledger.get(result.request_hash)
            # Before a kill, or when the batch's files were read before: answers of batches have no
            # latency.
            is_recorded = result.request_hash in self._failed or (
                earlier is not None and earlier.latency_ms is None
            )
            if result.billed is None or is_recorded:
                continue
            entry = self._entry(result, result.billed, is_late=earlier is not None)
            if isinstance(entry, Call):
                answers.append(entry)
            else:
                failures.append(entry)
        self.reasons.update(
            failure.reason for failure in failures if failure.reason != "batch_late"
        )
        await to_the_end(self._ledger.record, answers, failures)
        self._failed.update(failure.request_hash for failure in failures)

    def _entry(self, result: Result, billed: bytes, *, is_late: bool) -> Call | Failure:
        """The ledger's entry for a line that was paid for; `is_late` where the answer was bought
        elsewhere meanwhile."""
        known_or_longest = self._requests.get(result.request_hash, self._longest)
        request = replace(known_or_longest, request_hash=result.request_hash)
        if is_late:
            return self._account.failure(request, "batch_late", billed)
        if result.completion is None:
            return self._account.failure(request, result.reason, billed)
        call = self._account.call(request, result.completion, None)
        reason = unanswered(call)
        if reason:
            return self._account.failure(request, reason, billed)
        return call

    async def close(self, job: BatchJob, failures: Mapping[str, str] | None = None) -> None:
        """End the batch: its requests are free again.

        Args:
            failures: reasons, by hash, of those requests that got no answer.
        """
        entries = [
            self._account.failure(Request(request_hash, {}), reason, may_be_paid=False)
            for request_hash, reason in (failures or {}).items()
        ]
        await to_the_end(self._ledger.record, [], entries)
        self.reasons.update(entry.reason for entry in entries)
        await to_the_end(self.end, job)

    def end(self, job: BatchJob) -> None:
        """End the batch without failures and at once, for where nothing can be awaited."""
        self._ledger.end_batch(job)

    async def release(self, job: BatchJob) -> None:
        """Let others ask what a batch holds that is still open."""
        # Only the batch's own claims: killed in `begin`, it may list requests that another process
        # holds.
        await to_the_end(self._ledger.release, job.request_hashes, BATCH + job.digest)

    async def lock(self, job: BatchJob, until_s: float = inf) -> bool:
        """Be the one process that owns a batch, until `hold_locks` ends; LedgerError where it can't
        after `until_s`."""
        name = f"batch-lock:{job.digest}"

        def claim() -> None:
            self._ledger.heartbeat()
            self._locked |= self._ledger.claim([name], self._ledger.holder)

        if name not in self._locked:
            await to_the_end(claim)
        if name not in self._locked and time.time() > until_s:
            holder, advice = await to_the_end(self._ledger.claimed_by, name)
            raise LedgerError(
                f"batch {job.batch_id or '(new)'} is held by {holder}, which does not merge it; "
                f"{advice}"
            )
        return name in self._locked

    @asynccontextmanager
    async def hold_locks(self) -> AsyncIterator[None]:
        """Keep locks alive within, and give them up at the end."""
        beating = asyncio.create_task(send_heartbeats(self._ledger))
        try:
            yield
        finally:
            beating.cancel()
            await asyncio.wait([beating])
            self._ledger.release(self._locked, self._ledger.holder)
