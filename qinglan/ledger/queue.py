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
"""Time that a transaction waits for company: much less than any answer takes, and nothing waits for
it in a slot."""
_ENOUGH = 100
"""An order of this size doesn't wait."""
_LOOK_AGAIN_S = 0.5
_SAY_AFTER_S = 3.0
_SAY_EVERY_S = 60.0
_WAIT_FOR_OTHERS_S = 600.0
"""Wait for the next answer of those that others are asking; longer where their requests may take
longer."""
_RETRY_FOR_S = 60.0
_UNREACHABLE_FOR_S = 900.0
"""So long a database may be away, for a fail-over or a restart of its machine, before what was paid
for is lost."""
_BACK_OFF = BackOff(0.2, 5.0)
_HEARTBEAT_S = 15.0
_LOG = logging.getLogger(__name__)
RESERVED_BYTES = 2 << 20
"""Disk space for some hundred answers under way: they are paid for, and written down on a full disk
too."""
P = ParamSpec("P")
T = TypeVar("T")


class LedgerQueue:
    """One client of a ledger; belongs to one event loop. `budget` is counted over all clients of
    the ledger."""

    def __init__(self, ledger: Ledger, run_id: str, budget: Budget) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._budget = budget
        self._order = Order(run_id=run_id)
        self._wanted: dict[str, asyncio.Future[Call | None]] = {}
        self._sought: dict[str, asyncio.Future[Retrieved | None]] = {}
        self._elsewhere: dict[str, float] = {}
        """Requests that others are asking, and since when each is waited for."""
        self._news_s = -math.inf
        """Time of the last answer of others."""
        self._said_s = -math.inf
        """Time when the log last said that others are waited for."""
        self._wait_s = _WAIT_FOR_OTHERS_S
        self._commit: asyncio.Future[None] | None = None
        self._worker: asyncio.Task[None] | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._spent = ledger.spent_usd(run_id)
        self._on_the_way_usd = 0.0
        """Cost of the entries that are not written yet."""
        self._full: LedgerError | None = None
        """The error of a full disk, once there was one."""
        self._closing = False
        self._reserve = reserve_space(ledger.url)

    async def acquire(self, request_hash: str, wait_s: float = 0.0) -> Call | None:
        """The answer where there is one; else None, and it is this client's to ask (then `record`
        or `release` it).

        Where others are asking, their next answer is waited for, `wait_s` at least. LedgerError
        where they bring none, or the ledger's disk was full, so that nothing more may be bought.
        """
        self._wait_s = max(self._wait_s, wait_s)
        call = await self._look_up(request_hash, self._wanted, self._order.wanted)
        if call is None and self._full:
            self.release(request_hash)
            raise self._full
        return call

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
        free_usd = self.affordable_usd()
        if free_usd is None or free_usd > in_flight_usd:
            return
        limits = self._budget.model_dump(
            include={"per_run_usd", "per_month_usd"}, exclude_none=True
        )
        settings = " and ".join(f"budget.{name} = {limit:g}" for name, limit in limits.items())
        message = (
            f"{settings}: nothing is left to spend; raise it and run again: every answer paid for "
            "is kept"
        )
        if self._budget.when_spent == "stop":
            raise BudgetError(message)
        raise TeacherError(message, "over_budget")

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
        # A cancelled waiter must not take it from the others.
        return await asyncio.shield(waiting[key])

    def _start(self) -> asyncio.Future[None]:
        """See to it that the order is sent; returns what is done once it is committed."""
        if self._commit is None:
            self._commit = asyncio.get_running_loop().create_future()
            # Where nobody awaits it, the next caller gets the failure.
            self._commit.add_done_callback(_retrieve_error)
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
                order = self._order
                committed = self._commit
                self._order = Order(run_id=self._run_id)
                self._commit = None
                try:
                    delivery = await self._persist(order)
                except Exception as error:  # noqa: BLE001
                    # Whatever it is: the waiting callers must get it, or wait for ever.
                    self._give_up(order, committed, error)
                    continue
                committed.set_result(None)
                self._deliver(order, delivery)
                await self._watch_others()
        finally:
            self._worker = None

    async def _persist(self, order: Order) -> Delivery:
        """Send an order; a database that is away (a fail-over, a restart) costs no paid answer."""
        start_s = time.monotonic()
        next_word_s = start_s + _SAY_AFTER_S
        failures = 0
        while True:
            try:
                delivery = await asyncio.to_thread(self._ledger.exchange, order)
            except LedgerError as error:
                order.is_resent = True
                if "database or disk is full" in str(error) and self._full is None:
                    self._note_full_disk(error)
                    continue
                failures += 1
                pause_s = _BACK_OFF.pause_s(failures)
                longest_s = _RETRY_FOR_S
                if error.unreachable and not self._closing:
                    longest_s = _UNREACHABLE_FOR_S
                now_s = time.monotonic()
                if now_s + pause_s > start_s + longest_s:
                    raise
                if now_s > next_word_s:
                    next_word_s = now_s + _SAY_EVERY_S
                    _LOG.warning(
                        "%s; %s paid answers wait for it, up to %.0f minutes",
                        error,
                        f"{len(order.calls):,}",
                        longest_s / 60,
                    )
                await asyncio.sleep(pause_s)
            else:
                self._spent = delivery.spent_usd
                entries = (*order.calls, *order.failures)
                self._on_the_way_usd -= sum(entry.cost_usd for entry in entries)
                return delivery

    def _note_full_disk(self, error: LedgerError) -> None:
        """Buy nothing more, and give the reserve up for what is under way."""
        self._full = error
        if self._reserve:
            with suppress(OSError):
                self._reserve.unlink(missing_ok=True)

    def _deliver(self, order: Order, delivery: Delivery) -> None:
        for key in order.sought:
            _resolve(self._sought.pop(key), delivery.retrieved.get(key))
        now_s = time.monotonic()
        asked_by_others: list[str] = []
        for request_hash in order.wanted:
            if request_hash in delivery.found or request_hash in delivery.claimed:
                if self._elsewhere.pop(request_hash, None):
                    self._news_s = now_s
                waiting = self._wanted.pop(request_hash, None)
                # Where it was refused meanwhile, nobody waits for it.
                if waiting:
                    _resolve(waiting, delivery.found.get(request_hash))
            else:
                asked_by_others.append(request_hash)
                self._elsewhere.setdefault(request_hash, now_s)
        if asked_by_others:
            loop = asyncio.get_running_loop()
            loop.call_later(_LOOK_AGAIN_S, self._look_again, asked_by_others)

    def _look_again(self, hashes: list[str]) -> None:
        still_wanted = [request_hash for request_hash in hashes if request_hash in self._wanted]
        for request_hash in set(hashes) - set(still_wanted):
            self._elsewhere.pop(request_hash, None)
        if still_wanted:
            self._order.wanted.extend(still_wanted)
            self._start()

    async def _watch_others(self) -> None:
        """Say that others' answers are waited for, and wait no longer where none comes."""
        if not self._elsewhere:
            return
        now_s = time.monotonic()
        waited_s = now_s - max(self._news_s, min(self._elsewhere.values()))
        gives_up = waited_s >= self._wait_s
        is_said = now_s < self._said_s + _SAY_EVERY_S
        if waited_s < _SAY_AFTER_S or (is_said and not gives_up):
            return
        first = next(iter(self._elsewhere))
        try:
            holder, advice = await asyncio.to_thread(self._ledger.claimed_by, first)
        except LedgerError:
            # The next caller gets it.
            return
        problem = f"ledger: questions of this run ({len(self._elsewhere):,}) are held by {holder}"
        if not gives_up:
            self._said_s = now_s
            _LOG.warning(
                "%s; waiting up to %.0f minutes for the next answer", problem, self._wait_s / 60
            )
            return
        error = LedgerError(
            f"{problem}, and none was answered for {waited_s / 60:.0f} minutes; {advice}"
        )
        for request_hash in self._elsewhere:
            waiting = self._wanted.pop(request_hash, None)
            if waiting:
                _refuse(waiting, error)
        self._elsewhere.clear()

    def _give_up(self, order: Order, committed: asyncio.Future[None], error: Exception) -> None:
        # What was paid for is tried once more, with what comes next or at the end.
        self._order.calls[:0] = order.calls
        self._order.released[:0] = order.released
        self._order.failures[:0] = order.failures
        self._order.is_resent = True
        for request_hash in order.wanted:
            self._elsewhere.pop(request_hash, None)
        waiting: list[asyncio.Future[Any]] = [committed]
        for request_hash in order.wanted:
            if request_hash in self._wanted:
                waiting.append(self._wanted.pop(request_hash))
        for key in order.sought:
            waiting.append(self._sought.pop(key))
        for future in waiting:
            _refuse(future, error)


def affordable_usd(
    budget: Budget, spent_usd: tuple[float, float], on_the_way_usd: float = 0.0
) -> float | None:
    """Dollars left of a budget, after `spent_usd` by this run and this month; None where there is
    no limit."""
    limits = (budget.per_run_usd, budget.per_month_usd)
    free_usd = [
        limit - spent for limit, spent in zip(limits, spent_usd, strict=True) if limit is not None
    ]
    if not free_usd:
        return None
    return max(0.0, min(free_usd) - on_the_way_usd)


def _resolve(future: asyncio.Future[T], value: T) -> None:
    # Its caller may have been cancelled.
    if not future.done():
        future.set_result(value)


def _refuse(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # Its caller may have been cancelled: unread, asyncio would log the error.
        future.exception()


def _retrieve_error(future: asyncio.Future[None]) -> None:
    """Read the error that nobody awaits, or asyncio would log it."""
    if not future.cancelled():
        future.exception()


async def send_heartbeats(ledger: Ledger) -> None:
    """Tell other machines that this client's claims are alive, also while nothing is recorded for
    minutes."""
    while True:
        await asyncio.sleep(_HEARTBEAT_S)
        # A call that needs the ledger for more raises it.
        with suppress(LedgerError):
            await to_the_end(ledger.heartbeat)


async def to_the_end(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call in a thread, and finish even if cancelled meanwhile: nobody closes the ledger under a
    write."""
    working = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        # Read, or asyncio would log it.
        working.exception()
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
        # Made before, or by another process.
        pass
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return path
