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
Result = TypeVar("Result")

OVER_BUDGET = "over_budget"
RETRYABLE_REASONS = frozenset(
    {
        "teacher_timeout",
        "teacher_rate_limited",
        "teacher_unavailable",
        "teacher_bad_response",
        "teacher_interrupted",
        "rag_unavailable",
        OVER_BUDGET,
    }
)
"""Another run may succeed here: a stage that dropped rows for one of these is not reused by later
runs."""
RETRYABLE_OR_BLANK_REASONS = RETRYABLE_REASONS | {
    "empty_answer",
    "empty_candidate",
    "empty_judgement",
}
"""The reasons for which a data stage is not reused.

The ledger keeps no blank answer, so another run may succeed here too. Where a model is measured,
blank is an answer.
"""

FAILURES_FILE = "failures.jsonl"
"""File in a stage's folder with the words of a service or model where a row failed.

They may quote the row, so no message has them.
"""
_BATCHES_AHEAD = 8
"""Batches in memory for each one that is worked on."""


class BatchIncompleteError(StageError):
    """Some rows met a transient failure; run the batch again."""


class RowBatch:
    """Rows, their outcomes so far, and the last failure of those without one."""

    def __init__(self, index: int, rows: Sequence[Row]) -> None:
        self.index = index
        self.rows = list(rows)
        self._outcomes: dict[str, Row] = {row.id: row for row in rows if row.status == "failed"}
        self.failures: dict[str, CallError] = {}
        """The last failure of each row that met one."""

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
            raise BatchIncompleteError(
                f"batch {self.index}: {len(self.missing)} rows to try again; "
                f"first: {self.failures[first]} (row {first})"
            )
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
    for index in itertools.count():
        portion = list(itertools.islice(stream, batch_rows))
        if not portion:
            return
        yield RowBatch(index, portion)


async def in_order(
    batches: Iterable[RowBatch], work: Callable[[RowBatch], Awaitable[Result]], *, at_once: int
) -> AsyncGenerator[tuple[RowBatch, Result], None]:
    """Work on several batches at once and yield them in their order, holding a bounded number of
    them in memory.

    An error of any batch is raised as soon as it happens; what is then under way is cancelled.
    """
    source = iter(batches)
    running = asyncio.Semaphore(at_once)
    ahead: deque[tuple[RowBatch, asyncio.Task[Result]]] = deque()

    async def work_in_turn(batch: RowBatch) -> Result:
        async with running:
            return await work(batch)

    def start() -> None:
        # Finished batches wait for a slow one before them; enough of them that the running ones
        # don't run out of work.
        for batch in itertools.islice(source, _BATCHES_AHEAD * at_once - len(ahead)):
            ahead.append((batch, asyncio.create_task(work_in_turn(batch))))

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
    finally:
        # After an error none may go on: the clients are about to be closed.
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)


def tolerable_losses(row_count: int, share: float) -> float:
    """The number of rows, of so many, that may be lost at a `max_failed_share`.

    Above 0 it allows one row, unless that is the only one: of 10 rows at 5% none could be lost
    otherwise.
    """
    if 0 < share < 1:
        return min(max(share * row_count, 1), max(row_count - 1, 0))
    return share * row_count


class Losses:
    """Rows that a stage has lost so far, to stop it as soon as they are too many.

    The limit is a share of all usable rows given, so that a bad first batch of many stops nothing
    that it needn't. What the budget left out is no loss.
    """

    def __init__(self, section: str, row_count: int, max_failed_share: float) -> None:
        """`section` is the stage's name in the profile; `row_count` the rows that it was given."""
        if not row_count:
            raise StageError(f"{section}: no row to work on; every row failed before")
        self._section = section
        self._row_count = row_count
        self._share = max_failed_share
        self._lost = 0
        self._first = ""

    def add(self, batch: RowBatch, finished_rows: Sequence[Row]) -> None:
        """Count a finished batch; raises StageError where too many rows are lost."""
        self._lost += _usable(batch.rows) - _usable(finished_rows)
        for row_id, error in batch.failures.items():
            self._first = self._first or f"{error} (row {row_id})"
        is_too_much = self._lost > tolerable_losses(self._row_count, self._share)
        if is_too_much or self._lost == self._row_count:
            raise StageError(self._message())

    def _message(self) -> str:
        limit = ""
        if self._share < 1:
            limit = f", more than {self._section}.max_failed_share = {self._share:.0%} allows"
        return (
            f"{self._section}: {self._lost} of {self._row_count} rows failed{limit}; "
            f"first failure: {self._first or 'see the rows'}; "
            f"what was said of each is in {FAILURES_FILE} of the stage. "
            "Answers already paid for are kept; remove the cause and run again"
        )


def _usable(rows: Sequence[Row]) -> int:
    return sum(row.status == "ok" or row.reason == OVER_BUDGET for row in rows)
