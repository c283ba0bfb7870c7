"""When a canary ends, and that looking often costs nothing."""

import math
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


def test_a_mean_without_outcomes_is_anything():
    assert (Mean().lower(0.05), Mean().upper(0.05)) == (-math.inf, math.inf)


def test_bounds_close_in_on_the_mean():
    rng, mean = random.Random(1), Mean()
    for _ in range(20_000):
        mean.add(float(rng.random() < 0.1))
    assert mean.lower(0.05) < 0.1 < mean.upper(0.05)
    assert mean.upper(0.05) - mean.lower(0.05) < 0.04


def test_p95_is_bounded_from_both_sides():
    latencies = Latencies()
    for number in range(10_000):
        latencies.add(number / 10)
    assert latencies.p95 == pytest.approx(950, rel=0.02)
    assert 900 < latencies.p95_lower(0.05) < 950 < latencies.p95_upper(0.05) < 1000


def test_too_few_latencies_say_nothing():
    few = arm(5).latency
    assert (few.p95_lower(0.01), few.p95_upper(0.01)) == (0.0, math.inf)
    assert Latencies().p95 is None


def test_a_healthy_canary_goes_on():
    counts = CanaryCounts(champion=arm(1000, 10), challenger=arm(100, 1))
    assert judge(counts, CONFIG, HOUR).outcome == "keep"


def test_a_model_that_always_fails_is_gone_after_a_few_requests():
    judgement = judge(CanaryCounts(champion=arm(200), challenger=arm(20, 20)), CONFIG, 10)
    assert judgement.outcome == "roll_back"
    assert judgement.reason.startswith("100.0% of its 20 requests were not answered by it")


def test_an_outage_of_both_is_no_ones_fault():
    assert judge(CanaryCounts(champion=arm(200, 200), challenger=arm(20, 20)), CONFIG, 10).outcome == "keep"


def test_a_champion_without_requests_is_taken_as_flawless():
    assert judge(CanaryCounts(challenger=arm(100, 50)), CONFIG, 10).outcome == "roll_back"


def test_a_few_failures_more_are_allowed():
    assert judge(CanaryCounts(champion=arm(20_000), challenger=arm(2000, 40)), CONFIG, HOUR).outcome == "keep"
    assert judge(CanaryCounts(champion=arm(20_000), challenger=arm(2000, 140)), CONFIG, HOUR).outcome == "roll_back"


def test_twice_the_latency_is_too_slow():
    judgement = judge(CanaryCounts(champion=arm(3000), challenger=arm(1000, latency_ms=220)), CONFIG, HOUR)
    assert judgement.outcome == "roll_back"
    assert "p95 latency of" in judgement.reason and "at most" in judgement.reason


def test_latency_counts_only_after_enough_requests():
    counts = CanaryCounts(champion=arm(3000), challenger=arm(1000, latency_ms=220))
    assert judge(counts, Canary(min_requests=1001), HOUR).outcome == "keep"


def test_worse_retrieval_ends_it_before_the_minimum_of_requests():
    counts = CanaryCounts(champion=arm(200), challenger=arm(20), retrieval=pairs(*[-0.6, -0.5] * 40))
    judgement = judge(counts, CONFIG, 10)
    assert judgement.outcome == "roll_back"
    assert "worse by -0.550" in judgement.reason


def test_a_loss_within_the_margin_is_kept():
    counts = CanaryCounts(champion=arm(200), challenger=arm(20), retrieval=pairs(*[-0.01] * 5000))
    assert judge(counts, CONFIG, HOUR).outcome == "keep"


def test_time_runs_out_undecided():
    judgement = judge(CanaryCounts(champion=arm(1000), challenger=arm(100)), CONFIG, DAY)
    assert (judgement.outcome, judgement.reason[:41]) == ("undecided", "no difference was found within 24.0 h: 10")


def test_time_runs_out_with_a_better_model():
    gains = pairs(*[0.2, 0.1] * 300)
    counts = CanaryCounts(champion=arm(1000), challenger=arm(100), retrieval=gains)
    assert judge(counts, CONFIG, DAY - 1).outcome == "keep"
    assert judge(counts, CONFIG, DAY).outcome == "better"
    assert judge(CanaryCounts(challenger=arm(10), retrieval=gains), CONFIG, DAY).outcome == "undecided"


def test_the_tally_survives_a_restart():
    counts = CanaryCounts(champion=arm(30, 3), challenger=arm(5, 1), retrieval=pairs(0.1, -0.2))
    assert CanaryCounts.model_validate_json(counts.model_dump_json()) == counts


def test_tallies_share_nothing():
    CanaryCounts().champion.add(fallback=True, latency_ms=1)
    assert CanaryCounts().champion.fallbacks.n == CanaryCounts().challenger.fallbacks.n == 0


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
