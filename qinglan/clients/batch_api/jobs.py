"""The batches of one call of the batch API: its own, and those that others left behind, as the
ledger knows them.

A batch's states: `submitting` before anything is sent, `creating` when it is asked for, `submitted`
once its id is known, `merged` when its answers are kept or it never came to be. The claims on its
requests are the batch's own and outlive every process; the lock on the batch itself dies with the
process that owns it.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from qinglan.clients.batch_api.service import ENDED, BatchService, BatchState, Result
from qinglan.clients.chat import Account, Request, most_usd, unanswered
from qinglan.clients.limits import with_retries
from qinglan.config import BatchApi, Price
from qinglan.errors import ConfigError, LedgerError, TeacherError
from qinglan.ledger import BATCH, BatchJob, Call, Failure, Ledger
from qinglan.ledger.queue import send_heartbeats, to_the_end
from qinglan.runs.artifacts import hash_of
from qinglan.runs.back_off import BackOff

CREATED_WITHIN_S = 600.0
"""A batch that is not listed this long after it was asked for was never created. No service
promises a time: this is much longer than proxies usually keep a request, and short beside the day
that a batch may take."""
_CONFIRM_AFTER_S = 5.0
"""Look a second time, or repeat a request that was refused, after this."""
_SHORT_AT_MOST = 3
"""How often files with fewer lines than the service counted are read."""
_LINES_PER_COMMIT = 500
_CANCEL_WITHIN_S = 900.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchProgress:
    """How far the batches are that this call waits for."""

    batches: int
    completed: int
    failed: int
    total: int


def batch_server(server: str, model: str) -> str:
    """The name under which the ledger keeps the batches of one model on one service."""
    return f"{server} {model}"


class BatchStore:
    """The batches of one model on one service; every change is committed on return."""

    def __init__(
        self, ledger: Ledger, account: Account, server: str, requests: Mapping[str, Request]
    ) -> None:
        full, share = account.price, account.price.batch_factor
        input_usd, output_usd = (
            share * full.input_per_million_usd,
            share * full.output_per_million_usd,
        )
        price = Price(input_per_million_usd=input_usd, output_per_million_usd=output_usd)
        self._ledger, self._account, self._requests = (
            ledger,
            replace(account, price=price),
            requests,
        )
        # Another call's questions are not known here: each is taken to be as long as the longest of
        # this one's.
        empty = Request("", {"messages": []})
        self._longest = max(
            requests.values(), key=lambda request: most_usd(request, price), default=empty
        )
        self._server = batch_server(server, account.model)
        self.end = ledger.end_batch
        """As `close`, without failures and at once, for where nothing can be awaited."""
        self._locked: set[str] = set()
        self.reasons: Counter[str] = Counter()
        """Of the failures recorded here."""
        self._failed = set[str]()
        """Paid lines without an answer, recorded here: they come again where a batch's files are
        read again."""

    async def open_jobs(self) -> list[BatchJob]:
        return await to_the_end(
            self._ledger.open_batches, server=self._server, role=self._account.role
        )

    async def reread(self, job: BatchJob) -> BatchJob | None:
        """The batch as another process may have changed it; None if it is merged."""
        return next((each for each in await self.open_jobs() if each.digest == job.digest), None)

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
        return await self.save(job, request_hashes=[each for each in hashes if each in claimed])

    async def save(self, job: BatchJob, **changes: object) -> BatchJob:
        """The job with these changes."""
        job = job.model_copy(update=changes)
        await to_the_end(self._ledger.save_batch, job)
        return job

    async def keep(self, results: Sequence[Result]) -> None:
        """Record what was paid for, at the batch API's price; for nothing where it was bought
        elsewhere meanwhile."""
        known = await to_the_end(self._ledger.get_many, [each.request_hash for each in results])
        answers, failures = list[Call](), list[Failure]()
        for each in results:
            before = known.get(each.request_hash)
            is_recorded = each.request_hash in self._failed or (
                before and before.latency_ms is None
            )
            if (
                each.billed is None or is_recorded
            ):  # before a kill, or when the batch's files were read before
                continue
            known_or_longest = self._requests.get(each.request_hash, self._longest)
            request = replace(known_or_longest, request_hash=each.request_hash)
            call = self._account.call(request, each.completion, None) if each.completion else None
            reason = "batch_late" if before else unanswered(call) if call else each.reason
            if reason:
                failures.append(self._account.failure(request, reason, each.billed))
            elif call:
                answers.append(call)
        self.reasons.update(
            failure.reason for failure in failures if failure.reason != "batch_late"
        )
        await to_the_end(self._ledger.record, answers, failures)
        self._failed.update(failure.request_hash for failure in failures)

    async def close(self, job: BatchJob, failures: Mapping[str, str] | None = None) -> None:
        """The batch is done with; its requests, these by hash with their reason among them, are
        free again."""
        failed = partial(self._account.failure, may_be_paid=False)
        entries = [failed(Request(each, {}), reason) for each, reason in (failures or {}).items()]
        await to_the_end(self._ledger.record, [], entries)
        self.reasons.update(entry.reason for entry in entries)
        await to_the_end(self.end, job)

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
            who, advice = await to_the_end(self._ledger.claimed_by, name)
            raise LedgerError(
                f"batch {job.batch_id or '(new)'} is held by {who}, which does not merge it; {advice}"
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


class BatchJobs:
    """Sends batches, waits for them, merges them."""

    def __init__(
        self,
        service: BatchService,
        store: BatchStore,
        settings: BatchApi,
        on_progress: Callable[[BatchProgress], None],
    ) -> None:
        self._service, self._store, self._settings, self._on_progress = (
            service,
            store,
            settings,
            on_progress,
        )
        self._pause = BackOff(min(_CONFIRM_AFTER_S, settings.poll_every_s), _CONFIRM_AFTER_S)
        self._uploading = asyncio.Semaphore(1)
        self._progress: dict[str, tuple[int, int, int]] = {}
        self._given_up: set[str] = set()
        self._short: Counter[str] = Counter()
        self.tried: set[str] = set()
        """Requests that were sent, or that the service did not take: not to be sent again."""

    async def adopt(self) -> list[BatchJob]:
        """Open batches; those that never came to be are closed, so that their requests can be sent
        anew."""
        open_jobs = [
            job for job in await self._store.open_jobs() if job.digest not in self._given_up
        ]
        return [there for job in open_jobs if (there := await self._there(job))]

    async def run(
        self, adopted: Iterable[BatchJob], ours: Set[str], chunks: Iterable[Sequence[Request]]
    ) -> None:
        """Send the chunks and wait; of the adopted batches only for those that hold requests of
        `ours`."""
        try:
            async with asyncio.TaskGroup() as group:
                for job in adopted:
                    group.create_task(
                        self._resume(job, wait=not ours.isdisjoint(job.request_hashes))
                    )
                for chunk in chunks:
                    group.create_task(self._send(chunk))
        except BaseExceptionGroup as errors:  # the first error ended the others
            raise errors.exceptions[0] from None

    async def _there(self, job: BatchJob) -> BatchJob | None:
        if job.status == "submitted" or not await self._store.lock(job):
            return job
        fresh = await self._store.reread(job)
        if fresh is None or fresh.status == "submitted":
            return fresh
        with suppress(TeacherError):  # no news: `_follow` asks again
            if located := await self._locate(fresh):
                return located
            await self._store.close(fresh)
            return None
        return fresh

    async def _locate(self, job: BatchJob) -> BatchJob | None:
        """Find a batch whose id was not stored, after a kill or a lost answer; None if it was never
        created."""
        confirmed_s = time.time() + self._pause.first_s
        sure_s = max(
            confirmed_s, job.created_s + CREATED_WITHIN_S if job.status == "creating" else 0.0
        )
        if sure_s > confirmed_s:
            what, minutes = f"batch of {len(job.request_hashes):,} requests", CREATED_WITHIN_S / 60
            _LOG.warning(
                "%s: the service did not confirm it; it is looked for up to %.0f minutes",
                what,
                minutes,
            )
        while not (found := await self._service.find(job.digest, job.created_s)):
            left_s = sure_s - time.time()
            if left_s <= 0:
                return None
            await asyncio.sleep(min(self._settings.poll_every_s, left_s))  # a list may lag behind
        return await self._store.save(job, status="submitted", batch_id=found.id)

    async def _resume(self, job: BatchJob, *, wait: bool) -> None:
        give_up_s = max(time.time(), job.created_s + 3600 * self._settings.give_up_after_h)
        until_s = (
            give_up_s + 2 * _CANCEL_WITHIN_S
        )  # by then its owner has merged it or given it up, unless it hangs
        if wait and not await self._store.lock(job):  # a living process owns it
            _LOG.warning(
                "batch %s is followed by another process, which is waited for",
                job.batch_id or "(new)",
            )
        while not await self._store.lock(job, until_s):
            if not wait:
                return
            await asyncio.sleep(self._settings.poll_every_s)
        if fresh := await self._store.reread(job):
            await self._follow(fresh, wait=wait)

    async def _send(self, requests: Sequence[Request]) -> None:
        async with self._uploading:
            job, file_id = await self._submit(requests)
        with suppress(TeacherError):  # no news: nothing is created, and `_follow` asks again
            for _ in range(self._service.retries):
                if job and not job.batch_id:
                    job = await self._locate(job) or await self._create(job, file_id)
        if job:
            await self._follow(job, wait=True)

    async def _submit(self, requests: Sequence[Request]) -> tuple[BatchJob | None, str]:
        """As `_create`; and the input file's id."""
        job = await self._store.begin(requests)
        claimed = set(job.request_hashes)
        self.tried |= claimed
        if not claimed:
            await self._store.close(job)
            return None, ""
        try:
            file_id = await self._service.upload(
                each for each in requests if each.request_hash in claimed
            )
        except TeacherError as error:
            await self._store.close(job, dict.fromkeys(job.request_hashes, error.reason))
            return None, ""
        except BaseException:  # the next call need not search for it
            self._store.end(job)
            raise
        return await self._create(job, file_id), file_id

    async def _create(self, job: BatchJob, file_id: str) -> BatchJob | None:
        """The job, without a batch's id where only `_locate` can tell whether there is one; None if
        there is none."""

        async def create() -> str:
            nonlocal job
            job = await self._store.save(job, status="creating", created_s=time.time())
            return await self._service.create(job.digest, file_id)

        try:
            batch_id = await with_retries(create, self._service.retries, self._pause)
        except (TeacherError, ConfigError) as error:
            if isinstance(error, TeacherError) and error.transient and error.retry_after_s is None:
                return await self._store.save(
                    job, created_s=time.time()
                )  # until now it was under way
            await self._service.delete_file(file_id)
            if isinstance(error, ConfigError):
                raise
            await self._store.close(job, dict.fromkeys(job.request_hashes, error.reason))
            return None
        return await self._store.save(job, status="submitted", batch_id=batch_id)

    async def _follow(self, job: BatchJob, *, wait: bool) -> None:
        """Ask for the state of a batch until it has ended and its answers are merged."""
        give_up_s = job.created_s + 3600 * self._settings.give_up_after_h
        cancelled_s: float | None = None
        while True:
            with suppress(TeacherError):  # no news; the next request may bring some
                if not job.batch_id:
                    job = await self._locate(job) or job
                state = await self._service.state(job.batch_id) if job.batch_id else None
                if state is None and not job.batch_id:
                    return await self._store.close(
                        job, dict.fromkeys(job.request_hashes, "batch_not_created")
                    )
                if state is None and not wait:
                    return None
                if state is None:
                    raise ConfigError(
                        f"{job.role}: the service knows no batch {job.batch_id}, which has {len(job.request_hashes):,} "
                        "requests: it is another account's, or deleted. Set the key that it was sent with; or `qinglan "
                        f"ledger drop {job.batch_id}`, and what it was asked is bought again"
                    )
                self._progress[job.digest] = (*state.counts, len(job.request_hashes))
                completed, failed, total = map(sum, zip(*self._progress.values(), strict=True))
                self._on_progress(BatchProgress(len(self._progress), completed, failed, total))
                if state.status in ENDED:
                    return await self._merge(job, state)
            if not wait:
                return None
            if cancelled_s is None and time.time() > give_up_s:
                cancelled_s = time.time()
                if job.batch_id:
                    with suppress(TeacherError):
                        await self._service.cancel(job.batch_id)
            elif cancelled_s and time.time() > cancelled_s + _CANCEL_WITHIN_S:
                self._given_up.add(
                    job.digest
                )  # the batch stays open: a later call merges what it brings after all
                self._store.reasons["batch_late"] += len(job.request_hashes)
                return await self._store.release(job)
            await asyncio.sleep(self._settings.poll_every_s)

    async def _merge(self, job: BatchJob, state: BatchState) -> None:
        """Answers and failures into the ledger; TeacherError also where files lack lines that were
        counted."""
        failures, failed_lines = dict.fromkeys(job.request_hashes, state.missing_reason), set[str]()

        async def keep(results: Iterable[Result]) -> None:
            ours = [each for each in results if each.request_hash in failures]
            await self._store.keep(ours)
            for result in ours:
                if result.billed is not None:
                    del failures[result.request_hash]
                else:
                    failures[result.request_hash] = result.reason
                    failed_lines.add(result.request_hash)

        flaw = ""
        result_files = [each for each in (state.output_file_id, state.error_file_id) if each]
        for file_id in result_files:
            portion: dict[str, Result] = {}  # the last of each request where it comes twice
            try:
                async for result in self._service.results(file_id):
                    portion[result.request_hash] = result
                    if len(portion) == _LINES_PER_COMMIT:
                        await keep(portion.values())
                        portion = {}
            except TeacherError as error:  # the file is missing, or has a line without end
                if error.transient:
                    raise
                flaw = str(error)
            await keep(portion.values())
        answered, failed, counted = (
            len(job.request_hashes) - len(failures),
            len(failed_lines),
            state.counts,
        )
        # By kind, not by file: some services write all lines into one. One that writes no failures
        # has no error file.
        if not flaw and (answered < counted[0] or (state.error_file_id and failed < counted[1])):
            flaw = "its files hold {:,} answers and {:,} failures, where the service counts {:,} and {:,}"
            flaw = flaw.format(answered, failed, *counted)
            self._short[job.digest] += 1
            if self._short[job.digest] < _SHORT_AT_MOST:
                raise TeacherError(flaw, "batch_short", transient=True)
        await self._store.close(job, failures)
        if flaw:
            _LOG.warning("batch %s: %s; its files stay there", state.id, flaw)
            return
        for file_id in filter(None, (*result_files, state.input_file_id)):
            await self._service.delete_file(file_id)
