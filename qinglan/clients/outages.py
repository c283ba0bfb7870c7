"""Waiting for a service that is down: an outage costs its time, not the samples and not the run.

When a call has failed after the client's own retries, one task probes the service. If the service
answers something else, the call itself is at fault: it is tried once more, then given up. If not,
all calls wait while one at a time is tried, until the service is back or the time is up. An answer
to a call that was sent before the probing began proves nothing: a server that shuts down still
answers what it has.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from qinglan.errors import CallError

T = TypeVar("T")
Call = Callable[[], Awaitable[Any]]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
SINGLE_CALL_S = 60.0
"""How long a single failing call waits: it may be the only one that the service can't answer."""
_MAX_OUTAGES = 3
"""A call that fails again after so many outages is at fault itself."""


class OutageError(CallError):
    """The service was down for longer than calls wait."""

    def __init__(self, service: str, waited_s: float, error: CallError) -> None:
        super().__init__(
            f"{service} has been down for {waited_s:.0f} s: {error}",
            f"{service}_down",
            transient=True,
        )


@dataclass(eq=False)
class _Waiting:
    probe: Call
    known_good: bool
    """The service answered this probe before, so any error of it is the service's."""
    was_down: "asyncio.Future[bool]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class OutageWait:
    """Calls one service and waits while it is down; belongs to one event loop."""

    def __init__(
        self,
        service: str,
        max_outage_s: float,
        log: Callable[[dict[str, Any]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`log` gets an entry when an outage begins and when it ends."""
        self._service, self._max_outage_s, self._log = service, max_outage_s, log
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
        """What `attempt` returns, tried again while the service is down.

        Args:
            probe: asks for something that the service answered before; without one the attempt
                itself is the probe.
            answered: did this result come from the service? False for one from a store.
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
                suspect = not was_down or outages == _MAX_OUTAGES
            else:
                if began_in == self._round and answered(result):
                    self._gave_up = False
                    self._answered.set()
                return result

    async def close(self) -> None:
        if self._prober:
            self._prober.cancel()
            await asyncio.wait([self._prober])

    async def _wait(self, probe: Call | None, attempt: Call) -> bool:
        """Return when the service works: was it down?"""
        waiting = _Waiting(probe or attempt, known_good=probe is not None)
        self._waiting.append(waiting)
        if self._prober is None:
            self._prober = asyncio.create_task(self._probe())
        try:
            return await waiting.was_down
        finally:
            if waiting in self._waiting:  # cancelled
                self._waiting.remove(waiting)

    async def _probe(self) -> None:
        self._round += 1
        self._answered.clear()
        begin_s, pause_s, single = self._clock(), FIRST_PAUSE_S, True
        refusal: Callable[[], OutageError] | None = None
        try:
            while self._waiting and (error := await self._failure()):
                waited_s = self._clock() - begin_s
                if not self._down:
                    self._down = True
                    self._log(
                        {
                            "outage": self._service,
                            "state": "began",
                            "seconds": 0.0,
                            "error": str(error)[:300],
                        }
                    )
                single = single and len(self._waiting) < 2
                if waited_s >= (
                    min(SINGLE_CALL_S, self._max_outage_s) if single else self._max_outage_s
                ):
                    refusal, self._gave_up = (
                        partial(OutageError, self._service, waited_s, error),
                        not single,
                    )
                    break
                await self._until_answered(self._sleep(min(pause_s, LONGEST_PAUSE_S)))
                pause_s *= 2
        finally:
            self._release(self._clock() - begin_s, refusal)

    async def _failure(self) -> CallError | None:
        """Why the service doesn't work; None if the next probe or a call made meanwhile is
        answered."""
        waiting = self._waiting.pop(0)  # one after the other, as a probe may be at fault itself
        self._waiting.append(waiting)
        error = await self._until_answered(waiting.probe())
        return (
            error
            if isinstance(error, CallError) and (error.transient or waiting.known_good)
            else None
        )

    async def _until_answered(self, awaitable: Awaitable[Any]) -> BaseException | None:
        """Wait until it is done or a call of this round is answered; its error, if it had one."""
        doing, answered = (
            asyncio.ensure_future(awaitable),
            asyncio.ensure_future(self._answered.wait()),
        )
        try:
            await asyncio.wait([doing, answered], return_when=asyncio.FIRST_COMPLETED)
            return doing.exception() if doing.done() and not answered.done() else None
        finally:
            for each in (doing, answered):
                each.cancel()
            await asyncio.gather(doing, answered, return_exceptions=True)

    def _release(self, seconds: float, refusal: Callable[[], OutageError] | None) -> None:
        was_down, self._down, self._prober = self._down, False, None
        released, self._waiting = self._waiting, []
        for waiting in released:
            if not waiting.was_down.done():
                if refusal:
                    waiting.was_down.set_exception(refusal())
                else:
                    waiting.was_down.set_result(was_down)
        if was_down:
            self._log(
                {
                    "outage": self._service,
                    "state": "given up" if refusal else "ended",
                    "seconds": seconds,
                }
            )
