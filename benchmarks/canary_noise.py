"""How often does a canary roll back a model that is no worse, and how soon one that is?

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
"""For the delays in time."""
QUESTIONS = 2_000
"""That there are, where they repeat. How often one comes goes by its rank, as Zipf's law says."""
SPREAD, RETRIEVAL_NOISE = 0.4, 0.25
"""Of the logarithm of the latency; of the difference between two rewrites' scores for one
question."""
RESULT = Path(__file__).parent / "results" / "canary_noise.json"
CONFIG = Canary()
Z = 2.128
"""One-sided, at a third of 5%."""


@dataclass(frozen=True)
class Domain:
    """What is true of the two models."""

    name: str
    champion_fails: float = 0.01
    challenger_fails: float = 0.01
    slower: float = 1.0
    retrieval: float = 0.0
    share: float = CONFIG.share
    zipf: float | None = None
    """The exponent; without it no question comes twice."""


EQUAL = Domain("equal")
NOTHING_TO_FIND = (
    EQUAL,
    replace(EQUAL, name="equal, both fail often", champion_fails=0.2, challenger_fails=0.2),
    replace(EQUAL, name="equal, half of the traffic", share=0.5),
    replace(
        EQUAL,
        name="equal, half of the traffic, both fail on the same 5% of questions, which repeat (Zipf 1.2)",
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
    rng, counts, drawn = random.Random(seed), CanaryCounts(), dict[int, tuple[bool, bool]]()
    asked: Iterable[int] = range(REQUESTS)
    if domain.zipf:
        weights = [1 / rank**domain.zipf for rank in range(1, QUESTIONS + 1)]
        asked = rng.choices(range(QUESTIONS), weights, k=REQUESTS)
    for number, question in enumerate(asked, 1):
        if (
            question not in drawn
        ):  # a question goes to the same model each time, which fails on it each time or never
            challenged = rng.random() < domain.share
            fails = rng.random() < (
                domain.challenger_fails if challenged else domain.champion_fails
            )
            drawn[question] = challenged, fails
        challenged, fails = drawn[question]
        arm = counts.challenger if challenged else counts.champion
        latency_ms = rng.lognormvariate(4.6, SPREAD) * (domain.slower if challenged else 1.0)
        is_first = arm.add(str(question), fallback=fails, latency_ms=latency_ms)
        if is_first and rng.random() < CONFIG.compare_share:
            counts.retrieval.add(max(-1.0, min(1.0, rng.gauss(domain.retrieval, RETRIEVAL_NOISE))))
        if number % LOOK_EVERY == 0:
            yield counts


def false_alarms(domain: Domain, runs: int) -> dict[str, float]:
    """Share of days with a rollback, by each method."""
    found: Counter[str] = Counter()
    for seed in range(runs):
        ours = usual = False
        for counts in traffic(domain, seed):
            ours = ours or judge(counts, CONFIG, 0.0).outcome == "roll_back"
            usual = usual or usual_rollback(counts)
        found.update({"ours": ours, "usual": usual})
    return {name: found[name] / runs for name in ("ours", "usual")}


def usual_rollback(counts: CanaryCounts) -> bool:
    """Failures and retrieval by the usual intervals of a single look, of the same total level."""
    bad, good, pairs = counts.challenger.fallbacks, counts.champion.fallbacks, counts.retrieval
    if min(bad.n, good.n, pairs.n) < CONFIG.min_requests:
        return False
    error = math.hypot(*(math.sqrt(mean.mean * (1 - mean.mean) / mean.n) for mean in (bad, good)))
    if bad.mean - good.mean - Z * error > CONFIG.max_error_gain:
        return True
    return pairs.mean + Z * math.sqrt(pairs.variance) / pairs.n < -CONFIG.max_retrieval_loss


def delay(domain: Domain, runs: int) -> dict[str, float]:
    """Requests until the rollback: median and slowest, of the days on which there was one; nan
    without any."""
    found = []
    for seed in range(runs):
        for look, counts in enumerate(traffic(domain, seed), 1):
            if judge(counts, CONFIG, 0.0).outcome == "roll_back":
                found.append(look * LOOK_EVERY)
                break
    if not found:
        return {"found": 0.0, "median": math.nan, "slowest": math.nan}
    return {"found": len(found) / runs, "median": statistics.median(found), "slowest": max(found)}


def main(runs: int = RUNS) -> None:
    """Simulate, print, and keep the numbers."""
    result: dict[str, object] = {
        "runs": runs,
        "requests": REQUESTS,
        "looks": REQUESTS // LOOK_EVERY,
    }
    print(
        f"\nDays with a rollback, of {runs} with {REQUESTS:,} requests and {REQUESTS // LOOK_EVERY:,} checks each\n"
    )
    print("| Challenger | Qinglan | usual 95% intervals |\n| --- | ---: | ---: |")
    for domain in NOTHING_TO_FIND:
        rates = false_alarms(domain, runs)
        result[domain.name] = rates
        print(f"| {domain.name} | {rates['ours']:.1%} | {rates['usual']:.1%} |", flush=True)
    print(f"\nRequests until the rollback, at a share of {CONFIG.share:.0%}\n")
    print(
        f"| Challenger | found | median | slowest | median at {PER_SECOND:g}/s |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for domain in BROKEN:
        found = delay(domain, runs // 2)
        result[domain.name] = found
        figures = f"{found['found']:.0%} | {found['median']:,.0f} | {found['slowest']:,.0f}"
        print(f"| {domain.name} | {figures} | {found['median'] / PER_SECOND:,.0f} s |", flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
