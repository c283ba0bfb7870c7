"""Sending a request again: after a pause that grows, or after the time for which the service asks."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from qinglan.errors import CallError
from qinglan.runs.back_off import BackOff

LONGEST_WAIT_S = 60.0
"""A service that asks for more is asked again after this time."""
T = TypeVar("T")


async def with_retries(attempt: Callable[[], Awaitable[T]], max_retries: int, back_off: BackOff) -> T:
    """What `attempt` returns, after up to `max_retries` more tries where its error has a `retry_after_s`."""
    for failures in itertools.count(1):
        try:
            return await attempt()
        except CallError as error:
            if error.retry_after_s is None or failures > max_retries:
                raise
            # Callers that were given the same time must not return all at once.
            await asyncio.sleep(error.retry_after_s + back_off.pause_s(1 if error.retry_after_s else failures))
    raise AssertionError("the last attempt returns or raises")


def retry_after_s(headers: Mapping[str, str]) -> float:
    """How long the service asks to wait before the same request; 0 where it doesn't say."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            return min(max(0.0, float(headers[name]) * unit_s), LONGEST_WAIT_S)
        except (KeyError, ValueError):  # a date is rare: back off as usual
            continue
    return 0.0
