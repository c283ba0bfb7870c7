"""The ledger in an event loop: grouped, safe on return, patient with a database that is away,
honest about money."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
from doubles import raising
from ledger_calls import call as answered
from ledger_calls import failure, ledger_in

from qinglan.config import Budget, LedgerStore
from qinglan.errors import BudgetError, LedgerError, TeacherError
from qinglan.ledger import BatchJob, Delivery, Ledger, Order, Retrieval, ledger_url, store
from qinglan.ledger import queue as ledger_queue
from qinglan.ledger.queue import RESERVED_BYTES, LedgerQueue, reserve_space
from qinglan.rows import Retrieved

call = partial(answered, cost_usd=1.0)
NO_LIMIT = Budget()


@asynccontextmanager
async def queue_of(ledger: Ledger, budget: Budget = NO_LIMIT) -> AsyncIterator[LedgerQueue]:
    queue = LedgerQueue(ledger, "r", budget)
    yield queue
    await queue.close()
    ledger.close()


class Flaky(Ledger):
    """Away for the first few transactions; where it commits them, only their acknowledgement is
    lost."""

    def __init__(self, path: Path, away: int = 0, *, commits: bool = False) -> None:
        super().__init__(ledger_url(LedgerStore(), path))
        self.away = away
        self.commits = commits
        self.exchanges = 0

    def exchange(self, order: Order) -> Delivery:
        self.exchanges += 1
        delivery = super().exchange(order) if self.commits or not self.away else None
        if delivery is None or self.away:
            self.away -= 1
            raise LedgerError("ledger: the database is away")
        return delivery


async def test_many_at_once_take_few_transactions(tmp_path: Path):
    ledger = Flaky(tmp_path)
    keys = [str(number) for number in range(200)]
    async with queue_of(ledger) as queue:
        assert set(await asyncio.gather(*map(queue.acquire, keys))) == {None}
        await asyncio.gather(*(queue.record(call(key)) for key in keys))
        assert ledger.exchanges <= 4
        answers = await asyncio.gather(*map(queue.acquire, keys))
        assert {answer.request_hash for answer in answers} == set(keys)


async def test_a_lost_acknowledgement_counts_nothing_twice_and_nobody_hangs(tmp_path: Path):
    ledger = Flaky(tmp_path, 1, commits=True)
    async with queue_of(ledger) as queue:
        assert await asyncio.wait_for(queue.acquire("a"), 60) is None
        ledger.away = 1
        await queue.record(call("a"))
        assert (ledger.usage("r", "teacher").calls, ledger.spent_usd("r")[0]) == (1, 1.0)
        ledger.away = 1
        queue.fail(failure("b", "teacher_timeout", cost_usd=0.5))
        await queue.close()
        assert ledger.spent_usd("r")[0] == 1.5


@pytest.mark.parametrize(
    "error", [LedgerError("ledger: the database is away"), ZeroDivisionError()]
)
async def test_an_error_of_the_ledger_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    monkeypatch.setattr(ledger_queue, "_RETRY_FOR_S", 0.1)
    ledger = Flaky(tmp_path)
    async with queue_of(ledger) as queue:
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "exchange", raising(error))
            for waiting in (queue.acquire("a"), queue.find_retrieval("k"), queue.record(call("a"))):
                with pytest.raises(type(error)):
                    await asyncio.wait_for(waiting, 60)
        await queue.close()
        assert ledger.get("a") == call("a"), "what was paid for is written at the end"


async def test_answers_wait_for_a_server_that_is_away_and_a_run_that_ends_does_not_wait_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for name, value_s in {
        "_RETRY_FOR_S": 0.1,
        "_UNREACHABLE_FOR_S": 30.0,
        "_SAY_AFTER_S": 0.3,
    }.items():
        monkeypatch.setattr(ledger_queue, name, value_s)
    fail = raising(LedgerError("ledger: connection refused", unreachable=True))
    ledger = Flaky(tmp_path)
    async with queue_of(ledger) as queue:
        with monkeypatch.context() as patch:
            patch.setattr(ledger, "exchange", fail)
            recording = asyncio.create_task(queue.record(call("a")))
            await asyncio.sleep(1)
        await asyncio.wait_for(recording, 60)
        assert ledger.get("a") == call("a")
        (said,) = [record.message for record in caplog.records]
        assert said.startswith("ledger: connection refused; 1 paid answers wait for it, up to ")
        monkeypatch.setattr(ledger, "exchange", fail)
        recording = asyncio.create_task(queue.record(call("b")))
        await asyncio.sleep(0.5)
        await asyncio.wait_for(queue.close(), 20)
        with pytest.raises(LedgerError):
            await recording


async def test_a_database_that_neither_answers_nor_fails_is_waited_for_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(store, "_SAY_EVERY_S", 0.2)
    ledger = Flaky(tmp_path)
    monkeypatch.setattr(
        ledger, "_record", lambda *order: (time.sleep(0.5), Ledger._record(ledger, *order))[1]
    )
    async with queue_of(ledger) as queue:
        await queue.record(call("a"))
    assert "ledger: its database has not answered for 0 s; still waiting" in caplog.messages


@pytest.mark.parametrize("limit", ["per_run_usd", "per_month_usd"])
async def test_what_is_spent_counts_before_it_is_written(tmp_path: Path, limit: str):
    ledger = Flaky(tmp_path)
    ledger.record([call("before")])
    async with queue_of(ledger, Budget.model_validate({limit: 4.0})) as queue:
        assert queue.affordable_usd() == 3.0
        recording = asyncio.create_task(queue.record(call("a")))
        await asyncio.sleep(0)
        assert queue.affordable_usd() == 2.0
        await recording
        assert queue.affordable_usd() == 2.0
        queue.fail(failure("b", "teacher_timeout", cost_usd=0.5, estimated=True))
        assert queue.affordable_usd() == 1.5
        await queue.record(call("c"))
        assert queue.affordable_usd() == 0.5
        queue.check_budget(in_flight_usd=0.25)
        with pytest.raises(BudgetError, match=f"budget.{limit} = 4: nothing is left"):
            queue.check_budget(in_flight_usd=0.5)


async def test_each_run_has_its_own_budget_and_may_go_on_without_what_it_cannot_pay(tmp_path: Path):
    with ledger_in(tmp_path) as ledger:
        ledger.record([call("before")])
        assert LedgerQueue(ledger, "other", Budget(per_run_usd=1.0)).affordable_usd() == 1.0
        assert LedgerQueue(ledger, "other", Budget(per_month_usd=1.5)).affordable_usd() == 0.5
        assert LedgerQueue(ledger, "r", Budget()).affordable_usd() is None
        with pytest.raises(TeacherError) as caught:
            LedgerQueue(ledger, "r", Budget(per_run_usd=1.0, when_spent="go_on")).check_budget()
        assert caught.value.reason == "over_budget"


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (
            "batch:d",
            "held by batch batch_1, and none was .*; run once with --set distill.mode=batch_api",
        ),
        (
            "far away|7|1.0|x",
            "held by process 7 on far, and none was .*; wait until that run has ended",
        ),
    ],
)
async def test_who_waits_for_others_says_so_and_gives_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    holder: str,
    message: str,
):
    assert ledger_queue._SAY_AFTER_S + ledger_queue._LOOK_AGAIN_S < 5
    for name, value_s in {
        "_LOOK_AGAIN_S": 0.01,
        "_SAY_AFTER_S": 0.05,
        "_WAIT_FOR_OTHERS_S": 0.6,
    }.items():
        monkeypatch.setattr(ledger_queue, name, value_s)
    ledger = Flaky(tmp_path)
    job = {
        "digest": "d",
        "server": "s m",
        "role": "teacher",
        "status": "submitted",
        "batch_id": "batch_1",
    }
    ledger.save_batch(BatchJob(request_hashes=["a", "b", "c"], created_s=1.0, **job))
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "holder", holder)
        ledger.heartbeat()
    ledger.claim(["a", "b", "c"], holder)
    async with queue_of(ledger) as queue:
        started_s = time.monotonic()
        waiting = [asyncio.create_task(queue.acquire(key)) for key in "abc"]
        await asyncio.sleep(0.4)
        said = [record.message for record in caplog.records]
        (warning,) = said
        assert warning.startswith("ledger: questions of this run (3) are held by ")
        ledger.record([call("a")])
        assert await asyncio.wait_for(waiting[0], 60) == call("a")
        for task in waiting[1:]:
            with pytest.raises(LedgerError, match=message):
                await asyncio.wait_for(task, 60)
        assert time.monotonic() > started_s + 0.9, "an answer of others is news"
        # While the last look for it is still to come.
        again = asyncio.create_task(queue.acquire("b"))
        assert await queue.acquire("d") is None, "the queue goes on"
        with pytest.raises(LedgerError, match=message):
            await asyncio.wait_for(again, 60)


async def test_retrievals_are_kept_and_found_beside_the_calls(tmp_path: Path):
    retrieved = Retrieved(ids=("d",), scores=(0.5,), titles=("题",))
    async with queue_of(Flaky(tmp_path, 1)) as queue:
        queue.keep_retrieval(Retrieval(key="k", scope="run", found=retrieved))
        await queue.record(call("a"))
        found_retrievals = await asyncio.gather(*map(queue.find_retrieval, ("k", "none", "k")))
        assert found_retrievals == [retrieved, None, retrieved]


class FullDisk(Ledger):
    """Full once `filled`, for as long as the reserve is there."""

    def __init__(self, folder: Path) -> None:
        super().__init__(ledger_url(LedgerStore(), folder))
        self.reserve = folder / "ledger.db.reserve"
        self.filled = False

    def exchange(self, order: Order) -> Delivery:
        if self.filled and self.reserve.exists():
            raise LedgerError("ledger sqlite:///l.db: database or disk is full")
        return super().exchange(order)


async def test_answers_under_way_are_kept_and_nothing_more_is_asked(tmp_path: Path):
    ledger = FullDisk(tmp_path)
    async with queue_of(ledger) as queue:
        assert [await queue.acquire(key) for key in "ab"] == [None, None]
        ledger.filled = True
        await asyncio.gather(*(queue.record(call(key)) for key in "ab"))
        assert not ledger.reserve.exists()
        with pytest.raises(LedgerError, match="disk is full"):
            await queue.acquire("c")
        assert await queue.acquire("a") == call("a"), "what is known costs nothing"
    ledger.filled = False
    # Now there is room.
    async with queue_of(FullDisk(tmp_path)) as later:
        assert ledger.reserve.stat().st_size == RESERVED_BYTES
        assert await later.acquire("c") is None


def test_the_reserve_is_made_once_and_only_beside_a_file(tmp_path: Path):
    path = tmp_path / "l.db.reserve"
    for _ in range(2):
        assert reserve_space(sa.make_url(f"sqlite:///{tmp_path / 'l.db'}")) == path
        assert path.stat().st_size == RESERVED_BYTES
    reserve_space(sa.make_url(f"sqlite:///{tmp_path / 'missing' / 'l.db'}"))
    assert [*tmp_path.iterdir()] == [path]
    assert reserve_space(sa.make_url("sqlite://")) is None
    assert reserve_space(sa.make_url("postgresql://u@h/d")) is None
