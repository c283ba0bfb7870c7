"""Limits of the requests that one process sends to one model: concurrency, requests and tokens per
minute, retries.

A single 429 concerns its own request only, which waits as long as the service asks. Many at once
mean that the service is overloaded: then fewer requests are sent at a time, and slowly more again.
Where it takes none of those that are sent at a time, all wait, and longer each time.
"""

import asyncio
import itertools
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import httpx2

from qinglan.errors import CallError
from qinglan.runs.back_off import BackOff

_LONGEST_WAIT_S = 60.0
"""A service that asks for more is asked again after this time."""
_FULL_SHARE = 0.2
"""Share of refusals among the recent answers from which a service counts as overloaded."""
_CUT = 0.7
"""Factor by which an overloaded service gets fewer requests at a time."""
_MIN_ANSWERS = 8
"""Answers needed before a share of refusals counts."""
_PAUSE = BackOff(0.25, 8.0)
_BURST_S = 1.0
_SLOW_BYTES_PER_S = 100_000
"""Upload speed that a request's time limit allows for."""
_WAITS = 10
"""Number of waits that a request's time limit is divided into.

A stop of the process, however long, costs the request one of them.
"""
MOST_BODY_BYTES = 8_000_000
"""Largest body of a service's answer, unpacked.

That is far more than an answer within the contracts takes, and little for 64 at once.
"""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|h|m|s)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
T = TypeVar("T")


class BodyTooLargeError(httpx2.RequestError):
    """A service sent more than `MOST_BODY_BYTES`."""


async def receive(sending: Awaitable[httpx2.Response], request: httpx2.Request) -> httpx2.Response:
    """The response that is streamed, with its body; BodyTooLargeError as soon as that is too large.

    ReadTimeout where not all of it is there within the request's time limit, and what a large
    upload takes on a slow line. httpx limits each wait alone, so its limit is off: a service that
    sends a byte now and then would never come to an end, and after a stop of the process httpx
    gives up before it reads what has arrived, which may be paid for.
    """
    limits_s = request.extensions["timeout"]
    upload_bytes = int(request.headers.get("content-length", 0))
    limit_s = limits_s["read"] + upload_bytes / _SLOW_BYTES_PER_S
    limits_s["read"] = None
    reading = asyncio.ensure_future(_read(sending, request))
    try:
        for _ in range(_WAITS):
            finished, _ = await asyncio.wait([reading], timeout=limit_s / _WAITS)
            if finished:
                return await reading
        raise httpx2.ReadTimeout(f"the answer is not whole after {limit_s:.1f} s", request=request)
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _read(sending: Awaitable[httpx2.Response], request: httpx2.Request) -> httpx2.Response:
    response = await sending
    body = bytearray()
    try:
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise BodyTooLargeError(
                    f"the answer has more than {MOST_BODY_BYTES:,} bytes", request=request
                )
    finally:
        await response.aclose()
    # The body is unpacked by now, and must not be unpacked again.
    headers = [pair for pair in response.headers.multi_items() if pair[0] != "content-encoding"]
    return httpx2.Response(
        response.status_code,
        headers=headers,
        content=bytes(body),
        request=request,
        extensions=response.extensions,
    )


class Pace:
    """An even flow of units, a second's worth at once at most (the generic cell rate algorithm)."""

    def __init__(self, per_minute: float | None) -> None:
        """`per_minute` is None where any number may be used."""
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
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
        self,
        concurrency: int,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
    ) -> None:
        self._most = concurrency
        self.allowed = float(concurrency)
        self._requests = Pace(requests_per_minute)
        self.tokens = Pace(tokens_per_minute)
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._refusals: deque[bool] = deque(maxlen=max(2 * _MIN_ANSWERS, concurrency))
        self._closed_until_s = 0.0
        self._refused_in_a_row = 0

    @asynccontextmanager
    async def slot(self, tokens: float) -> AsyncIterator[None]:
        """Wait until a request of about so many tokens may be sent, and hold its place."""
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._let_in()
        try:
            await place
            now_s = time.monotonic()
            wait_s = max(
                self._closed_until_s - now_s,
                self._requests.reserve(1, now_s),
                self.tokens.reserve(tokens, now_s),
            )
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            yield
        finally:
            # A caller that was cancelled while it waited has no place to give back.
            if place.done() and not place.cancelled():
                self.in_flight -= 1
                self._let_in()

    def answered(
        self, headers: Mapping[str, str], estimated_tokens: float, used_tokens: float
    ) -> None:
        self.tokens.correct(used_tokens - estimated_tokens)
        self._refusals.append(False)
        self._refused_in_a_row = 0
        self.allowed = min(self._most, self.allowed + 1 / self.allowed)
        self._let_in()
        wait_s = _exhausted_for_s(headers)
        if wait_s:
            self._close_for(wait_s)

    def refused(self) -> None:
        """The service answered 429."""
        self._refusals.append(True)
        self._refused_in_a_row += 1
        rounds = self._refused_in_a_row // int(self.allowed)
        if rounds:
            self._close_for(_PAUSE.pause_s(rounds))
        recent = list(self._refusals)[-max(2 * _MIN_ANSWERS, int(self.allowed)) :]
        if len(recent) >= _MIN_ANSWERS and sum(recent) >= _FULL_SHARE * len(recent):
            self.allowed = max(1.0, self.allowed * _CUT)
            # The smaller number is judged anew.
            self._refusals.clear()

    def _close_for(self, wait_s: float) -> None:
        self._closed_until_s = max(self._closed_until_s, time.monotonic() + wait_s)

    def _let_in(self) -> None:
        while self._waiting and self.in_flight < int(self.allowed):
            place = self._waiting.popleft()
            if not place.done():
                self.in_flight += 1
                place.set_result(None)


class CircuitBreaker:
    """After `limit` failed requests in a row the service gets one after each pause, until one of
    them is answered."""

    def __init__(
        self, limit: int, pause_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._pause_s = pause_s
        self._clock = clock
        self.failures = 0
        self._next_s = 0.0

    @property
    def is_open(self) -> bool:
        return self.failures >= self._limit

    def wait_s(self) -> float:
        """Seconds until the next request may be sent."""
        return max(0.0, self._next_s - self._clock())

    def sent(self, ends_within_s: float = 0.0) -> None:
        """A request was sent; where it surely ends in this time, no other is sent before."""
        if self.is_open:
            self._next_s = self._clock() + max(self._pause_s, ends_within_s)

    def answered(self) -> None:
        self.failures = 0
        self._next_s = 0.0

    def failed(self) -> None:
        self.failures += 1
        self.sent()


def _exhausted_for_s(headers: Mapping[str, str]) -> float:
    """Seconds for which the service says that its limit is used up; 0 where it is not."""
    longest_s = 0.0
    for unit in ("requests", "tokens"):
        if headers.get(f"x-ratelimit-remaining-{unit}") == "0":
            reset = headers.get(f"x-ratelimit-reset-{unit}", "")
            longest_s = max(longest_s, _duration_s(reset))
    return min(longest_s, _LONGEST_WAIT_S)


def _duration_s(text: str) -> float:
    """Seconds of a duration such as `6m0s`, `1.5s` or `20ms`."""
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION.findall(text))


async def with_retries(
    attempt: Callable[[], Awaitable[T]], max_retries: int, back_off: BackOff
) -> T:
    """Call `attempt`, up to `max_retries` times more where its error has a `retry_after_s`."""
    for failures in itertools.count(1):
        try:
            return await attempt()
        except CallError as error:
            if error.retry_after_s is None or failures > max_retries:
                raise
            # Callers that were given the same time must not return all at once.
            pause_s = back_off.pause_s(1 if error.retry_after_s else failures)
            await asyncio.sleep(error.retry_after_s + pause_s)
    raise AssertionError("the last attempt returns or raises")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds that the service asks to wait before the same request; 0 where it doesn't say."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        # A date in place of a number is rare: it counts as none, and the client backs off as usual.
        with suppress(KeyError, ValueError):
            return min(max(0.0, float(headers[name]) * unit_s), _LONGEST_WAIT_S)
    return 0.0
