"""The ledger for an event loop: what many tasks want at once goes into one transaction, in a
thread.

A task's answer is committed before `record` returns, so grouping loses nothing to a kill that was
not in flight anyhow. What another client is asking right now is looked up again until it is there.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import sqlalchemy as sa

from qinglan.config import Budget
from qinglan.errors import BudgetError, LedgerError, TeacherError
from qinglan.ledger.records import Call, Delivery, Failure, Order, Retrieval
from qinglan.ledger.store import Ledger
from qinglan.rows import Retrieved
from qinglan.runs.back_off import BackOff

_GATHER_S = 0.05
"""How long a transaction waits for company: much less than any answer takes, and nothing waits for
it in a slot."""
_ENOUGH = 100
"""So many don't wait."""
_LOOK_AGAIN_S = 0.5
_SAY_AFTER_S = 3.0
_SAY_EVERY_S = 60.0
_WAIT_FOR_OTHERS_S = 600.0
"""For the next answer of those that others are asking; longer where their requests may take
longer."""
_RETRY_FOR_S = 60.0
_UNREACHABLE_FOR_S = 900.0
"""So long a database may be away, for a fail-over or a restart of its machine, before what was paid
for is lost."""
_BACK_OFF = BackOff(0.2, 5.0)
_HEARTBEAT_S = 15.0
_LOG = logging.getLogger(__name__)
RESERVED_BYTES = 2 << 20
"""Of disk space, for some hundred answers under way: they are paid for, and written down on a full
disk too."""
P = ParamSpec("P")
T = TypeVar("T")


class LedgerQueue:
    """One client of a ledger; belongs to one event loop. `budget` is counted over all clients of
    the ledger."""

    def __init__(self, ledger: Ledger, run_id: str, budget: Budget) -> None:
        self._ledger, self._run_id, self._budget = ledger, run_id, budget
        self._order = Order(run_id=run_id)
        self._wanted: dict[str, asyncio.Future[Call | None]] = {}
        self._sought: dict[str, asyncio.Future[Retrieved | None]] = {}
        self._elsewhere: dict[str, float] = {}
        """What others are asking, and since when it is waited for."""
        self._news_s = self._said_s = -math.inf
        self._wait_s = _WAIT_FOR_OTHERS_S
        self._commit: asyncio.Future[None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._spent = ledger.spent_usd(run_id)
        self._on_the_way_usd = 0.0
        self._full: LedgerError | None = None
        self._closing = False
        self._reserve = reserve_space(ledger.url)

    async def acquire(self, request_hash: str, wait_s: float = 0.0) -> Call | None:
        """The answer where there is one; else None, and it is this client's to ask (then `record`
        or `release` it).

        Where others are asking, their next answer is waited for, `wait_s` at least. LedgerError
        where they bring none, or the ledger's disk was full, so that nothing more may be bought.
        """
        self._wait_s = max(self._wait_s, wait_s)
        known = await self._look_up(request_hash, self._wanted, self._order.wanted)
        if known is None and self._full:
            self.release(request_hash)
            raise self._full
        return known

    async def record(self, call: Call) -> None:
        """Keep an answer; it is safe on return."""
        self._order.calls.append(call)
        self._on_the_way_usd += call.cost_usd
        await asyncio.shield(self._start())

    def fail(self, failure: Failure) -> None:
        self._order.failures.append(failure)
        self._on_the_way_usd += failure.cost_usd
        self._start()

    def release(self, request_hash: str) -> None:
        """Let others ask what this client could not get."""
        self._order.released.append(request_hash)
        self._start()

    async def find_retrieval(self, key: str) -> Retrieved | None:
        return await self._look_up(key, self._sought, self._order.sought)

    def keep_retrieval(self, retrieval: Retrieval) -> None:
        """Keep it with what is written next, without waiting: a kill costs no more than asking
        again."""
        self._order.retrievals.append(retrieval)
        self._start()

    def affordable_usd(self) -> float | None:
        return affordable_usd(self._budget, self._spent, self._on_the_way_usd)

    def check_budget(self, in_flight_usd: float = 0.0) -> None:
        """Refuse one more call where nothing is left for it beside what the calls under way will
        cost.

        Raises BudgetError where the run is to stop, TeacherError where the row is to fail as
        `over_budget`.
        """
        left = self.affordable_usd()
        if left is None or left > in_flight_usd:
            return
        limits = self._budget.model_dump(
            include={"per_run_usd", "per_month_usd"}, exclude_none=True
        )
        named = " and ".join(f"budget.{name} = {limit:g}" for name, limit in limits.items())
        message = f"{named}: nothing is left to spend; raise it and run again: every answer paid for is kept"
        raise (
            BudgetError(message)
            if self._budget.when_spent == "stop"
            else TeacherError(message, "over_budget")
        )

    async def close(self) -> None:
        """Write what is left, also what could not be written before."""
        self._closing = True
        if self._worker:
            await asyncio.wait([self._worker])
        if len(self._order):
            self._start()
        while self._worker:
            await asyncio.wait([self._worker])
        if self._heartbeats:
            self._heartbeats.cancel()
            await asyncio.wait([self._heartbeats])

    async def _look_up(
        self, key: str, waiting: dict[str, asyncio.Future[T]], ordered: list[str]
    ) -> T:
        if key not in waiting:
            waiting[key] = asyncio.get_running_loop().create_future()
            ordered.append(key)
            self._start()
        return await asyncio.shield(
            waiting[key]
        )  # a cancelled waiter must not take it from the others

    def _start(self) -> asyncio.Future[None]:
        if self._commit is None:
            self._commit = asyncio.get_running_loop().create_future()
            # Where nobody awaits it, the next caller gets the failure.
            self._commit.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        if self._heartbeats is None:
            self._heartbeats = asyncio.create_task(send_heartbeats(self._ledger))
        return self._commit

    async def _work(self) -> None:
        try:
            while self._commit is not None:
                await asyncio.sleep(0)
                if len(self._order) < _ENOUGH:
                    await asyncio.sleep(_GATHER_S)
                order, committed = self._order, self._commit
                self._order, self._commit = Order(run_id=self._run_id), None
                try:
                    delivery = await self._persist(order)
                except Exception as error:  # noqa: BLE001 (the waiting callers must get it, or wait for ever)
                    self._give_up(order, committed, error)
                    continue
                committed.set_result(None)
                self._deliver(order, delivery)
                await self._watch_others()
        finally:
            self._worker = None

    async def _persist(self, order: Order) -> Delivery:
        """A database that is away (a fail-over, a restart) costs no paid answer."""
        started_s = said_s = time.monotonic()
        failures = 0
        while True:
            try:
                delivery = await asyncio.to_thread(self._ledger.exchange, order)
                self._spent = delivery.spent_usd
                self._on_the_way_usd -= sum(
                    tried.cost_usd for tried in (*order.calls, *order.failures)
                )
                return delivery
            except LedgerError as error:
                order.is_resent = True
                if "database or disk is full" in str(error) and self._full is None:
                    self._full = error  # what is under way may still be written
                    if self._reserve:
                        with suppress(OSError):
                            self._reserve.unlink(missing_ok=True)
                    continue
                failures += 1
                pause_s = _BACK_OFF.pause_s(failures)
                longest_s = (
                    _UNREACHABLE_FOR_S if error.unreachable and not self._closing else _RETRY_FOR_S
                )
                now_s = time.monotonic()
                if now_s + pause_s > started_s + longest_s:
                    raise
                if now_s > said_s + (_SAY_AFTER_S if said_s == started_s else _SAY_EVERY_S):
                    said_s = now_s
                    waiting = f"{len(order.calls):,} paid answers wait for it, up to {longest_s / 60:.0f} minutes"
                    _LOG.warning("%s; %s", error, waiting)
                await asyncio.sleep(pause_s)

    def _deliver(self, order: Order, delivery: Delivery) -> None:
        for key in order.sought:
            _resolve(self._sought.pop(key), delivery.retrieved.get(key))
        elsewhere, now_s = [], time.monotonic()
        for wanted in order.wanted:
            if wanted in delivery.found or wanted in delivery.claimed:
                if self._elsewhere.pop(wanted, None):
                    self._news_s = now_s
                _resolve(self._wanted.pop(wanted, None), delivery.found.get(wanted))
            else:
                elsewhere.append(wanted)
                self._elsewhere.setdefault(wanted, now_s)
        if elsewhere:
            asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._look_again, elsewhere)

    def _look_again(self, hashes: list[str]) -> None:
        still = [each for each in hashes if each in self._wanted]
        for gone in set(hashes) - set(still):
            self._elsewhere.pop(gone, None)
        if still:
            self._order.wanted.extend(still)
            self._start()

    async def _watch_others(self) -> None:
        """Say that others' answers are waited for, and wait no longer where none comes."""
        if not self._elsewhere:
            return
        now_s = time.monotonic()
        waited_s = now_s - max(self._news_s, min(self._elsewhere.values()))
        if waited_s < _SAY_AFTER_S or (
            waited_s < self._wait_s and now_s < self._said_s + _SAY_EVERY_S
        ):
            return
        try:
            holder, advice = await asyncio.to_thread(
                self._ledger.claimed_by, next(iter(self._elsewhere))
            )
        except LedgerError:  # whoever asks next gets it
            return
        what = f"ledger: questions of this run ({len(self._elsewhere):,}) are held by {holder}"
        if waited_s < self._wait_s:
            self._said_s = now_s
            _LOG.warning(
                "%s; waiting up to %.0f minutes for the next answer", what, self._wait_s / 60
            )
            return
        error = LedgerError(
            f"{what}, and none was answered for {waited_s / 60:.0f} minutes; {advice}"
        )
        for each in self._elsewhere:
            if waiting := self._wanted.pop(each, None):
                _refuse(waiting, error)
        self._elsewhere.clear()

    def _give_up(self, order: Order, committed: asyncio.Future[None], error: Exception) -> None:
        # What was paid for is tried once more, with what comes next or at the end.
        self._order.calls[:0], self._order.released[:0] = order.calls, order.released
        self._order.failures[:0] = order.failures
        self._order.is_resent = True
        for each in order.wanted:
            self._elsewhere.pop(each, None)
        wanted = [self._wanted.pop(each) for each in order.wanted if each in self._wanted]
        waiting: list[asyncio.Future[Any]] = [
            committed,
            *wanted,
            *(self._sought.pop(key) for key in order.sought),
        ]
        for future in waiting:
            _refuse(future, error)


def affordable_usd(
    budget: Budget, spent_usd: tuple[float, float], on_the_way_usd: float = 0.0
) -> float | None:
    """What is left of a budget, after `spent_usd` by this run and this month; None where there is
    no limit."""
    limits = (budget.per_run_usd, budget.per_month_usd)
    left = [
        limit - spent for limit, spent in zip(limits, spent_usd, strict=True) if limit is not None
    ]
    return max(0.0, min(left) - on_the_way_usd) if left else None


def _resolve(future: asyncio.Future[T] | None, value: T) -> None:
    if (
        future and not future.done()
    ):  # its caller may have been cancelled; None where it was refused meanwhile
        future.set_result(value)


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # retrieved: its caller may have been cancelled


async def send_heartbeats(ledger: Ledger) -> None:
    """Tell other machines that this client's claims are alive, also while nothing is recorded for
    minutes."""
    while True:
        await asyncio.sleep(_HEARTBEAT_S)
        with suppress(LedgerError):  # a call that needs the ledger for more raises it
            await to_the_end(ledger.heartbeat)


async def to_the_end(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """In a thread, and finished even if cancelled meanwhile: nobody closes the ledger under a
    write."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        working.exception()  # retrieved, or asyncio would log it
        raise


def reserve_space(url: sa.URL) -> Path | None:
    """The file beside a SQLite ledger that keeps disk space, if there is any; a server's database
    has its own disk."""
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    path = Path(url.database + ".reserve")
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
    except FileExistsError:
        pass  # made before, or by another process
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return path
