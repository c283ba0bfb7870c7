"""A batch of rows that is worked on until every row has an outcome.

Only rows without an outcome are tried again, so a retry of the batch repeats no finished call. A row's failure is
data: it ends as a failed row with its reason. An error that would meet every row (a refused key) ends the batch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from qinglan.errors import CallError, StageError
from qinglan.rows import Row

Work = Callable[[Row], Awaitable[Row]]


class BatchIncompleteError(StageError):
    """Some rows met a transient failure; run the batch again."""


class Batch:
    """Rows, their outcomes so far, and the last failure of those without one."""

    def __init__(self, index: int, rows: Sequence[Row]) -> None:
        self.index, self.rows = index, list(rows)
        self._outcomes: dict[str, Row] = {row.id: row for row in rows if row.status == "failed"}
        self._failures: dict[str, CallError] = {}

    @property
    def missing(self) -> list[Row]:
        """Rows without an outcome."""
        return [row for row in self.rows if row.id not in self._outcomes]

    async def run(self, work: Work, *, last_attempt: bool) -> list[Row]:
        """Work on the missing rows, all at once; `work` limits its own concurrency.

        Raises:
            BatchIncompleteError: rows failed transiently and this was not the last attempt.
        """
        attempts = (self._attempt(row, work) for row in self.missing)
        # All of them end before an error is raised: an answer in flight is paid for and must reach the ledger.
        for problem in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem
        if self.missing and not last_attempt:
            first = self._failures[self.missing[0].id]
            raise BatchIncompleteError(f"batch {self.index}: {len(self.missing)} rows to try again; first: {first}")
        for row in self.missing:
            self._outcomes[row.id] = row.failed(self._failures[row.id].reason)
        return [self._outcomes[row.id] for row in self.rows]

    def first_failure(self) -> str | None:
        """The first failed call in words, for the error that stops a stage."""
        return str(next(iter(self._failures.values()))) if self._failures else None

    async def _attempt(self, row: Row, work: Work) -> None:
        try:
            self._outcomes[row.id] = await work(row)
        except CallError as error:
            self._failures[row.id] = error
            if not error.transient:
                self._outcomes[row.id] = row.failed(error.reason)


def cut(rows: Sequence[Row], batch_rows: int) -> list[Batch]:
    """Consecutive batches."""
    starts = range(0, len(rows), batch_rows)
    return [Batch(number, rows[start : start + batch_rows]) for number, start in enumerate(starts)]


def check_failed_share(
    section: str, before: Sequence[Row], after: Sequence[Row], limit: float, first: str | None
) -> None:
    """Stop a stage that lost too many of the rows that it was given; `section` is its name in the profile.

    Raises:
        StageError: more than `limit` of the rows failed in this stage, or none is left.
    """
    given = sum(row.status == "ok" for row in before)
    left = sum(row.status == "ok" for row in after)
    if given == 0:
        raise StageError(f"{section}: no row to work on; every row failed before")
    lost = given - left
    if left == 0 or lost > limit * given:
        raise StageError(
            f"{section}: {lost} of {given} rows failed, more than {section}.max_failed_share = {limit:.0%} allows; "
            f"first failure: {first or 'see the rows'}. Answers already paid for are kept; mend the cause and run again"
        )
