"""Patience with a service that is down: its failures cost the time of the outage, not the samples nor the run.

When a call has failed for good, one prober finds out what is at fault. If the service answers to something else, it is
the call: that is tried once more, then given up. If not, the service is down: all calls wait, one at a time is tried
for them, with a growing pause, until it is back or the time is up. An answer to a call that was on its way when the
finding out began shows nothing: a server that shuts down still answers what it has.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from qinglan.errors import CallError
from qinglan.runs.back_off import BackOff

T = TypeVar("T")
Call = Callable[[], Awaitable[Any]]

LONGEST_PAUSE_S = 5.0
_BACK_OFF = BackOff(0.2, LONGEST_PAUSE_S)
ALONE_S = 60.0
"""An outage that concerns a single call is not worth more: that call may be the only one that the service fails."""
_MOST_OUTAGES = 3
"""A call that fails again after so many outages is at fault itself."""


class OutageError(CallError):
    """The service was down for longer than is waited."""

    def __init__(self, service: str, waited_s: float, error: CallError) -> None:
        super().__init__(f"{service} has been down for {waited_s:.0f} s: {error}", f"{service}_down", transient=True)


@dataclass(eq=False)
class _Waiting:
    """A call that waits to hear that the service works."""

    probe: Call
    known_good: bool
    """Was the probe answered before? Then no error of it is its own."""
    told: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Was there an outage?"""


class Patience:
    """Patience with one service; belongs to one event loop."""

    def __init__(
        self,
        service: str,
        max_outage_s: float,
        note: Callable[[dict[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`note` is told when an outage begins and ends."""
        self._service, self._max_outage_s, self._note = service, max_outage_s, note
        self._clock, self._sleep = clock, sleep
        self._waiting: list[_Waiting] = []
        self._prober: asyncio.Task[None] | None = None
        self._down = self._gave_up = False
        self._round = 0
        self._answered = asyncio.Event()

    async def call(
        self,
        attempt: Callable[[], Awaitable[T]],
        probe: Call | None = None,
        answered: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """What `attempt` returns, after however many tries the service's state asks for.

        Args:
            probe: asks for something that the service answered before; the attempt itself if there is nothing such.
            answered: did this result come from the service, or from a store?

        Raises:
            CallError: the service works and this call fails, or it is refused.
            OutageError: the service was down for too long.
        """
        outages, suspect = 0, False
        while True:
            if self._down:
                await self._wait(probe, attempt)
            began_in = self._round
            try:
                result = await attempt()
            except CallError as error:
                if not error.transient or suspect or self._gave_up:
                    raise
                was_down = await self._wait(probe, attempt)
                outages += was_down
                suspect = not was_down or outages == _MOST_OUTAGES
            else:
                if began_in == self._round and answered(result):
                    self._gave_up = False
                    self._answered.set()
                return result

    async def close(self) -> None:
        """Stop probing."""
        if self._prober:
            self._prober.cancel()
            await asyncio.wait([self._prober])

    async def _wait(self, probe: Call | None, attempt: Call) -> bool:
        """Until the service works; tells whether it was down."""
        waiting = _Waiting(probe or attempt, known_good=probe is not None)
        self._waiting.append(waiting)
        if self._prober is None:
            self._prober = asyncio.create_task(self._find_out())
        try:
            return await waiting.told
        finally:
            if waiting in self._waiting:  # cancelled
                self._waiting.remove(waiting)

    async def _find_out(self) -> None:
        self._round += 1
        self._answered.clear()
        begin_s, failures, alone = self._clock(), 0, True
        refusal: Callable[[], OutageError] | None = None
        try:
            while self._waiting and (error := await self._failure()):
                waited_s = self._clock() - begin_s
                if not self._down:
                    self._down = True
                    self._note({"outage": self._service, "state": "began", "seconds": 0.0, "error": str(error)[:300]})
                alone = alone and len(self._waiting) < 2
                if waited_s >= (min(ALONE_S, self._max_outage_s) if alone else self._max_outage_s):
                    refusal, self._gave_up = partial(OutageError, self._service, waited_s, error), not alone
                    break
                failures += 1
                await self._either(self._sleep(_BACK_OFF.pause_s(failures)))
        finally:
            self._tell_all(self._clock() - begin_s, refusal)

    async def _failure(self) -> CallError | None:
        """Why the service doesn't work; None if it does, by the next probe or by a call that was made meanwhile."""
        waiting = self._waiting.pop(0)  # each in its turn, as a probe may be at fault itself
        self._waiting.append(waiting)
        error = await self._either(waiting.probe())
        return error if isinstance(error, CallError) and (error.transient or waiting.known_good) else None

    async def _either(self, awaitable: Awaitable[Any]) -> BaseException | None:
        """Until it is done or a call of this round is answered; its error, if it had one."""
        doing, answered = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._answered.wait())
        try:
            await asyncio.wait([doing, answered], return_when=asyncio.FIRST_COMPLETED)
            return doing.exception() if doing.done() and not answered.done() else None
        finally:
            for each in (doing, answered):
                each.cancel()
            await asyncio.gather(doing, answered, return_exceptions=True)

    def _tell_all(self, seconds: float, refusal: Callable[[], OutageError] | None) -> None:
        was_down, self._down, self._prober = self._down, False, None
        told, self._waiting = self._waiting, []
        for waiting in told:
            if waiting.told.done():
                continue
            if refusal:
                waiting.told.set_exception(refusal())
            else:
                waiting.told.set_result(was_down)
        if was_down:
            self._note({"outage": self._service, "state": "given up" if refusal else "ended", "seconds": seconds})
