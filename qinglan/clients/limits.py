"""What one process may send to one model: concurrency that adapts to the service, requests and tokens per minute.

A single 429 concerns its own request only, which waits as long as the service asks. Many at once mean that the service
is overloaded: then fewer requests are sent at a time, and slowly more again. A service that says how much is left of
its limit is believed.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from qinglan.clients.retries import LONGEST_WAIT_S

_FULL_SHARE = 0.2
_CUT = 0.7
_MIN_ANSWERS = 8
"""Answers needed before a share of refusals counts."""
_BURST_S = 1.0
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Pace:
    """An even flow of units, a second's worth at once at most (the generic cell rate algorithm)."""

    def __init__(self, per_minute: float) -> None:
        self._interval_s = 60.0 / per_minute
        self._free_at_s = 0.0

    def reserve(self, units: float, now_s: float) -> float:
        """Take units; returns how many seconds to wait before using them."""
        burst_s = max(_BURST_S, self._interval_s)
        start_s = max(self._free_at_s, now_s - burst_s)
        self._free_at_s = start_s + units * self._interval_s
        return max(0.0, self._free_at_s - now_s)

    def correct(self, units: float) -> None:
        """Take that many more after all, or give them back if negative."""
        self._free_at_s += units * self._interval_s


class Limits:
    """Slots for requests; belongs to one event loop."""

    def __init__(
        self, concurrency: int, requests_per_minute: float | None = None, tokens_per_minute: float | None = None
    ) -> None:
        self._most, self.allowed = concurrency, float(concurrency)
        self._requests = Pace(requests_per_minute) if requests_per_minute else None
        self._tokens = Pace(tokens_per_minute) if tokens_per_minute else None
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refusals: deque[bool] = deque(maxlen=max(2 * _MIN_ANSWERS, concurrency))
        self._closed_until_s = 0.0

    @asynccontextmanager
    async def slot(self, tokens: float) -> AsyncIterator[None]:
        """Wait until a request of about so many tokens may be sent, and hold its place."""
        await self._enter()
        try:
            await self._pace(tokens)
            yield
        finally:
            self.in_flight -= 1
            self._let_in()

    def answered(self, headers: Mapping[str, str], estimated_tokens: float, used_tokens: float) -> None:
        """The service answered."""
        if self._tokens:
            self._tokens.correct(used_tokens - estimated_tokens)
        self._refusals.append(False)
        if self.allowed < self._most:
            self.allowed = min(self._most, self.allowed + 1 / self.allowed)
            self._let_in()
        if wait_s := _exhausted_for_s(headers):
            self._closed_until_s = max(self._closed_until_s, time.monotonic() + wait_s)

    def unused(self, tokens: float) -> None:
        """A request brought no answer: its tokens were not spent."""
        if self._tokens:
            self._tokens.correct(-tokens)

    def refused(self) -> None:
        """The service said 429."""
        self._refusals.append(True)
        recent = list(self._refusals)[-max(2 * _MIN_ANSWERS, int(self.allowed)) :]
        if len(recent) >= _MIN_ANSWERS and sum(recent) >= _FULL_SHARE * len(recent):
            self.allowed = max(1.0, self.allowed * _CUT)
            self._refusals.clear()  # judge the smaller number anew

    async def _enter(self) -> None:
        if self.in_flight < int(self.allowed) and not self._waiting:
            self.in_flight += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # let in and cancelled in the same moment
                self.in_flight -= 1
                self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self.in_flight < int(self.allowed):
            place = self._waiting.popleft()
            if not place.done():
                self.in_flight += 1
                place.set_result(None)

    async def _pace(self, tokens: float) -> None:
        now_s = time.monotonic()
        waits = [self._closed_until_s - now_s]
        if self._requests:
            waits.append(self._requests.reserve(1, now_s))
        if self._tokens:
            waits.append(self._tokens.reserve(tokens, now_s))
        if (wait_s := max(waits)) > 0:
            await asyncio.sleep(wait_s)


def _exhausted_for_s(headers: Mapping[str, str]) -> float:
    waits = [
        _duration_s(headers.get(f"x-ratelimit-reset-{what}", ""))
        for what in ("requests", "tokens")
        if headers.get(f"x-ratelimit-remaining-{what}") == "0"
    ]
    return min(max(waits, default=0.0), LONGEST_WAIT_S)


def _duration_s(text: str) -> float:
    """`6m0s`, `1.5s`, `20ms` in seconds."""
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))
