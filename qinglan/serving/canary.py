"""Decides from running counts whether the challenger goes on, as often as one likes.

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
"""Questions whose ids are kept in memory for each model, some 25 MB.

Beyond that they are forgotten, and may count again.
"""
_RULES = 3
_TWO_ARM_ALPHA = ALPHA / _RULES / 2
"""Part of α for one arm's bound, where a rule compares the bounds of two."""
_PERCENTILE = 0.95
_BIN_RATIO = 1.02
"""Ratio between the bins of latencies; a day of them takes a few hundred numbers."""
_LEAST_MS = 0.01

# The stitching: epochs in which the variance doubles, each with its share of α; optimised for
# variance 1 and beyond.
_ETA = 2.0
_S = 1.4
_V_MIN = 1.0
_ZETA_S = 3.1055472779775806
"""Riemann's zeta of 1.4."""
_K1 = (_ETA**0.25 + _ETA**-0.25) / math.sqrt(2)
_K2 = (math.sqrt(_ETA) + 1) / 2

Outcome = Literal["keep", "roll_back", "better", "undecided"]


def stitched_bound(variance: float, alpha: float, scale: float, v_min: float = _V_MIN) -> float:
    """The bound below which a sum of centred outcomes stays for ever, with probability 1 − α.

    Args:
        variance: of the sum so far.
        scale: of the outcomes' sub-gamma tail; the length of their range serves for any of them.
    """
    v = max(variance, v_min)
    level = _S * math.log(math.log(_ETA * v / v_min)) + math.log(
        _ZETA_S / (alpha * math.log(_ETA) ** _S)
    )
    return math.sqrt(_K1**2 * v * level + (_K2 * scale * level) ** 2) + _K2 * scale * level


class Mean(BaseModel):
    """The mean of outcomes in a known range, with bounds that hold at every check."""

    width: float = 1.0
    """Length of the outcomes' range: 1 for a share, 2 for a difference of scores."""
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
        if not self.n:
            return -math.inf, math.inf
        radius = stitched_bound(self.variance, alpha, self.width) / self.n
        return self.mean - radius, self.mean + radius


class Latencies(BaseModel):
    """Milliseconds in bins of 2%, with bounds of the 95th percentile that hold at every check."""

    n: int = 0
    bins: dict[int, int] = {}

    def add(self, ms: float) -> None:
        place = math.floor(math.log(max(ms, _LEAST_MS)) / math.log(_BIN_RATIO))
        self.bins[place] = self.bins.get(place, 0) + 1
        self.n += 1

    @property
    def p95(self) -> float | None:
        """The middle of the bin that holds the percentile; None before the first latency."""
        if not self.n:
            return None
        return self._lower_edge(_PERCENTILE) * math.sqrt(_BIN_RATIO)

    def p95_interval(self, alpha: float) -> tuple[float, float]:
        if not self.n:
            return 0.0, math.inf
        # "Below the true percentile" is a coin with a known probability; a coin's scale is a third
        # (Bennett).
        variance = self.n * _PERCENTILE * (1 - _PERCENTILE)
        error = stitched_bound(variance, alpha, 1 / 3) / self.n
        low = 0.0
        if error < _PERCENTILE:
            low = self._lower_edge(_PERCENTILE - error)
        high = math.inf
        if _PERCENTILE + error < 1:
            high = self._lower_edge(_PERCENTILE + error) * _BIN_RATIO
        return low, high

    def _lower_edge(self, rank: float) -> float:
        """The lower edge of the bin that holds this share of the latencies, in milliseconds."""
        count_at_rank = rank * self.n
        count_so_far = 0
        for place in sorted(self.bins):
            count_so_far += self.bins[place]
            if count_so_far >= count_at_rank:
                break
        return float(_BIN_RATIO**place)


class ArmCounts(BaseModel):
    """The results of one of the two models."""

    fallbacks: Mean = Mean()
    """Share of answers that were not the model's.

    It counts a question and outcome once: a question that is asked often goes to one model each
    time, so it is no new evidence.
    """
    latency: Latencies = Latencies()
    """Latencies of all requests."""
    _counted: set[tuple[str, bool]] = PrivateAttr(default_factory=set)
    """The questions that were counted, with their outcomes."""

    def add(self, question: str, *, fallback: bool, latency_ms: float) -> bool:
        """Count a request; returns whether the question is new.

        A question counts once, and once more where its outcome changes.
        """
        self.latency.add(latency_ms)
        if (question, fallback) in self._counted:
            return False
        if len(self._counted) >= MOST_QUESTIONS:
            self._counted.clear()
        self._counted.add((question, fallback))
        self.fallbacks.add(float(fallback))
        has_other_outcome = (question, not fallback) in self._counted
        return not has_other_outcome


class CanaryCounts(BaseModel):
    champion: ArmCounts = ArmCounts()
    challenger: ArmCounts = ArmCounts()
    retrieval: Mean = Mean(width=2.0)
    """The challenger's score less the champion's, of the same question's best passage."""


class Judgement(BaseModel, frozen=True, extra="forbid"):
    outcome: Outcome
    reason: str


def judge(counts: CanaryCounts, config: Canary, seconds: float) -> Judgement:
    """Decide whether the challenger may go on after `seconds`.

    It is safe to ask at any time and any number of times.
    """
    for rule in (_fails_more, _is_slower, _retrieves_worse):
        problem = rule(counts, config)
        if problem:
            return Judgement(outcome="roll_back", reason=problem)
    requests = counts.challenger.latency.n
    difference = describe_difference(counts.retrieval)
    evidence = f"{requests:,} requests, retrieval {difference}"
    if seconds < config.keep_for_s:
        return Judgement(outcome="keep", reason=evidence)
    span = duration(seconds)
    least_gain, _ = counts.retrieval.interval()
    if requests >= config.min_requests and least_gain > 0:
        reason = f"it retrieves better after {span}: {evidence}"
        return Judgement(outcome="better", reason=reason)
    reason = f"no difference was found within {span}: {evidence}"
    return Judgement(outcome="undecided", reason=reason)


def _fails_more(counts: CanaryCounts, config: Canary) -> str | None:
    champion = counts.champion.fallbacks
    challenger = counts.challenger.fallbacks
    # A champion that got no request yet (share 1) counts as one that never fails.
    most_of_champion = 0.0
    if champion.n:
        _, most_of_champion = champion.interval(_TWO_ARM_ALPHA)
    least_of_challenger, _ = challenger.interval(_TWO_ARM_ALPHA)
    if least_of_challenger <= most_of_champion + config.max_error_gain:
        return None
    return (
        f"{challenger.mean:.1%} of its {challenger.n:,} questions were not answered by it, "
        f"at least {least_of_challenger:.1%} for sure; "
        f"the champion's {champion.mean:.1%} of {champion.n:,} is at most {most_of_champion:.1%}, "
        f"and {config.max_error_gain:.1%} more are allowed"
    )


def _is_slower(counts: CanaryCounts, config: Canary) -> str | None:
    champion = counts.champion.latency
    challenger = counts.challenger.latency
    if challenger.n < config.min_requests:
        return None
    least_of_challenger, _ = challenger.p95_interval(_TWO_ARM_ALPHA)
    _, most_of_champion = champion.p95_interval(_TWO_ARM_ALPHA)
    allowed_ms = config.max_latency_ratio * most_of_champion
    if least_of_challenger <= allowed_ms:
        return None
    return (
        f"its p95 latency of {latency(challenger.p95)} ms is at least "
        f"{latency(least_of_challenger)} ms for sure; "
        f"the champion's {latency(champion.p95)} ms allow at most {latency(allowed_ms)} ms "
        f"({config.max_latency_ratio:g} times)"
    )


def _retrieves_worse(counts: CanaryCounts, config: Canary) -> str | None:
    _, most_gain = counts.retrieval.interval()
    if most_gain >= -config.max_retrieval_loss:
        return None
    loss = f"worse by {describe_difference(counts.retrieval)} in the best passage's score"
    return (
        f"retrieval of the same questions is {loss}; "
        f"a loss of {config.max_retrieval_loss:g} is allowed"
    )


def describe_difference(mean: Mean) -> str:
    if not mean.n:
        return "not compared yet"
    low, high = mean.interval()
    # A difference of two scores can't be larger than 1, whatever the bound says.
    bounds = interval((max(low, -1.0), min(high, 1.0)))
    return f"{signed(mean.mean)} {bounds} over {count(mean.n)} pairs"
