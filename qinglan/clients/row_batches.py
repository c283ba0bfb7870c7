"""A batch of rows that is worked on until every row has an outcome.

Only rows without an outcome are tried again, so a retry of the batch repeats no finished call. A
row's failure is data: it ends as a failed row with its reason. An error that would meet every row
(a refused key) ends the batch.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from qinglan.errors import CallError, StageError
from qinglan.rows import Row

Work = Callable[[Row], Awaitable[Row]]
Done = TypeVar("Done")

OVER_BUDGET = "over_budget"
RETRYABLE_REASONS = frozenset(
    {
        "teacher_timeout", "teacher_rate_limited", "teacher_unavailable", "teacher_bad_response",
        "teacher_interrupted", "rag_unavailable",
        OVER_BUDGET,
    }
)  # fmt: skip
"""Another run may succeed here: a stage that dropped rows for one of these is not reused by later
runs."""
RETRYABLE_OR_BLANK_REASONS = RETRYABLE_REASONS | {
    "empty_answer",
    "empty_candidate",
    "empty_judgement",
}
"""For a data stage also these, as the ledger keeps no blank answer; where a model is measured,
blank is an answer."""

FAILURES_FILE = "failures.jsonl"
"""In a stage's folder: what a service or model said where a row failed. It may quote the row, so no
message has it."""
_AHEAD = 8


class BatchIncompleteError(StageError):
    """Some rows met a transient failure; run the batch again."""


class RowBatch:
    """Rows, their outcomes so far, and the last failure of those without one."""

    def __init__(self, index: int, rows: Sequence[Row]) -> None:
        self.index, self.rows = index, list(rows)
        self._outcomes: dict[str, Row] = {row.id: row for row in rows if row.status == "failed"}
        self.failures: dict[str, CallError] = {}
        """The last of each row that met one."""

    @property
    def missing(self) -> list[Row]:
        return [row for row in self.rows if row.id not in self._outcomes]

    async def run(self, work: Work, *, last_attempt: bool) -> list[Row]:
        """Work on the missing rows, all at once; `work` limits its own concurrency."""
        attempts = (self._attempt(row, work) for row in self.missing)
        # All of them end before an error is raised: an answer in flight is paid for and must reach
        # the ledger.
        for problem in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem
        if self.missing and not last_attempt:
            first = self.missing[0].id
            what = f"{len(self.missing)} rows to try again; first: {self.failures[first]} (row {first})"
            raise BatchIncompleteError(f"batch {self.index}: {what}")
        for row in self.missing:
            self._outcomes[row.id] = row.failed(self.failures[row.id].reason)
        return [self._outcomes[row.id] for row in self.rows]

    async def _attempt(self, row: Row, work: Work) -> None:
        try:
            self._outcomes[row.id] = await work(row)
            self.failures.pop(row.id, None)
        except CallError as error:
            self.failures[row.id] = error
            if not error.transient:
                self._outcomes[row.id] = row.failed(error.reason)


def cut(rows: Iterable[Row], batch_rows: int) -> Iterator[RowBatch]:
    stream = iter(rows)
    for number in itertools.count():
        if not (some := list(itertools.islice(stream, batch_rows))):
            return
        yield RowBatch(number, some)


async def in_order(
    batches: Iterable[RowBatch], work: Callable[[RowBatch], Awaitable[Done]], *, at_once: int
) -> AsyncGenerator[tuple[RowBatch, Done], None]:
    """Work on several batches at once and yield them in their order, holding a bounded number of
    them in memory.

    An error of any batch is raised as soon as it happens; what is then under way is cancelled.
    """
    source, running = iter(batches), asyncio.Semaphore(at_once)
    ahead: deque[tuple[RowBatch, asyncio.Task[Done]]] = deque()

    async def one(batch: RowBatch) -> Done:
        async with running:
            return await work(batch)

    def start() -> None:
        # Finished batches wait for a slow one before them; enough of them that the running ones
        # don't run out of work.
        for batch in itertools.islice(source, _AHEAD * at_once - len(ahead)):
            ahead.append((batch, asyncio.create_task(one(batch))))

    try:
        start()
        while ahead:
            await asyncio.wait(
                [task for _, task in ahead if not task.done()], return_when="FIRST_COMPLETED"
            )
            for _, task in ahead:
                if task.done():
                    task.result()
            while ahead and ahead[0][1].done():
                batch, task = ahead.popleft()
                yield batch, task.result()
            start()
    finally:  # after an error none may go on: the clients are about to be closed
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)


def tolerable_losses(given: int, share: float) -> float:
    """How many of so many rows may be lost at a `max_failed_share`. Above 0 it allows one row,
    unless that is the only one: of 10 rows at 5% none could be lost otherwise."""
    return min(max(share * given, 1), max(given - 1, 0)) if 0 < share < 1 else share * given


class Losses:
    """Rows that a stage has lost so far, to stop it as soon as they are too many; `section` is its
    name in the profile.

    The limit is a share of all usable rows given, so that a bad first batch of many stops nothing
    that it needn't. What the budget left out is no loss.
    """

    def __init__(self, section: str, given: int, max_failed_share: float) -> None:
        self._section, self._share = section, max_failed_share
        self._given, self._lost = given, 0
        self._first = ""
        if not self._given:
            raise StageError(f"{section}: no row to work on; every row failed before")

    def add(self, batch: RowBatch, done: Sequence[Row]) -> None:
        """Count a finished batch; raises StageError where too many rows are lost."""
        self._lost += _usable(batch.rows) - _usable(done)
        for row_id, error in batch.failures.items():
            self._first = self._first or f"{error} (row {row_id})"
        if self._lost > tolerable_losses(self._given, self._share) or self._lost == self._given:
            more = (
                f", more than {self._section}.max_failed_share = {self._share:.0%} allows"
                if self._share < 1
                else ""
            )
            raise StageError(
                f"{self._section}: {self._lost} of {self._given} rows failed{more}; first failure: "
                f"{self._first or 'see the rows'}; what was said of each is in {FAILURES_FILE} of the stage. "
                "Answers already paid for are kept; remove the cause and run again"
            )


def _usable(rows: Sequence[Row]) -> int:
    return sum(row.status == "ok" or row.reason == OVER_BUDGET for row in rows)
