"""Batches: finished rows are never worked on again, failures are data, errors end the batch cleanly."""

import asyncio

import pytest

from qinglan.batches import Batch, BatchIncompleteError, Losses, cut
from qinglan.errors import ConfigError, StageError, TeacherError
from qinglan.rows import Row


def row(number: int, status: str = "ok") -> Row:
    made = Row(id=str(number), tenant="t", query=f"q{number}", source="f!A1")
    return made if status == "ok" else made.failed(status)


ROWS = [row(0), row(1), row(2)]


class Worker:
    """Fails where it was told to; remembers whom it was asked about."""

    def __init__(self, failures: dict[str, list[Exception]]) -> None:
        self.failures, self.asked = failures, []

    async def __call__(self, row: Row) -> Row:
        self.asked.append(row.id)
        await asyncio.sleep(0)
        if left := self.failures.get(row.id):
            raise left.pop(0)
        return row.model_copy(update={"rewrite": "改写"})


def timeout() -> TeacherError:
    return TeacherError("late", "teacher_timeout", transient=True)


async def test_rows_come_back_in_order():
    done = await Batch(0, ROWS).run(Worker({}), last_attempt=False)
    assert [(r.id, r.rewrite) for r in done] == [("0", "改写"), ("1", "改写"), ("2", "改写")]


async def test_only_missing_rows_are_tried_again():
    batch, work = Batch(4, ROWS), Worker({"1": [timeout()]})
    with pytest.raises(BatchIncompleteError, match="batch 4: 1 rows to try again; first: late"):
        await batch.run(work, last_attempt=False)
    done = await batch.run(work, last_attempt=False)
    assert work.asked == ["0", "1", "2", "1"]
    assert all(r.status == "ok" for r in done)


async def test_a_refusal_is_final():
    batch, work = Batch(0, ROWS), Worker({"1": [TeacherError("no", "teacher_refused")]})
    done = await batch.run(work, last_attempt=False)
    assert (done[1].status, done[1].reason, done[1].rewrite) == ("failed", "teacher_refused", None)
    assert batch.first_failure() == "no"


async def test_the_last_attempt_keeps_the_reason():
    done = await Batch(0, ROWS).run(Worker({"2": [timeout()]}), last_attempt=True)
    assert [r.reason for r in done] == [None, None, "teacher_timeout"]


async def test_rows_that_failed_before_pass_through():
    work = Worker({})
    done = await Batch(0, [row(0, "duplicate"), row(1)]).run(work, last_attempt=False)
    assert work.asked == ["1"]
    assert done[0].reason == "duplicate"


async def test_an_error_waits_for_answers_that_are_under_way():
    batch, work = Batch(0, ROWS), Worker({"0": [ConfigError("refused key")]})
    with pytest.raises(ConfigError):
        await batch.run(work, last_attempt=True)
    assert [r.id for r in batch.missing] == ["0"]


def test_cut():
    batches = cut([row(n) for n in range(5)], 2)
    assert [(b.index, len(b.rows)) for b in batches] == [(0, 2), (1, 2), (2, 1)]


def lose(losses: Losses, *done: str) -> None:
    """A finished batch, of which each row is `ok` or failed with a reason."""
    batch = Batch(0, [row(n) for n in range(len(done))])
    losses.add(batch, [row(n, status) for n, status in enumerate(done)])


def test_a_share_within_the_limit_goes_on():
    losses = Losses("distill", [row(n) for n in range(20)], 0.1)
    lose(losses, "truncated", "truncated", "ok", "ok")
    lose(losses, *["ok"] * 16)


def test_the_stage_stops_once_more_than_the_share_of_all_rows_is_lost():
    losses = Losses("distill", [row(n) for n in range(1000)], 0.1)
    lose(losses, *["x"] * 100)  # a whole batch, and yet no more than may fail
    with pytest.raises(StageError, match=r"distill: 101 of 1000 rows failed, more than distill.max_failed_share = 10%"):
        lose(losses, "x", "ok")


@pytest.mark.parametrize(("limit", "given", "failed"), [(0.05, 10, 2), (0.0, 10, 1), (0.05, 1, 1), (1.0, 3, 3)])
def test_small_stages_may_lose_one_row_but_not_all(limit: float, given: int, failed: int):
    losses = Losses("distill", [row(n) for n in range(given)], limit)
    for _ in range(failed - 1):
        lose(losses, "x")
    with pytest.raises(StageError, match=f"{failed} of {given} rows failed"):
        lose(losses, "x")


def test_rows_that_failed_before_are_no_losses():
    with pytest.raises(StageError, match="distill: no row to work on"):
        Losses("distill", [row(0, "x")], 0.5)
    before = [row(0, "duplicate"), row(1), row(2)]
    Losses("distill", before, 0.0).add(Batch(0, before), before)


async def test_the_first_failure_is_named():
    batch = Batch(0, ROWS)
    done = await batch.run(Worker({"1": [TeacherError("boom", "teacher_refused")]}), last_attempt=True)
    with pytest.raises(StageError, match=r"first failure: boom\. Answers already paid"):
        Losses("distill", ROWS, 0.0).add(batch, done)
