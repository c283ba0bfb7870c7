"""Batches: finished rows are never worked on again, failures are data, errors end the batch
cleanly."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing

import pytest

from qinglan.clients.row_batches import BatchIncompleteError, Losses, RowBatch, cut, in_order
from qinglan.errors import ConfigError, StageError, TeacherError
from qinglan.rows import Row


def row(number: int, status: str = "ok") -> Row:
    good_row = Row(id=str(number), tenant="t", query=f"q{number}", source="f!A1")
    return good_row if status == "ok" else good_row.failed(status)


ROWS = [row(0), row(1), row(2)]


class Worker:
    """Fails where it was told to; remembers whom it was asked about."""

    def __init__(self, failures: dict[str, list[Exception]]) -> None:
        self.failures = failures
        self.asked: list[str] = []

    async def __call__(self, row: Row) -> Row:
        self.asked.append(row.id)
        await asyncio.sleep(0)
        failures = self.failures.get(row.id)
        if failures:
            raise failures.pop(0)
        return row.with_answer("改写")


def timeout() -> TeacherError:
    return TeacherError("late", "teacher_timeout", transient=True)


async def test_only_missing_rows_are_tried_again():
    refusal = TeacherError("no", "teacher_refused")
    batch = RowBatch(4, [*ROWS, row(3), row(4, "duplicate")])
    work = Worker({"0": [timeout()], "1": [refusal], "2": [timeout(), timeout()]})
    with pytest.raises(
        BatchIncompleteError, match=r"batch 4: 2 rows to try again; first: late \(row 0\)"
    ):
        await batch.run(work, last_attempt=False)
    rows = await batch.run(work, last_attempt=True)
    assert work.asked == ["0", "1", "2", "3", "0", "2"]
    assert [row.reason for row in rows] == [
        None,
        "teacher_refused",
        "teacher_timeout",
        None,
        "duplicate",
    ]
    assert [row.answer for row in rows] == ["改写", None, None, "改写", None]
    with pytest.raises(
        StageError, match=r"2 of 4 rows failed.*first failure: no \(row 1\); .*failures\.jsonl"
    ):
        Losses("distill", 4, 0.0).add(batch, rows)


async def test_an_error_waits_for_answers_that_are_under_way():
    batch = RowBatch(0, ROWS)
    work = Worker({"0": [ConfigError("refused key")]})
    with pytest.raises(ConfigError):
        await batch.run(work, last_attempt=True)
    assert [row.id for row in batch.missing] == ["0"]


def lose(losses: Losses, *outcomes: str) -> None:
    """Add a finished batch, of which each row is `ok` or failed with a reason."""
    batch = RowBatch(0, [row(number) for number in range(len(outcomes))])
    losses.add(batch, [row(number, outcome) for number, outcome in enumerate(outcomes)])


def test_the_stage_stops_once_more_than_the_share_of_all_rows_is_lost():
    with pytest.raises(StageError, match="distill: no row to work on"):
        Losses("distill", 0, 0.5)
    # What the budget left out is no loss.
    lose(Losses("distill", 3, 0.0), "over_budget", "over_budget", "ok")
    losses = Losses("distill", 1000, 0.1)
    # A whole batch, and yet no more than may fail.
    lose(losses, *["x"] * 100)
    with pytest.raises(
        StageError,
        match=r"distill: 101 of 1000 rows failed, more than distill.max_failed_share = 10%",
    ):
        lose(losses, "x", "ok")


@pytest.mark.parametrize(
    ("limit", "row_count", "failed"), [(0.05, 10, 2), (0.0, 10, 1), (0.05, 1, 1), (1.0, 3, 3)]
)
def test_small_stages_may_lose_one_row_but_not_all(limit: float, row_count: int, failed: int):
    losses = Losses("distill", row_count, limit)
    for _ in range(failed - 1):
        lose(losses, "x")
    with pytest.raises(StageError, match=f"{failed} of {row_count} rows failed"):
        lose(losses, "x")


def batches_of(count: int) -> list[RowBatch]:
    return list(cut([row(n) for n in range(count)], 1))


async def test_batches_come_in_order_and_few_are_at_work():
    at_work = 0
    most = 0

    async def work(batch: RowBatch) -> int:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0.02 if batch.index % 5 == 0 else 0)
        at_work -= 1
        return batch.index

    results = [
        (batch.index, result) async for batch, result in in_order(batches_of(40), work, at_once=3)
    ]
    assert results == [(number, number) for number in range(40)]
    assert most == 3


async def test_the_source_is_read_no_further_than_needed():
    read = 0

    def source() -> Iterator[RowBatch]:
        nonlocal read
        for batch in batches_of(100):
            read += 1
            yield batch

    async with aclosing(in_order(source(), lambda _: asyncio.sleep(0), at_once=2)) as results:
        async for batch, _ in results:
            if batch.index == 10:
                break
    assert read < 50


async def test_an_error_is_raised_at_once_and_cancels_the_rest():
    cancelled = []

    async def work(batch: RowBatch) -> int:
        if batch.index == 1:
            raise StageError("boom")
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            cancelled.append(batch.index)
            raise
        return batch.index

    with pytest.raises(StageError, match="boom"):
        async for _ in in_order(batches_of(3), work, at_once=3):
            pass
    assert cancelled == [0, 2]
