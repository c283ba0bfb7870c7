"""The end of a canary, checks that cost nothing, and the watch inside the router."""

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from doubles import Clock, raising
from fake_model import FakeRag
from waiting import until

from qinglan.config import Canary, Tenant
from qinglan.errors import ConfigError, ModelError, RetrievalError
from qinglan.recipes.query_rewrite import RECIPE
from qinglan.rows import Retrieved, Row
from qinglan.serving import canary
from qinglan.serving.canary import ArmCounts, CanaryCounts, Latencies, Mean, judge, stitched_bound
from qinglan.serving.canary_observer import (
    STATE_FILE,
    WAITING,
    CanaryObserver,
    CanaryState,
    read_state,
    read_verdict,
)
from qinglan.serving.request_handler import ModelAnswer, ServedAnswer, ServedRole
from qinglan.serving.routes import Backend, Routes, RouteTable

CONFIG = Canary(compare_share=1.0, check_every_s=0.01, min_requests=10)
CHAMPION = Backend(url="http://127.0.0.1:1/v1", model="version-1", version="1")
CHALLENGER = Backend(url="http://127.0.0.1:2/v1", model="version-2", version="2")


class FakeModels:
    """Rewrites by version; an error is raised."""

    def __init__(self, **rewrites: str | Exception) -> None:
        self.rewrites = rewrites
        self.asked: list[str] = []

    async def answer(self, backend: Backend, question: Row, within_s: float) -> ModelAnswer:
        self.asked.append(backend.version)
        answer = self.rewrites[f"v{backend.version}"]
        if isinstance(answer, Exception):
            raise answer
        return ModelAnswer(answer, None)


def rag_of(**scores: float) -> FakeRag:
    """Scores by rewrite; what is not in them can't be retrieved."""

    def find(_: str, rewrite: str | None) -> Retrieved | Exception:
        if rewrite not in scores:
            return RetrievalError("away", "rag_unavailable")
        return Retrieved(ids=("d",), scores=(scores[rewrite],), titles=("",))

    return FakeRag(find)


def table_of(folder: Path, **changes: object) -> RouteTable:
    routes = Routes(champion=CHAMPION, challenger=CHALLENGER, share=0.5).model_copy(update=changes)
    routes.write(folder / "routes.json")
    return RouteTable(folder / "routes.json")


def served(role: ServedRole, rewrite: str | None = "r1") -> ServedAnswer:
    source, reason = ("model", "") if rewrite else ("fallback", "model_error")
    version = "2" if role == "challenger" else "1"
    return ServedAnswer(0.0, role, version, source, reason, 50.0, "row", rewrite)


QUESTION = Row(id="row", tenant="t", query="这个怎么吃", source="router")


@asynccontextmanager
async def running(watch: CanaryObserver, table: RouteTable, models: FakeModels | None = None):
    task = asyncio.create_task(watch.run(table, models or FakeModels(v1="r1", v2="r1")))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def observer(
    config: Canary, folder: Path, rag: Callable[[], Any] | None, clock: Clock
) -> CanaryObserver:
    return CanaryObserver(config, folder, rag, RECIPE.grader, Tenant(), clock)


def watch_in(
    folder: Path, rag: FakeRag | None = None, config: Canary = CONFIG, clock: Clock | None = None
) -> CanaryObserver:
    return observer(config, folder, lambda: rag or rag_of(), clock or Clock())


async def test_requests_are_counted_by_the_model_they_were_for_and_compared_for_a_search_only(
    tmp_path: Path,
):
    watch = observer(CONFIG, tmp_path, None, Clock())
    models = FakeModels(v1="r1", v2="r2")
    async with running(watch, table_of(tmp_path), models):
        of_replaced_model = replace(served("challenger"), version="0")
        failed = replace(served("champion", None), source="none")
        answers = [
            served("champion"),
            failed,
            served("challenger"),
            served("none", None),
            of_replaced_model,
        ]
        for answer in answers * 2:
            watch.on_served(replace(answer, row_id=answer.source), QUESTION)
        await asyncio.sleep(0.01)
        counts = watch.state.counts
    champion = counts.champion
    assert (champion.fallbacks.n, champion.fallbacks.total, champion.latency.n) == (2, 1.0, 4)
    challenger = counts.challenger
    assert (challenger.fallbacks.n, challenger.fallbacks.total, challenger.latency.n) == (1, 0.0, 2)
    assert counts.retrieval.n == 0
    assert watch.state.left_out == 0
    assert models.asked == []


async def test_a_canary_that_somebody_began_anew_counts_from_nothing(tmp_path: Path):
    clock = Clock()
    watch = watch_in(tmp_path, clock=clock)

    def has_counted_one() -> bool:
        state = read_state(tmp_path)
        return state is not None and state.counts.challenger.fallbacks.n == 1

    async with running(watch, table_of(tmp_path)):
        watch.on_served(served("challenger", None), QUESTION)
        await until(has_counted_one)
        clock.now += 60
        # `canary start` does this, where nobody saw the routes without a challenger.
        (tmp_path / STATE_FILE).unlink()
        await until(lambda: read_state(tmp_path))
        state = read_state(tmp_path)
        assert state.counts.challenger.fallbacks.n == 0
        assert state.started == clock.now


async def compare(
    folder: Path, models: FakeModels, rag: FakeRag, answer: ServedAnswer
) -> CanaryState:
    """The state after one answer was compared, or could not be."""
    watch = watch_in(folder, rag)
    table = table_of(folder)
    async with running(watch, table, models):
        watch.on_served(answer, QUESTION)
        state = watch.state
        await until(lambda: state.counts.retrieval.n or state.failed)
    assert table.routes.challenger == CHALLENGER
    return state


@pytest.mark.parametrize(
    ("role", "first", "rewrites", "difference", "retrieved"),
    [
        ("champion", "r1", {"v2": "r2"}, 0.2, ["r1", "r2"]),
        ("challenger", "r2", {"v1": "r1"}, 0.2, ["r2", "r1"]),
        ("champion", "r1", {"v2": "r1"}, 0.0, []),  # equal rewrites retrieve alike
    ],
)
async def test_the_other_model_is_asked_and_the_scores_are_paired(
    tmp_path: Path,
    role: ServedRole,
    first: str,
    rewrites: dict[str, str],
    difference: float,
    retrieved: list[str],
):
    rag = rag_of(r1=0.5, r2=0.7)
    state = await compare(tmp_path, FakeModels(**rewrites), rag, served(role, first))
    assert state.counts.retrieval.n == 1
    assert [rewrite for _, rewrite in rag.asked] == retrieved
    assert state.counts.retrieval.mean == pytest.approx(difference)


@pytest.mark.parametrize(
    "second",
    ["unknown to the rag", ModelError("down", "model_unreachable"), RuntimeError("a mistake")],
)
async def test_a_failed_call_is_left_out_and_never_a_score(tmp_path: Path, second: str | Exception):
    state = await compare(tmp_path, FakeModels(v2=second), rag_of(r1=0.9), served("champion"))
    assert (state.counts.retrieval.n, state.failed) == (0, 1)


async def test_a_model_that_fails_is_dropped_and_the_site_is_told(tmp_path: Path):
    table = table_of(tmp_path)
    watch = watch_in(tmp_path)
    async with running(watch, table):
        for number in range(100):
            watch.on_served(replace(served("champion", "r1"), row_id=f"{number}"), QUESTION)
        for number in range(30):
            watch.on_served(replace(served("challenger", None), row_id=f"{number}"), QUESTION)
        await until(lambda: table.routes.challenger is None)
    verdict = read_verdict(tmp_path)
    assert (verdict.challenger, verdict.champion, verdict.requests) == ("2", "1", 30)
    assert verdict.judgement.outcome == "roll_back"
    assert "not answered by it" in verdict.judgement.reason
    assert read_state(tmp_path).judgement.outcome == "roll_back"
    assert watch.state is None


@pytest.mark.parametrize(
    ("share", "requests", "started"),
    [(0.5, 1, Clock.now - 300), (0.1, 0, Clock.now)],
    ids=["time without a router does not count", "another share is another canary"],
)
async def test_a_router_that_was_restarted_counts_on(
    tmp_path: Path, share: float, requests: int, started: float
):
    before = CanaryState(champion="1", challenger="2", share=share, started=100.0, looked=400.0)
    before.counts.challenger.add("row", fallback=True, latency_ms=1)
    (tmp_path / STATE_FILE).write_text(before.model_dump_json())
    watch = watch_in(tmp_path)
    async with running(watch, table_of(tmp_path)):
        await until(lambda: watch.state)
        assert watch.state.counts.challenger.fallbacks.n == requests
        assert watch.state.started == started


async def test_a_verdict_that_can_t_be_written_is_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "away"
    folder.write_text("in the way")
    clock = Clock()
    table = table_of(tmp_path)
    watch = observer(CONFIG, folder, rag_of, clock)
    with caplog.at_level(logging.ERROR):
        async with running(watch, table):
            await until(lambda: watch.state)
            clock.now += 86_401
            await until(lambda: table.routes.challenger is None)
            folder.unlink()
            await until(lambda: read_verdict(folder))
    assert read_verdict(folder).judgement.outcome == "undecided"
    assert "can't be written" in caplog.text


async def test_a_canary_that_can_t_be_observed_is_rolled_back_once(tmp_path: Path):
    without_a_key = raising(ConfigError("the environment variable RAG_KEY is not set"))
    table = table_of(tmp_path)
    watch = observer(CONFIG, tmp_path, without_a_key, Clock())
    async with running(watch, table):
        await until(lambda: read_verdict(tmp_path))
        verdict = read_verdict(tmp_path)
        watch.check(table)
        assert table.routes.challenger is None
        Routes(champion=CHAMPION).write(tmp_path / "routes.json")
        await until(lambda: table._read.challenger is None and not table.routes.challenger)
        # The site has acted upon it.
        (tmp_path / "verdict.json").unlink()
        await until(lambda: table.dropped_reason is None)
    assert verdict.challenger == "2"
    assert (
        verdict.judgement.reason
        == "the router can't observe it: the environment variable RAG_KEY is not set"
    )


async def test_a_share_of_the_questions_is_compared_and_what_is_too_much_is_counted(tmp_path: Path):
    watch = watch_in(tmp_path, config=CONFIG.model_copy(update={"compare_share": 0.2}))
    async with running(watch, table_of(tmp_path)):
        # Every question comes twice, and counts once.
        for number in [*range(1000)] * 2:
            watch.on_served(replace(served("champion"), row_id=str(number)), QUESTION)
        assert 170 < WAITING + watch.state.left_out < 230


RULES = Canary(min_requests=50)
HOUR = 3600.0
DAY = 86_400.0


def arm(requests: int, failing: int = 0, latency_ms: float = 100.0) -> ArmCounts:
    counts = ArmCounts()
    for number in range(requests):
        counts.add(
            f"{number}", fallback=number < failing, latency_ms=latency_ms * (1 + number % 10 / 10)
        )
    return counts


def test_a_question_counts_once_until_too_many_are_known(monkeypatch: pytest.MonkeyPatch):
    counts = ArmCounts()
    outcomes = (False, False, True, True)
    are_new = [counts.add("a", fallback=fell_back, latency_ms=1) for fell_back in outcomes]
    assert are_new == [True, False, False, False]
    assert counts.fallbacks.n == 2, "another outcome counts"
    assert counts.fallbacks.mean == 1 / 2
    assert counts.latency.n == 4
    monkeypatch.setattr(canary, "MOST_QUESTIONS", 2)
    counts = ArmCounts()
    are_new = [counts.add(question, fallback=False, latency_ms=1) for question in "aabca"]
    assert are_new == [True, False, True, True, True]


def pairs(*differences: float) -> Mean:
    mean = Mean(width=2.0)
    for difference in differences:
        mean.add(difference)
    return mean


def test_the_bound_is_the_one_of_the_authors_own_library():
    # confseq's test/uniform_boundaries_unittest.cpp: poly_stitching_bound(100, .05, 10, 3)
    assert stitched_bound(100, 0.05, 3, v_min=10) == pytest.approx(64.48755, abs=1e-5)


def test_bounds_close_in_on_the_mean():
    rng = random.Random(1)
    mean = Mean()
    for _ in range(20_000):
        mean.add(float(rng.random() < 0.1))
    low, high = mean.interval(0.05)
    assert low < 0.1 < high < low + 0.04


def test_p95_is_bounded_from_both_sides():
    latencies = Latencies()
    for number in range(10_000):
        latencies.add(number / 10)
    assert latencies.p95 == pytest.approx(950, rel=0.02)
    low, high = latencies.p95_interval(0.05)
    assert 900 < low < 950 < high < 1000
    assert arm(5).latency.p95_interval(0.01) == (0.0, float("inf"))


SLOW = arm(1000, latency_ms=220)
GAINS = pairs(*[0.2, 0.1] * 300)
LOSSES = pairs(*[-0.6, -0.5] * 40)
SMALL_LOSSES = pairs(*[-0.01] * 5000)
MANY_REQUESTS = Canary(min_requests=1001)


@pytest.mark.parametrize(
    ("counts", "config", "seconds", "outcome", "reason"),
    [
        pytest.param(
            CanaryCounts(champion=arm(1000, 10), challenger=arm(100, 1)),
            RULES,
            HOUR,
            "keep",
            "100 requests",
            id="healthy",
        ),
        pytest.param(
            CanaryCounts(champion=arm(200), challenger=arm(20, 20)),
            RULES,
            10,
            "roll_back",
            "100.0% of its 20 questions",
            id="always fails",
        ),
        pytest.param(
            CanaryCounts(champion=arm(200, 200), challenger=arm(20, 20)),
            RULES,
            10,
            "keep",
            "",
            id="an outage of both",
        ),
        pytest.param(
            CanaryCounts(challenger=arm(100, 50)),
            RULES,
            10,
            "roll_back",
            "were not answered by it",
            id="no champion's requests",
        ),
        pytest.param(
            CanaryCounts(champion=arm(20_000), challenger=arm(2000, 40)),
            RULES,
            HOUR,
            "keep",
            "",
            id="few failures",
        ),
        pytest.param(
            CanaryCounts(champion=arm(20_000), challenger=arm(2000, 140)),
            RULES,
            HOUR,
            "roll_back",
            "2.0% more are",
            id="failures",
        ),
        pytest.param(
            CanaryCounts(champion=arm(3000), challenger=SLOW),
            RULES,
            HOUR,
            "roll_back",
            "its p95 latency of",
            id="slow",
        ),
        pytest.param(
            CanaryCounts(champion=arm(3000), challenger=SLOW),
            MANY_REQUESTS,
            HOUR,
            "keep",
            "",
            id="slow, but few requests",
        ),
        pytest.param(
            CanaryCounts(challenger=arm(20), retrieval=LOSSES),
            RULES,
            10,
            "roll_back",
            "by −0.550",
            id="worse retrieval, few requests",
        ),
        pytest.param(
            CanaryCounts(challenger=arm(20), retrieval=SMALL_LOSSES),
            RULES,
            HOUR,
            "keep",
            "",
            id="a small loss",
        ),
        pytest.param(
            CanaryCounts(champion=arm(1000), challenger=arm(100)),
            RULES,
            DAY,
            "undecided",
            "within 24:00:00: 100",
            id="time is over",
        ),
        pytest.param(
            CanaryCounts(champion=arm(1000), challenger=arm(100), retrieval=GAINS),
            RULES,
            DAY - 1,
            "keep",
            "",
            id="better, but too early",
        ),
        pytest.param(
            CanaryCounts(champion=arm(1000), challenger=arm(100), retrieval=GAINS),
            RULES,
            DAY,
            "better",
            "after 24:00:0",
            id="better",
        ),
        pytest.param(
            CanaryCounts(challenger=arm(10), retrieval=GAINS),
            RULES,
            DAY,
            "undecided",
            "",
            id="better, but few requests",
        ),
    ],
)
def test_a_canary_is_judged(
    counts: CanaryCounts, config: Canary, seconds: float, outcome: str, reason: str
):
    judgement = judge(counts, config, seconds)
    assert judgement.outcome == outcome
    assert reason in judgement.reason


def test_looking_again_and_again_at_equal_models_rolls_hardly_any_back():
    assert sum(_ends_early(seed) for seed in range(20)) <= 1


def _ends_early(seed: int) -> bool:
    rng = random.Random(seed)
    counts = CanaryCounts()
    for request in range(800):
        arm_counts = counts.challenger if rng.random() < 0.3 else counts.champion
        arm_counts.add(
            f"{request}", fallback=rng.random() < 0.05, latency_ms=rng.lognormvariate(5, 0.5)
        )
        counts.retrieval.add(max(-1.0, min(1.0, rng.gauss(0, 0.2))))
        if request % 5 == 0 and judge(counts, RULES, HOUR).outcome != "keep":
            return True
    return False
