"""When a canary ends, and that looking often costs nothing."""

import random

import pytest

from qinglan.config import Canary
from qinglan.serving.canary import ArmCounts, CanaryCounts, Latencies, Mean, judge, stitched_bound

CONFIG = Canary(min_requests=50)
HOUR, DAY = 3600.0, 86_400.0


def arm(requests: int, failing: int = 0, latency_ms: float = 100.0) -> ArmCounts:
    made = ArmCounts()
    for number in range(requests):
        made.add(fallback=number < failing, latency_ms=latency_ms * (1 + number % 10 / 10))
    return made


def pairs(*differences: float) -> Mean:
    mean = Mean(width=2.0)
    for difference in differences:
        mean.add(difference)
    return mean


def test_the_bound_is_the_one_of_the_authors_own_library():
    # confseq's test/uniform_boundaries_unittest.cpp: poly_stitching_bound(100, .05, 10, 3)
    assert stitched_bound(100, 0.05, 3, v_min=10) == pytest.approx(64.48755, abs=1e-5)


def test_bounds_close_in_on_the_mean():
    rng, mean = random.Random(1), Mean()
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


@pytest.mark.parametrize(
    ("counts", "config", "seconds", "outcome", "reason"),
    [
        (CanaryCounts(champion=arm(1000, 10), challenger=arm(100, 1)), CONFIG, HOUR, "keep", "100 requests"),
        (CanaryCounts(champion=arm(200), challenger=arm(20, 20)), CONFIG, 10, "roll_back", "100.0% of its 20 requests"),
        (CanaryCounts(champion=arm(200, 200), challenger=arm(20, 20)), CONFIG, 10, "keep", ""),
        (CanaryCounts(challenger=arm(100, 50)), CONFIG, 10, "roll_back", "were not answered by it"),
        (CanaryCounts(champion=arm(20_000), challenger=arm(2000, 40)), CONFIG, HOUR, "keep", ""),
        (CanaryCounts(champion=arm(20_000), challenger=arm(2000, 140)), CONFIG, HOUR, "roll_back", "2.0% more are"),
        (CanaryCounts(champion=arm(3000), challenger=SLOW), CONFIG, HOUR, "roll_back", "its p95 latency of"),
        (CanaryCounts(champion=arm(3000), challenger=SLOW), Canary(min_requests=1001), HOUR, "keep", ""),
        (CanaryCounts(challenger=arm(20), retrieval=pairs(*[-0.6, -0.5] * 40)), CONFIG, 10, "roll_back", "by -0.550"),
        (CanaryCounts(challenger=arm(20), retrieval=pairs(*[-0.01] * 5000)), CONFIG, HOUR, "keep", ""),
        (CanaryCounts(champion=arm(1000), challenger=arm(100)), CONFIG, DAY, "undecided", "within 24.0 h: 100"),
        (CanaryCounts(champion=arm(1000), challenger=arm(100), retrieval=GAINS), CONFIG, DAY - 1, "keep", ""),
        (CanaryCounts(champion=arm(1000), challenger=arm(100), retrieval=GAINS), CONFIG, DAY, "better", "after 24.0 h"),
        (CanaryCounts(challenger=arm(10), retrieval=GAINS), CONFIG, DAY, "undecided", ""),
    ],
    ids=[
        "healthy", "always fails", "an outage of both", "no champion's requests", "few failures", "failures", "slow",
        "slow, but few requests", "worse retrieval, few requests", "a small loss", "time is over",
        "better, but too early", "better", "better, but few requests",
    ],
)  # fmt: skip
def test_a_canary_is_judged(counts: CanaryCounts, config: Canary, seconds: float, outcome: str, reason: str):
    judgement = judge(counts, config, seconds)
    assert judgement.outcome == outcome
    assert reason in judgement.reason


def test_looking_again_and_again_at_equal_models_rolls_hardly_any_back():
    assert sum(_ends_early(seed) for seed in range(20)) <= 1


def _ends_early(seed: int) -> bool:
    rng, counts = random.Random(seed), CanaryCounts()
    for request in range(800):
        one = counts.challenger if rng.random() < 0.3 else counts.champion
        one.add(fallback=rng.random() < 0.05, latency_ms=rng.lognormvariate(5, 0.5))
        counts.retrieval.add(max(-1.0, min(1.0, rng.gauss(0, 0.2))))
        if request % 5 == 0 and judge(counts, CONFIG, HOUR).outcome != "keep":
            return True
    return False
