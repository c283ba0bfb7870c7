"""An outage costs its time, a sample that the service can't serve costs itself, and no call waits
for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import until

from qinglan.clients.outages import LONGEST_PAUSE_S, SINGLE_CALL_S, OutageError, OutageWait
from qinglan.errors import BudgetError, CallError, RetrievalError


class Site:
    """A service, down in some spans of time, that never answers `poison`; the wait for it, and what
    that logged."""

    now_s = 0.0
    """Time passes by sleeping only."""

    def __init__(
        self, *down: tuple[float, float], poison: str = "", max_outage_s: float = 600
    ) -> None:
        self._down, self._poison = down, poison
        self.notes, self.asked = list[dict[str, Any]](), list[str]()
        self.wait = OutageWait(
            "rag", max_outage_s, self.notes.append, clock=lambda: self.now_s, sleep=self.sleep
        )

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    def ask(self, what: str) -> Callable[[], Awaitable[str]]:
        async def attempt() -> str:
            self.asked.append(what)
            await asyncio.sleep(0)
            if what == self._poison or any(begin <= self.now_s < end for begin, end in self._down):
                raise RetrievalError(f"{what}: HTTP 500", "rag_unavailable", transient=True)
            return what

        return attempt

    async def score(self, what: str, *, probe: str | None = "known") -> str:
        return await self.wait.call(self.ask(what), self.ask(probe) if probe else None)

    async def score_all(self, *what: str, probe: str | None = "known") -> list[Any]:
        scoring = (self.score(each, probe=probe) for each in what)
        return await asyncio.wait_for(asyncio.gather(*scoring, return_exceptions=True), 60)

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(note["outage"], note["state"]) for note in self.notes]


class Slow:
    """A call that is answered when `arrived` is set."""

    def __init__(self) -> None:
        self.asked, self.arrived = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> str:
        self.asked.set()
        await self.arrived.wait()
        return "slow"


MANY = [str(number) for number in range(50)]


@pytest.mark.parametrize("probe", ["known", None])
async def test_a_minute_of_outage_costs_a_minute_and_no_sample(probe: str | None):
    site = Site((0, 60))
    first = asyncio.create_task(site.score_all(*MANY, probe=probe))
    await until(lambda: bool(site.notes))
    assert await site.score_all("late") == ["late"]
    assert await first == MANY
    assert site.asked.count("late") == 1, "a call made during the outage waits"
    assert 60 <= site.now_s <= 60 + LONGEST_PAUSE_S
    assert site.states == [("rag", "began"), ("rag", "ended")]
    assert site.notes[1]["seconds"] == site.now_s
    assert "HTTP 500" in site.notes[0]["error"]
    assert len(site.asked) < 2 * len(MANY) + 25, "one call probes for all"


async def test_a_sample_that_fails_by_itself_is_given_up_while_others_go_on():
    site = Site(poison="bad")
    *scored, bad = await site.score_all(*MANY, "bad")
    assert scored == MANY
    assert isinstance(bad, RetrievalError) and not isinstance(bad, OutageError)
    assert (site.notes, site.now_s, site.asked.count("bad")) == ([], 0, 2)


async def test_without_a_known_answer_a_sample_is_given_up_after_a_minute_or_when_others_are_answered():
    alone = Site(poison="bad")
    (bad,) = await alone.score_all("bad", probe=None)
    assert isinstance(bad, OutageError)
    assert SINGLE_CALL_S <= alone.now_s <= SINGLE_CALL_S + LONGEST_PAUSE_S
    assert await alone.score_all("a", probe=None) == ["a"]
    site = Site((0, 1), poison="bad")
    bad, *scored = await site.score_all("bad", *MANY, probe=None)
    assert scored == MANY and isinstance(bad, CallError)
    assert site.now_s < SINGLE_CALL_S + 2 * LONGEST_PAUSE_S


async def test_a_service_that_stays_away_is_given_up_for_all_and_no_call_waits_until_it_answers():
    site = Site((0, 1000), (2000, 2060), max_outage_s=120)
    slow = Slow()
    on_its_way = asyncio.create_task(site.wait.call(slow))
    refused = await site.score_all(*MANY)
    assert all(
        isinstance(each, OutageError) for each in refused
    ) and "rag has been down for 12" in str(refused[0])
    assert 120 <= site.now_s <= 120 + LONGEST_PAUSE_S
    slow.arrived.set()
    await on_its_way  # an answer to a call from before the outage proves nothing
    before_s = site.now_s
    assert all(isinstance(each, RetrievalError) for each in await site.score_all(*MANY))
    assert site.now_s == before_s
    for now_s in (1500.0, 2000.0):
        site.now_s = now_s
        assert await site.score_all("a", "b") == ["a", "b"]
    assert site.states == [("rag", state) for state in ("began", "given up", "began", "ended")]


@pytest.mark.parametrize(
    "error",
    [RetrievalError("HTTP 400", "rag_refused"), BudgetError("spent"), ZeroDivisionError("a bug")],
)
async def test_errors_that_waiting_can_not_repair_are_raised_at_once(error: Exception):
    site = Site()

    async def attempt() -> str:
        raise error

    with pytest.raises(type(error)):
        await site.wait.call(attempt, site.ask("known"))
    assert site.asked == site.notes == []


async def test_a_probe_that_is_refused_shows_nothing_unless_it_was_answered_before():
    site = Site()
    refusals = iter([True, True, False])

    async def probe() -> None:
        if next(refusals):
            raise RetrievalError("HTTP 404", "rag_refused")

    failures = iter([True, False])

    async def attempt() -> str:
        if next(failures):
            raise RetrievalError("HTTP 500", "rag_unavailable", transient=True)
        return "found"

    assert await site.wait.call(attempt, probe) == "found"
    assert site.states == [("rag", "began"), ("rag", "ended")]


@pytest.mark.parametrize("late_s", [[0.1], [4, 8, 12, 16, 20, 24]])
async def test_answers_to_calls_from_before_an_outage_do_not_end_it(late_s: list[float]):
    site, calls = Site((0, 60)), [Slow() for _ in late_s]
    on_their_way = [asyncio.create_task(site.wait.call(each)) for each in calls]
    waiting = asyncio.create_task(site.score_all(*MANY))
    for call, at_s in zip(calls, late_s, strict=True):
        await until(lambda at_s=at_s: bool(site.notes) and site.now_s >= at_s)
        call.arrived.set()
    assert await waiting == MANY
    assert await asyncio.gather(*on_their_way) == ["slow"] * len(calls)
    assert site.now_s >= 60
    assert site.states == [("rag", "began"), ("rag", "ended")]


@pytest.mark.parametrize("by_the_service", [True, False])
async def test_an_answer_to_a_call_made_while_the_first_is_tried_shows_that_the_service_works(
    by_the_service: bool,
):
    site, probe, call = Site(poison="bad"), Slow(), Slow()
    bad = asyncio.create_task(site.wait.call(site.ask("bad"), probe))
    await probe.asked.wait()
    meanwhile = asyncio.create_task(site.wait.call(call, answered=lambda _: by_the_service))
    call.arrived.set()
    await meanwhile
    for _ in range(10):
        await asyncio.sleep(0)
    assert bad.done() == by_the_service  # an answer from a store shows nothing
    probe.arrived.set()
    with pytest.raises(RetrievalError, match="bad"):
        await bad


async def test_a_service_that_comes_and_goes_costs_no_sample_and_a_cancelled_one_leaves_nothing_behind():
    site = Site((0, 20), (20.2, 40), (40.5, 50))
    cancelled = asyncio.create_task(site.score("cancelled"))
    await until(lambda: bool(site.notes))
    cancelled.cancel()
    assert await site.score_all(*MANY) == MANY
    await site.wait.close()
