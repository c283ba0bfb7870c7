"""An outage costs its time, a sample that can't be served costs itself, no call waits for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from waiting import until

from qinglan.clients.outages import LONGEST_PAUSE_S, SINGLE_CALL_S, OutageError, OutageWait
from qinglan.errors import BudgetError, CallError, RetrievalError


class Site:
    """A service, down in some spans of time, that never answers `poison`, and the wait for it."""

    now_s = 0.0
    """The clock, which goes on by sleeping only."""

    def __init__(
        self, *down: tuple[float, float], poison: str = "", max_outage_s: float = 600
    ) -> None:
        self._down = down
        self._poison = poison
        self.notes: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.wait = OutageWait(
            "rag", max_outage_s, self.notes.append, clock=lambda: self.now_s, sleep=self.sleep
        )

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)

    def ask(self, question: str) -> Callable[[], Awaitable[str]]:
        async def attempt() -> str:
            self.asked.append(question)
            await asyncio.sleep(0)
            is_down = any(begin <= self.now_s < end for begin, end in self._down)
            if is_down or question == self._poison:
                raise RetrievalError(f"{question}: HTTP 500", "rag_unavailable", transient=True)
            return question

        return attempt

    async def score(self, question: str, *, probe: str | None = "known") -> str:
        return await self.wait.call(self.ask(question), self.ask(probe) if probe else None)

    async def score_all(self, *questions: str, probe: str | None = "known") -> list[Any]:
        scoring = (self.score(question, probe=probe) for question in questions)
        return await asyncio.wait_for(asyncio.gather(*scoring, return_exceptions=True), 60)

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(note["outage"], note["state"]) for note in self.notes]


class Slow:
    """A call that is answered when `arrived` is set."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.arrived = asyncio.Event()

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
    assert type(bad) is RetrievalError, "no OutageError"
    assert (site.notes, site.now_s, site.asked.count("bad")) == ([], 0, 2)


async def test_without_a_known_answer_a_sample_is_given_up_after_a_minute():
    """It is given up earlier when others are answered."""
    alone = Site(poison="bad")
    (bad,) = await alone.score_all("bad", probe=None)
    assert isinstance(bad, OutageError)
    assert SINGLE_CALL_S <= alone.now_s <= SINGLE_CALL_S + LONGEST_PAUSE_S
    assert await alone.score_all("a", probe=None) == ["a"]
    site = Site((0, 1), poison="bad")
    bad, *scored = await site.score_all("bad", *MANY, probe=None)
    assert scored == MANY
    assert isinstance(bad, CallError)
    assert site.now_s < SINGLE_CALL_S + 2 * LONGEST_PAUSE_S


async def test_a_service_that_stays_away_is_given_up_for_all_and_no_call_waits_until_it_answers():
    site = Site((0, 1000), (2000, 2060), max_outage_s=120)
    slow = Slow()
    on_its_way = asyncio.create_task(site.wait.call(slow))
    refused = await site.score_all(*MANY)
    assert {type(error) for error in refused} == {OutageError}
    assert "rag has been down for 12" in str(refused[0])
    assert 120 <= site.now_s <= 120 + LONGEST_PAUSE_S
    slow.arrived.set()
    # An answer to a call from before the outage proves nothing.
    await on_its_way
    before_s = site.now_s
    refused_at_once = await site.score_all(*MANY)
    assert [error for error in refused_at_once if not isinstance(error, RetrievalError)] == []
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
    assert site.asked == []
    assert site.notes == []


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
    site = Site((0, 60))
    calls = [Slow() for _ in late_s]
    on_their_way = [asyncio.create_task(site.wait.call(call)) for call in calls]
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
    site = Site(poison="bad")
    probe = Slow()
    call = Slow()
    bad = asyncio.create_task(site.wait.call(site.ask("bad"), probe))
    await probe.asked.wait()
    meanwhile = asyncio.create_task(site.wait.call(call, answered=lambda _: by_the_service))
    call.arrived.set()
    await meanwhile
    for _ in range(10):
        await asyncio.sleep(0)
    assert bad.done() == by_the_service, "an answer from a store shows nothing"
    probe.arrived.set()
    with pytest.raises(RetrievalError, match="bad"):
        await bad


async def test_a_service_that_comes_and_goes_costs_no_sample():
    """A cancelled sample leaves nothing behind."""
    site = Site((0, 20), (20.2, 40), (40.5, 50))
    cancelled = asyncio.create_task(site.score("cancelled"))
    await until(lambda: bool(site.notes))
    cancelled.cancel()
    assert await site.score_all(*MANY) == MANY
    await site.wait.close()
