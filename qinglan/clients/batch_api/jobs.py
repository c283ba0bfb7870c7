"""The batches of one call of the batch API: its own, and those that others left behind.

A batch's states: `submitting` before anything is sent, `creating` when it is asked for, `submitted`
once its id is known, `merged` when its answers are kept or it never came to be.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from qinglan.clients.batch_api.service import ENDED, BatchService, BatchState, Result
from qinglan.clients.batch_api.store import BatchStore
from qinglan.clients.completions import Request
from qinglan.clients.limits import with_retries
from qinglan.config import BatchApi
from qinglan.errors import ConfigError, TeacherError
from qinglan.ledger import BatchJob
from qinglan.runs.back_off import BackOff

CREATED_WITHIN_S = 600.0
"""A batch that is not listed this long after it was asked for was never created.

No service promises a time: this is much longer than proxies usually keep a request, and short
beside the day that a batch may take.
"""
_CONFIRM_AFTER_S = 5.0
"""Pause before a second look, or before a request that was refused is repeated."""
_SHORT_AT_MOST = 3
"""Number of times that files with fewer lines than the service counted are read."""
_LINES_PER_COMMIT = 500
_CANCEL_WITHIN_S = 900.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchProgress:
    """State of the batches that this call waits for, and of their requests."""

    batches: int
    completed: int
    failed: int
    total: int


class _Merging:
    """The requests of an ended batch while its files are read."""

    def __init__(self, request_hashes: Sequence[str], missing_reason: str) -> None:
        """`missing_reason` is that of requests that no file mentions."""
        self._count = len(request_hashes)
        self.failures = dict.fromkeys(request_hashes, missing_reason)
        """Reasons by request, of those that have no answer so far."""
        self._failed_lines: set[str] = set()

    @property
    def answered(self) -> int:
        return self._count - len(self.failures)

    @property
    def failed(self) -> int:
        """Requests whose failure a file has."""
        return len(self._failed_lines)

    def add(self, result: Result) -> None:
        if result.billed is not None:
            del self.failures[result.request_hash]
        else:
            self.failures[result.request_hash] = result.reason
            self._failed_lines.add(result.request_hash)

    def lacks_lines(self, state: BatchState) -> bool:
        """Do the files hold fewer lines than the service counts?"""
        # By kind, not by file: some services write all lines into one. One that writes no failures
        # has no error file.
        completed, failed = state.counts
        lacks_failures = bool(state.error_file_id) and self.failed < failed
        return self.answered < completed or lacks_failures


class BatchJobs:
    """Sends batches, waits for them, merges them."""

    def __init__(
        self,
        service: BatchService,
        store: BatchStore,
        settings: BatchApi,
        on_progress: Callable[[BatchProgress], None],
    ) -> None:
        self._service = service
        self._store = store
        self._settings = settings
        self._on_progress = on_progress
        self._pause = BackOff(min(_CONFIRM_AFTER_S, settings.poll_every_s), _CONFIRM_AFTER_S)
        self._uploading = asyncio.Semaphore(1)
        self._progress: dict[str, tuple[int, int, int]] = {}
        """Completed, failed and all requests of each batch that is waited for."""
        self._given_up: set[str] = set()
        self._short: Counter[str] = Counter()
        """Number of times that a batch's files had fewer lines than the service counts."""
        self.tried: set[str] = set()
        """Requests that were sent, or that the service did not take: not to be sent again."""

    async def adopt(self) -> list[BatchJob]:
        """Open batches; those that never came to be are closed, so that their requests can be sent
        anew."""
        adopted: list[BatchJob] = []
        for job in await self._store.open_jobs():
            if job.digest in self._given_up:
                continue
            current_job = await self._adopt(job)
            if current_job:
                adopted.append(current_job)
        return adopted

    async def run(
        self, adopted: Iterable[BatchJob], ours: Set[str], chunks: Iterable[Sequence[Request]]
    ) -> None:
        """Send the chunks and wait; of the adopted batches only for those that hold requests of
        `ours`."""
        try:
            async with asyncio.TaskGroup() as group:
                for job in adopted:
                    has_ours = not ours.isdisjoint(job.request_hashes)
                    group.create_task(self._resume(job, wait=has_ours))
                for chunk in chunks:
                    group.create_task(self._send(chunk))
        except BaseExceptionGroup as errors:
            # The first error ended the others.
            raise errors.exceptions[0] from None

    async def _adopt(self, job: BatchJob) -> BatchJob | None:
        """The open batch as it is now; None where it is merged, or never came to be."""
        if job.status == "submitted" or not await self._store.lock(job):
            return job
        current_job = await self._store.reread(job)
        if current_job is None or current_job.status == "submitted":
            return current_job
        # Without news it stays open, and `_follow` asks again.
        with suppress(TeacherError):
            located = await self._locate(current_job)
            if located is None:
                await self._store.close(current_job)
            return located
        return current_job

    async def _locate(self, job: BatchJob) -> BatchJob | None:
        """Find a batch whose id was not stored, after a kill or a lost answer; None if it was never
        created."""
        confirmed_s = time.time() + self._pause.first_s
        sure_s = confirmed_s
        if job.status == "creating":
            sure_s = max(confirmed_s, job.created_s + CREATED_WITHIN_S)
        if sure_s > confirmed_s:
            _LOG.warning(
                "batch of %s requests: the service did not confirm it; it is looked for up to "
                "%.0f minutes",
                f"{len(job.request_hashes):,}",
                CREATED_WITHIN_S / 60,
            )
        while True:
            batch = await self._service.find(job.digest, job.created_s)
            if batch:
                return await self._store.save(job.submitted(batch.id))
            left_s = sure_s - time.time()
            if left_s <= 0:
                return None
            # The service's list may lag behind.
            await asyncio.sleep(min(self._settings.poll_every_s, left_s))

    async def _resume(self, job: BatchJob, *, wait: bool) -> None:
        give_up_s = max(time.time(), self._give_up_s(job))
        # By then its owner has merged it or given it up, unless it hangs.
        until_s = give_up_s + 2 * _CANCEL_WITHIN_S
        if wait and not await self._store.lock(job):
            _LOG.warning(
                "batch %s is followed by another process, which is waited for",
                job.batch_id or "(new)",
            )
        while not await self._store.lock(job, until_s):
            if not wait:
                return
            await asyncio.sleep(self._settings.poll_every_s)
        current_job = await self._store.reread(job)
        if current_job:
            await self._follow(current_job, wait=wait)

    async def _send(self, requests: Sequence[Request]) -> None:
        # One upload at a time: each may be as large as a service takes.
        async with self._uploading:
            job, file_id = await self._submit(requests)
        # Without news nothing is created, and `_follow` asks again.
        with suppress(TeacherError):
            for _ in range(self._service.retries):
                if job is None or job.batch_id:
                    break
                job = await self._locate(job) or await self._create(job, file_id)
        if job:
            await self._follow(job, wait=True)

    async def _submit(self, requests: Sequence[Request]) -> tuple[BatchJob | None, str]:
        """Upload the requests and create their batch.

        Returns the job as `_create` does, and the input file's id.
        """
        job = await self._store.begin(requests)
        claimed = set(job.request_hashes)
        self.tried |= claimed
        if not claimed:
            await self._store.close(job)
            return None, ""
        try:
            file_id = await self._service.upload(
                request for request in requests if request.request_hash in claimed
            )
        except TeacherError as error:
            await self._close_all(job, error.reason)
            return None, ""
        except BaseException:
            # The next call need not search for it.
            self._store.end(job)
            raise
        return await self._create(job, file_id), file_id

    async def _create(self, job: BatchJob, file_id: str) -> BatchJob | None:
        """The job, without a batch's id where only `_locate` can tell whether there is one; None if
        there is none."""

        async def create() -> str:
            nonlocal job
            job = await self._store.save(job.creating(time.time()))
            return await self._service.create(job.digest, file_id)

        try:
            batch_id = await with_retries(create, self._service.retries, self._pause)
        except (TeacherError, ConfigError) as error:
            is_open = (
                isinstance(error, TeacherError) and error.transient and error.retry_after_s is None
            )
            if is_open:
                # Until now it was under way.
                return await self._store.save(job.with_created(time.time()))
            await self._service.delete_file(file_id)
            if isinstance(error, ConfigError):
                raise
            await self._close_all(job, error.reason)
            return None
        return await self._store.save(job.submitted(batch_id))

    async def _follow(self, job: BatchJob, *, wait: bool) -> None:
        """Ask for the state of a batch until it has ended and its answers are merged."""
        give_up_s = self._give_up_s(job)
        cancelled_s: float | None = None
        while True:
            # A failure brings no news; the next request may bring some.
            with suppress(TeacherError):
                if not job.batch_id:
                    located = await self._locate(job)
                    if located is None:
                        await self._close_all(job, "batch_not_created")
                        return
                    job = located
                state = await self._service.state(job.batch_id)
                if state is None:
                    if not wait:
                        return
                    raise ConfigError(_unknown_batch(job))
                self._note_progress(job, state)
                if state.status in ENDED:
                    await self._merge(job, state)
                    return
            if not wait:
                return
            now_s = time.time()
            if cancelled_s is None and now_s > give_up_s:
                cancelled_s = now_s
                await self._cancel(job)
            elif cancelled_s is not None and now_s > cancelled_s + _CANCEL_WITHIN_S:
                # The batch stays open: a later call merges what it brings after all.
                self._given_up.add(job.digest)
                self._store.reasons["batch_late"] += len(job.request_hashes)
                await self._store.release(job)
                return
            await asyncio.sleep(self._settings.poll_every_s)

    def _give_up_s(self, job: BatchJob) -> float:
        return job.created_s + 3600 * self._settings.give_up_after_h

    def _note_progress(self, job: BatchJob, state: BatchState) -> None:
        self._progress[job.digest] = (*state.counts, len(job.request_hashes))
        completed, failed, total = map(sum, zip(*self._progress.values(), strict=True))
        self._on_progress(BatchProgress(len(self._progress), completed, failed, total))

    async def _cancel(self, job: BatchJob) -> None:
        if job.batch_id:
            with suppress(TeacherError):
                await self._service.cancel(job.batch_id)

    async def _close_all(self, job: BatchJob, reason: str) -> None:
        """End a batch that brings no answer at all."""
        await self._store.close(job, dict.fromkeys(job.request_hashes, reason))

    async def _merge(self, job: BatchJob, state: BatchState) -> None:
        """Answers and failures into the ledger; TeacherError also where files lack lines that were
        counted."""
        merging = _Merging(job.request_hashes, state.missing_reason)
        flaw = ""
        for file_id in state.result_file_ids:
            flaw = await self._read_file(file_id, merging) or flaw
        if not flaw and merging.lacks_lines(state):
            completed, failed = state.counts
            flaw = (
                f"its files hold {merging.answered:,} answers and {merging.failed:,} failures, "
                f"where the service counts {completed:,} and {failed:,}"
            )
            self._short[job.digest] += 1
            if self._short[job.digest] < _SHORT_AT_MOST:
                raise TeacherError(flaw, "batch_short", transient=True)
        await self._store.close(job, merging.failures)
        if flaw:
            _LOG.warning("batch %s: %s; its files stay there", state.id, flaw)
            return
        for file_id in (*state.result_file_ids, state.input_file_id):
            if file_id:
                await self._service.delete_file(file_id)

    async def _read_file(self, file_id: str, merging: _Merging) -> str:
        """Keep a file's lines; returns what is wrong with the file, if anything is."""
        # The last line of each request, where it comes twice.
        portion: dict[str, Result] = {}
        flaw = ""
        try:
            async for result in self._service.results(file_id):
                portion[result.request_hash] = result
                if len(portion) == _LINES_PER_COMMIT:
                    await self._keep(portion.values(), merging)
                    portion = {}
        except TeacherError as error:
            # Where another try can't help, the file is missing, or has a line without end.
            if error.transient:
                raise
            flaw = str(error)
        await self._keep(portion.values(), merging)
        return flaw

    async def _keep(self, results: Iterable[Result], merging: _Merging) -> None:
        ours = [result for result in results if result.request_hash in merging.failures]
        await self._store.keep(ours)
        for result in ours:
            merging.add(result)


def _unknown_batch(job: BatchJob) -> str:
    return (
        f"{job.role}: the service knows no batch {job.batch_id}, "
        f"which has {len(job.request_hashes):,} requests: it is another account's, or deleted. "
        f"Set the key that it was sent with; or `qinglan ledger drop {job.batch_id}`, "
        "and what it was asked is bought again"
    )
