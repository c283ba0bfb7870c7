"""Does the challenger go on? Decided from running counts, as often as one likes.

A canary is checked every few seconds for a day, so all bounds here are confidence sequences: the
chance that the truth ever leaves them is below α, over all checks together. They are the stitched
bounds of Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric, nonasymptotic
confidence sequences" (Annals of Statistics 49, 2021), theorems 1 and 4; for percentiles in the way
of Howard and Ramdas, "Sequential estimation of quantiles" (Bernoulli 28, 2022).
"""

import math
from typing import Literal

from pydantic import BaseModel, PrivateAttr

from qinglan.config import Canary
from qinglan.text import count, duration, interval, latency, signed

ALPHA = 0.05
"""The chance that a challenger exactly as bad as is just allowed is ever rolled back, over all
rules and checks."""
MOST_QUESTIONS = 200_000
"""Whose ids are kept in memory for each model, some 25 MB; then they are forgotten, and may count
again."""
_RULES = 3
_PERCENTILE = 0.95
_BIN_RATIO = 1.02
"""Latencies are kept in bins this far apart: a day of them takes a few hundred numbers."""

# The stitching: epochs in which the variance doubles, each with its share of α; optimised for
# variance 1 and beyond.
_ETA, _S, _V_MIN = 2.0, 1.4, 1.0
_ZETA_S = 3.1055472779775806
"""Riemann's zeta of 1.4."""
_K1 = (_ETA**0.25 + _ETA**-0.25) / math.sqrt(2)
_K2 = (math.sqrt(_ETA) + 1) / 2

Outcome = Literal["keep", "roll_back", "better", "undecided"]


def stitched_bound(variance: float, alpha: float, scale: float, v_min: float = _V_MIN) -> float:
    """What a sum of centred outcomes, with that variance so far, stays below for ever, with
    probability 1 − α.

    `scale` is of their sub-gamma tail; the length of their range serves for any of them.
    """
    v = max(variance, v_min)
    level = _S * math.log(math.log(_ETA * v / v_min)) + math.log(
        _ZETA_S / (alpha * math.log(_ETA) ** _S)
    )
    return math.sqrt(_K1**2 * v * level + (_K2 * scale * level) ** 2) + _K2 * scale * level


class Mean(BaseModel):
    """The mean of outcomes in a known range, with bounds that hold at every check."""

    width: float = 1.0
    """Of the range: 1 for a share, 2 for a difference of scores."""
    n: int = 0
    total: float = 0.0
    variance: float = 0.0
    """Sum of squared distances from the mean before each outcome."""

    def add(self, outcome: float) -> None:
        self.variance += (outcome - self.mean) ** 2
        self.n += 1
        self.total += outcome

    @property
    def mean(self) -> float:
        return self.total / self.n if self.n else 0.0

    def interval(self, alpha: float = ALPHA / _RULES) -> tuple[float, float]:
        radius = stitched_bound(self.variance, alpha, self.width) / self.n if self.n else math.inf
        return self.mean - radius, self.mean + radius


class Latencies(BaseModel):
    """Milliseconds in bins of 2%, with bounds of the 95th percentile that hold at every check."""

    n: int = 0
    bins: dict[int, int] = {}

    def add(self, ms: float) -> None:
        place = math.floor(math.log(max(ms, 0.01)) / math.log(_BIN_RATIO))
        self.bins[place] = self.bins.get(place, 0) + 1
        self.n += 1

    @property
    def p95(self) -> float | None:
        return self._at(_PERCENTILE) * math.sqrt(_BIN_RATIO) if self.n else None

    def p95_interval(self, alpha: float) -> tuple[float, float]:
        if not self.n:
            return 0.0, math.inf
        # "Below the true percentile" is a coin with a known probability; a coin's scale is a third
        # (Bennett).
        error = stitched_bound(self.n * _PERCENTILE * (1 - _PERCENTILE), alpha, 1 / 3) / self.n
        low = self._at(_PERCENTILE - error) if error < _PERCENTILE else 0.0
        high = self._at(_PERCENTILE + error) * _BIN_RATIO if _PERCENTILE + error < 1 else math.inf
        return low, high

    def _at(self, rank: float) -> float:
        wanted, seen = rank * self.n, 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= wanted:
                break
        return float(_BIN_RATIO**place)


class ArmCounts(BaseModel):
    fallbacks: Mean = Mean()
    """By question and outcome: one that is asked often goes to one model each time, so it is no new
    evidence."""
    latency: Latencies = Latencies()
    """By request."""
    _seen: set[tuple[str, bool]] = PrivateAttr(default_factory=set)

    def add(self, question: str, *, fallback: bool, latency_ms: float) -> bool:
        """Returns whether the question is new. It counts once, and once more where its outcome
        changes."""
        self.latency.add(latency_ms)
        if (question, fallback) in self._seen:
            return False
        if len(self._seen) >= MOST_QUESTIONS:
            self._seen.clear()
        self._seen.add((question, fallback))
        self.fallbacks.add(float(fallback))
        return (question, not fallback) not in self._seen


class CanaryCounts(BaseModel):
    champion: ArmCounts = ArmCounts()
    challenger: ArmCounts = ArmCounts()
    retrieval: Mean = Mean(width=2.0)
    """Of the same question's best passage: the challenger's score less the champion's."""


class Judgement(BaseModel, frozen=True, extra="forbid"):
    outcome: Outcome
    reason: str


def judge(counts: CanaryCounts, config: Canary, seconds: float) -> Judgement:
    """May the challenger go on after `seconds`? Safe to ask at any time and any number of times."""
    for rule in (_fails_more, _is_slower, _retrieves_worse):
        if reason := rule(counts, config):
            return Judgement(outcome="roll_back", reason=reason)
    low = counts.retrieval.interval()[0]
    found = f"{counts.challenger.latency.n:,} requests, retrieval {describe_difference(counts.retrieval)}"
    if seconds < config.keep_for_s:
        return Judgement(outcome="keep", reason=found)
    span = duration(seconds)
    if counts.challenger.latency.n >= config.min_requests and low > 0:
        return Judgement(outcome="better", reason=f"it retrieves better after {span}: {found}")
    return Judgement(outcome="undecided", reason=f"no difference was found within {span}: {found}")


def _fails_more(counts: CanaryCounts, config: Canary) -> str | None:
    alpha = ALPHA / _RULES / 2
    champion, challenger = counts.champion.fallbacks, counts.challenger.fallbacks
    # A champion that got no request yet (share 1) is taken as one that never fails.
    most = champion.interval(alpha)[1] if champion.n else 0.0
    least = challenger.interval(alpha)[0]
    if least <= most + config.max_error_gain:
        return None
    failed = f"{challenger.mean:.1%} of its {challenger.n:,} questions were not answered by it"
    theirs = f"the champion's {champion.mean:.1%} of {champion.n:,} is at most {most:.1%}"
    return f"{failed}, at least {least:.1%} for sure; {theirs}, and {config.max_error_gain:.1%} more are allowed"


def _is_slower(counts: CanaryCounts, config: Canary) -> str | None:
    alpha = ALPHA / _RULES / 2
    champion, challenger = counts.champion.latency, counts.challenger.latency
    if challenger.n < config.min_requests:
        return None
    least = challenger.p95_interval(alpha)[0]
    most = config.max_latency_ratio * champion.p95_interval(alpha)[1]
    if least <= most:
        return None
    return (
        f"its p95 latency of {latency(challenger.p95)} ms is at least {latency(least)} ms for sure; the champion's "
        f"{latency(champion.p95)} ms allow at most {latency(most)} ms ({config.max_latency_ratio:g} times)"
    )


def _retrieves_worse(counts: CanaryCounts, config: Canary) -> str | None:
    if counts.retrieval.interval()[1] >= -config.max_retrieval_loss:
        return None
    loss = f"worse by {describe_difference(counts.retrieval)} in the best passage's score"
    return f"retrieval of the same questions is {loss}; a loss of {config.max_retrieval_loss:g} is allowed"


def describe_difference(mean: Mean) -> str:
    if not mean.n:
        return "not compared yet"
    low, high = mean.interval()
    return f"{signed(mean.mean)} {interval((max(low, -1.0), min(high, 1.0)))} over {count(mean.n)} pairs"
