"""Share of days on which a canary rolls back a model that is no worse; the delay for worse ones.

    make bench NAME=canary_noise          (some minutes)

Simulated days of traffic through the real `judge` with the profile's defaults, looked at again and
again. First with models between which there is nothing to find: equal ones, and ones exactly as
much worse as is allowed, which is the hardest case. Beside it, what the usual 95% intervals would
have done at the same looks. Then with broken ones: how many requests, and at a stated rate how much
time, until the rollback.
"""

import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from qinglan.config import Canary
from qinglan.serving.canary import CanaryCounts, judge

RUNS = 200
REQUESTS = 20_000
LOOK_EVERY = 10
"""Requests between two looks: 2,000 looks a day."""
PER_SECOND = 5.0
"""Rate of requests at which delays are told in seconds."""
QUESTIONS = 2_000
"""Number of questions where they repeat. How often one comes goes by its rank, as Zipf's law
says."""
SPREAD = 0.4
"""Standard deviation of the logarithm of the latency."""
RETRIEVAL_NOISE = 0.25
"""Standard deviation of the difference between two rewrites' scores for one question."""
RESULT = Path(__file__).parent / "results" / "canary_noise.json"
CONFIG = Canary()
Z = 2.128
"""One-sided quantile of the normal distribution at a third of 5%."""


@dataclass(frozen=True)
class Domain:
    """The truth about the two models."""

    name: str
    champion_fails: float = 0.01
    challenger_fails: float = 0.01
    slower: float = 1.0
    retrieval: float = 0.0
    share: float = CONFIG.share
    zipf: float | None = None
    """The exponent; no question comes twice if it is None."""


EQUAL = Domain("equal")
NOTHING_TO_FIND = (
    EQUAL,
    replace(EQUAL, name="equal, both fail often", champion_fails=0.2, challenger_fails=0.2),
    replace(EQUAL, name="equal, half of the traffic", share=0.5),
    replace(
        EQUAL,
        name=(
            "equal, half of the traffic, both fail on the same 5% of questions, which repeat "
            "(Zipf 1.2)"
        ),
        champion_fails=0.05,
        challenger_fails=0.05,
        share=0.5,
        zipf=1.2,
    ),
    replace(
        EQUAL,
        name="just as many failures more as are allowed",
        challenger_fails=0.01 + CONFIG.max_error_gain,
    ),
    replace(EQUAL, name="just as slow as is allowed", slower=CONFIG.max_latency_ratio),
    replace(
        EQUAL, name="just the retrieval loss that is allowed", retrieval=-CONFIG.max_retrieval_loss
    ),
)
BROKEN = (
    replace(EQUAL, name="answers nothing", challenger_fails=1.0),
    replace(EQUAL, name="fails on every third question", challenger_fails=1 / 3),
    replace(EQUAL, name="fails on 10%", challenger_fails=0.1),
    replace(EQUAL, name="3 times as slow", slower=3.0),
    replace(EQUAL, name="nonsense: best passage 0.5 lower", retrieval=-0.5),
    replace(EQUAL, name="best passage 0.2 lower", retrieval=-0.2),
    replace(EQUAL, name="best passage 0.1 lower", retrieval=-0.1),
)


def traffic(domain: Domain, seed: int) -> Iterator[CanaryCounts]:
    """The counts at each check of a day."""
    rng = random.Random(seed)
    counts = CanaryCounts()
    fates: dict[int, tuple[bool, bool]] = {}
    for number, question in enumerate(questions_of_a_day(domain, rng), 1):
        # A question goes to the same model each time, which fails on it each time or never.
        if question not in fates:
            to_challenger = rng.random() < domain.share
            error_rate = domain.challenger_fails if to_challenger else domain.champion_fails
            fates[question] = (to_challenger, rng.random() < error_rate)
        to_challenger, fails = fates[question]
        arm = counts.challenger if to_challenger else counts.champion
        slower = domain.slower if to_challenger else 1.0
        # A median of 100 ms.
        latency_ms = rng.lognormvariate(4.6, SPREAD) * slower
        is_first = arm.add(str(question), fallback=fails, latency_ms=latency_ms)
        if is_first and rng.random() < CONFIG.compare_share:
            difference = rng.gauss(domain.retrieval, RETRIEVAL_NOISE)
            # Scores lie between 0 and 1, so that two of them differ by 1 at most.
            counts.retrieval.add(max(-1.0, min(1.0, difference)))
        if number % LOOK_EVERY == 0:
            yield counts


def questions_of_a_day(domain: Domain, rng: random.Random) -> Iterable[int]:
    """The question of each request, as a number."""
    if not domain.zipf:
        return range(REQUESTS)
    weights = [1 / rank**domain.zipf for rank in range(1, QUESTIONS + 1)]
    return rng.choices(range(QUESTIONS), weights, k=REQUESTS)


def false_alarms(domain: Domain, runs: int) -> dict[str, float]:
    """Share of days with a rollback, by each method."""
    rollbacks: Counter[str] = Counter()
    for seed in range(runs):
        ours = usual = False
        for counts in traffic(domain, seed):
            ours = ours or is_rollback(counts)
            usual = usual or is_usual_rollback(counts)
        rollbacks.update({"ours": ours, "usual": usual})
    return {name: rollbacks[name] / runs for name in ("ours", "usual")}


def is_rollback(counts: CanaryCounts) -> bool:
    return judge(counts, CONFIG, 0.0).outcome == "roll_back"


def is_usual_rollback(counts: CanaryCounts) -> bool:
    """Rollback by the usual intervals of a single look at failures and retrieval.

    They have the same total level as ours.
    """
    challenger = counts.challenger.fallbacks
    champion = counts.champion.fallbacks
    pairs = counts.retrieval
    if min(challenger.n, champion.n, pairs.n) < CONFIG.min_requests:
        return False
    variances = [share.mean * (1 - share.mean) / share.n for share in (challenger, champion)]
    error = math.hypot(*map(math.sqrt, variances))
    if challenger.mean - champion.mean - Z * error > CONFIG.max_error_gain:
        return True
    return pairs.mean + Z * math.sqrt(pairs.variance) / pairs.n < -CONFIG.max_retrieval_loss


def delay(domain: Domain, runs: int) -> dict[str, float]:
    """Requests until the rollback: median and slowest of the days on which there was one.

    They are nan if there was none on any day.
    """
    delays = []
    for seed in range(runs):
        for look, counts in enumerate(traffic(domain, seed), 1):
            if is_rollback(counts):
                delays.append(look * LOOK_EVERY)
                break
    if not delays:
        return {"found": 0.0, "median": math.nan, "slowest": math.nan}
    return {
        "found": len(delays) / runs,
        "median": statistics.median(delays),
        "slowest": max(delays),
    }


def main(runs: int = RUNS) -> None:
    """Simulate, print, and keep the numbers."""
    looks = REQUESTS // LOOK_EVERY
    result: dict[str, object] = {"runs": runs, "requests": REQUESTS, "looks": looks}
    print(
        f"\nDays with a rollback, of {runs} with {REQUESTS:,} requests and {looks:,} checks each\n"
    )
    print("| Challenger | Qinglan | usual 95% intervals |\n| --- | ---: | ---: |")
    for domain in NOTHING_TO_FIND:
        rates = false_alarms(domain, runs)
        result[domain.name] = rates
        print(f"| {domain.name} | {rates['ours']:.1%} | {rates['usual']:.1%} |", flush=True)
    print(f"\nRequests until the rollback, at a share of {CONFIG.share:.0%}\n")
    print(f"| Challenger | found | median | slowest | median at {PER_SECOND:g}/s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for domain in BROKEN:
        delays = delay(domain, runs // 2)
        result[domain.name] = delays
        figures = f"{delays['found']:.0%} | {delays['median']:,.0f} | {delays['slowest']:,.0f}"
        median_s = delays["median"] / PER_SECOND
        print(f"| {domain.name} | {figures} | {median_s:,.0f} s |", flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
