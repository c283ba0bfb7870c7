"""Limits: nobody exceeds them, one refusal is bad luck, many shrink the stream, and headers are
believed."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from qinglan.clients.limits import Limits, Pace, retry_after_s


async def hold(limits: Limits, seconds: float, tokens: float = 1) -> None:
    async with limits.slot(tokens):
        if seconds:
            await asyncio.sleep(seconds)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each wait of the limits, none of which is waited for: time stands still."""
    waits: list[float] = []
    real_sleep = asyncio.sleep
    now_s = time.monotonic()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("qinglan.clients.limits.asyncio.sleep", sleep)
    monkeypatch.setattr("qinglan.clients.limits.time", SimpleNamespace(monotonic=lambda: now_s))
    return waits


async def test_who_is_cancelled_while_waiting_takes_no_place():
    limits = Limits(1)
    first = asyncio.create_task(hold(limits, 0.02))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(hold(limits, 0)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait_for(asyncio.gather(first, *waiting[1:]), 60)
    assert limits.in_flight == 0


def test_a_second_of_units_may_come_at_once_and_then_they_are_even():
    slow = Pace(per_minute=6)
    assert [slow.reserve(1, now_s=50.0) for _ in range(3)] == pytest.approx([0.0, 10.0, 20.0])
    pace = Pace(per_minute=600)
    waits = [pace.reserve(1, now_s=100.0) for _ in range(13)]
    assert waits[:10] == [0.0] * 10
    assert waits[10:] == pytest.approx([0.1, 0.2, 0.3])
    assert pace.reserve(1, now_s=101.4) == pytest.approx(0.0)


async def test_requests_and_tokens_per_minute_hold_and_tokens_that_were_not_used_come_back(
    slept: list[float],
):
    limits = Limits(50, requests_per_minute=6000, tokens_per_minute=60_000)
    await asyncio.gather(*(hold(limits, 0, tokens=100) for _ in range(15)))
    # 1,500 tokens at 1,000 a second, of which the first 1,000 at once.
    assert max(slept) == pytest.approx(0.5)
    slept.clear()
    limits = Limits(50, tokens_per_minute=60_000)
    await hold(limits, 0, tokens=1000)
    limits.answered({}, estimated_tokens=1000, used_tokens=10)
    await hold(limits, 0, tokens=900)
    assert slept == []


def test_few_refusals_change_nothing_many_shrink_the_stream_and_it_recovers():
    limits = Limits(64)
    for number in range(1000):
        if number % 20 == 0:
            limits.refused()
        else:
            limits.answered({}, 1, 1)
    assert limits.allowed == 64
    for _ in range(40):
        limits.refused()
    assert limits.allowed < 40
    for _ in range(3000):
        limits.answered({}, 1, 1)
    assert limits.allowed == 64


async def test_a_service_that_takes_nothing_is_left_alone_longer_each_time(slept: list[float]):
    limits = Limits(4)
    for _ in range(3):
        limits.refused()
    limits.answered({}, 1, 1)
    for refusals in (3, 1, 60):
        for _ in range(refusals):
            limits.refused()
        await hold(limits, 0)
    first_s, second_s = slept
    assert 0.2 < first_s < 1
    assert 1 < second_s <= 8


@pytest.mark.parametrize(
    ("headers", "wait_s"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "200ms"}, 0.2),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "0.2s"}, 0.2),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "6m0s"}, 0.0),
    ],
)
async def test_a_service_that_says_it_is_exhausted_is_left_alone(
    headers: dict[str, str], wait_s: float, slept: list[float]
):
    limits = Limits(4)
    limits.answered(headers, 1, 1)
    await hold(limits, 0)
    assert slept == ([pytest.approx(wait_s)] if wait_s else [])


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "86400"}, 60.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({}, 0.0),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float):
    assert retry_after_s(headers) == seconds
