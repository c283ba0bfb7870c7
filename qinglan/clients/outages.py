"""Waiting for a service that is down: an outage costs its time, not the calls and not the run.

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
from qinglan.runs.back_off import BackOff

Result = TypeVar("Result")
Call = Callable[[], Awaitable[Any]]

LONGEST_PAUSE_S = 5.0
SINGLE_CALL_S = 60.0
"""How long a single failing call waits: it may be the only one that the service can't answer."""
_BACK_OFF = BackOff(0.2, LONGEST_PAUSE_S)
# A call that fails again after so many outages is at fault itself.
_MAX_OUTAGES = 3
_MAX_ERROR_CHARS = 300


class OutageError(CallError):
    """The service was down for longer than calls wait."""

    def __init__(self, service: str, waited_s: float, error: CallError) -> None:
        message = f"{service} has been down for {waited_s:.0f} s: {error}"
        super().__init__(message, f"{service}_down", transient=True)


@dataclass(eq=False)
class _WaitingCall:
    probe: Call
    is_known_good: bool
    """The service answered this probe before, so any error of it is the service's."""
    was_down: "asyncio.Future[bool]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


def _always(_result: Any) -> bool:
    return True


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
        """Watch over one service.

        Args:
            log: gets an entry when an outage begins and when it ends.
        """
        self._service = service
        self._max_outage_s = max_outage_s
        self._log = log
        self._clock = clock
        self._sleep = sleep
        self._waiting: list[_WaitingCall] = []
        self._prober: asyncio.Task[None] | None = None
        self._is_down = False
        self._has_given_up = False
        self._round = 0
        self._answered_in_round = asyncio.Event()

    async def call(
        self,
        attempt: Callable[[], Awaitable[Result]],
        probe: Call | None = None,
        answered: Callable[[Result], bool] = _always,
    ) -> Result:
        """The result of `attempt`, which is tried again while the service is down.

        Args:
            probe: asks for something that the service answered before; without one the attempt
                itself is the probe.
            answered: tells whether a result came from the service, and not from a store.
        """
        outages = 0
        is_suspect = False
        while True:
            if self._is_down:
                await self._wait(probe, attempt)
            round_at_start = self._round
            try:
                result = await attempt()
            except CallError as error:
                if not error.transient or is_suspect or self._has_given_up:
                    raise
                was_down = await self._wait(probe, attempt)
                outages += was_down
                is_suspect = not was_down or outages == _MAX_OUTAGES
                continue
            if round_at_start == self._round and answered(result):
                self._has_given_up = False
                self._answered_in_round.set()
            return result

    async def close(self) -> None:
        if self._prober:
            self._prober.cancel()
            await asyncio.wait([self._prober])

    async def _wait(self, probe: Call | None, attempt: Call) -> bool:
        """Return when the service works; True where it was down."""
        waiting = _WaitingCall(probe or attempt, is_known_good=probe is not None)
        self._waiting.append(waiting)
        if self._prober is None:
            self._prober = asyncio.create_task(self._probe())
        try:
            return await waiting.was_down
        finally:
            # A cancelled call still stands in the list.
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    async def _probe(self) -> None:
        """Try waiting calls until the service works or the time is up, then let all calls go on."""
        self._round += 1
        self._answered_in_round.clear()
        begin_s = self._clock()
        failures = 0
        is_single = True
        refusal: Callable[[], OutageError] | None = None
        try:
            while self._waiting:
                error = await self._failure()
                if error is None:
                    break
                waited_s = self._clock() - begin_s
                self._note_begin(error)
                is_single = is_single and len(self._waiting) < 2
                limit_s = self._max_outage_s
                if is_single:
                    limit_s = min(SINGLE_CALL_S, limit_s)
                if waited_s >= limit_s:
                    refusal = partial(OutageError, self._service, waited_s, error)
                    self._has_given_up = not is_single
                    break
                failures += 1
                await self._until_answered(self._sleep(_BACK_OFF.pause_s(failures)))
        finally:
            self._release(self._clock() - begin_s, refusal)

    def _note_begin(self, error: CallError) -> None:
        if self._is_down:
            return
        self._is_down = True
        self._log(
            {
                "outage": self._service,
                "state": "began",
                "seconds": 0.0,
                "error": str(error)[:_MAX_ERROR_CHARS],
            }
        )

    async def _failure(self) -> CallError | None:
        """The service's error; None if the next probe, or a call made meanwhile, is answered."""
        # One after the other, as a probe may be at fault itself.
        waiting = self._waiting.pop(0)
        self._waiting.append(waiting)
        error = await self._until_answered(waiting.probe())
        if not isinstance(error, CallError):
            return None
        return error if error.transient or waiting.is_known_good else None

    async def _until_answered(self, awaitable: Awaitable[Any]) -> BaseException | None:
        """Wait until it is done or a call of this round is answered; its error, if it had one."""
        work = asyncio.ensure_future(awaitable)
        answer = asyncio.ensure_future(self._answered_in_round.wait())
        try:
            await asyncio.wait([work, answer], return_when=asyncio.FIRST_COMPLETED)
            if work.done() and not answer.done():
                return work.exception()
            return None
        finally:
            work.cancel()
            answer.cancel()
            await asyncio.gather(work, answer, return_exceptions=True)

    def _release(self, seconds: float, refusal: Callable[[], OutageError] | None) -> None:
        was_down = self._is_down
        self._is_down = False
        self._prober = None
        released = self._waiting
        self._waiting = []
        for waiting in released:
            if waiting.was_down.done():
                continue
            if refusal:
                waiting.was_down.set_exception(refusal())
            else:
                waiting.was_down.set_result(was_down)
        if was_down:
            state = "given up" if refusal else "ended"
            self._log({"outage": self._service, "state": state, "seconds": seconds})
