"""A teacher that could be bought in the main one's place, judged by its intervals: no further than they reach.

Better and worse need an interval on one side of 0 and a p-value that several comparisons don't explain; good enough
needs an interval that rules out a loss of more than `compare.tolerable_loss`. The rest is open.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from qinglan.evaluation import Evaluation
from qinglan.evaluation.models import ArmFigures
from qinglan.evaluation.teacher_comparison import ORIGINAL
from qinglan.recipes import Metric
from qinglan.statistics import Comparison
from qinglan.text import Both

Advice = Literal["take", "trade", "open", "keep"]

_LEVEL = 0.05
_SAME_COST = 1.05
"""Two prices within this factor are the same."""


@dataclass(frozen=True)
class Offer:
    """One rival against the main teacher."""

    arm: str
    rival: str
    main: str
    """What the two are called."""
    figures: ArmFigures
    main_figures: ArmFigures
    comparisons: Mapping[str, Comparison]
    """By metric, in the order in which they decide."""
    metrics: Mapping[str, Metric]
    texts: Both
    """What a teacher is paid for: `rewrites`."""
    gains: bool
    """It is shown to do better than no teacher at all, where that can be tried."""
    tolerable: float

    @property
    def primary(self) -> Comparison:
        return next(iter(self.comparisons.values()))

    def margin(self, metric: str) -> float:
        """The loss that is tolerated, on this metric's scale."""
        return self.tolerable * self.metrics[metric].maximum

    def standing(self, found: Comparison) -> Literal["better", "worse", "enough", "open"]:
        """What the interval says; a shown loss that is sure to be tolerable is good enough."""
        if found.ci95 is None:
            return "open"
        low, high = found.ci95
        if low > 0 and is_shown(found):
            return "better"
        if low >= -self.margin(found.metric):
            return "enough"
        return "worse" if high < 0 and is_shown(found) else "open"

    @property
    def worse(self) -> list[Comparison]:
        """Metrics on which it loses more than is tolerated."""
        return [found for found in self.comparisons.values() if self.standing(found) == "worse"]

    @property
    def price(self) -> Literal["less", "more", "same"]:
        """Against the main teacher's."""
        cost, main = self.figures.cost_per_1000_usd or 0.0, self.main_figures.cost_per_1000_usd or 0.0
        if cost * _SAME_COST < main:
            return "less"
        return "more" if cost > main * _SAME_COST else "same"

    @property
    def advice(self) -> Advice:
        """Take it, weigh money against quality, ask more questions, or keep the main teacher."""
        primary = self.standing(self.primary)
        if self.worse:
            return "trade" if primary == "better" or (self.price == "less" and self.gains) else "keep"
        if primary == "better":
            return "trade" if self.price == "more" else "take"
        if self.price != "less":
            return "keep"
        return "take" if primary == "enough" else "open"


def gains(evaluation: Evaluation, arm: str) -> bool:
    """Whether a teacher is shown to retrieve better than the original question; true where nothing is retrieved."""
    against = [c for c in evaluation.comparisons if (c.a, c.b) == (arm, ORIGINAL)]
    return ORIGINAL not in evaluation.arms or any(c.ci95 is not None and c.ci95[0] > 0 and is_shown(c) for c in against)


def is_shown(found: Comparison) -> bool:
    """Whether a difference is more than chance, with all rivals counted."""
    p = found.p_value if found.p_holm is None else found.p_holm
    return p is not None and p <= _LEVEL
