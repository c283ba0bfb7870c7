"""The metrics by which texts are compared, as a grader declares them."""

from dataclasses import dataclass
from typing import NamedTuple

from qinglan.text import Both

JUDGE = "judge"
"""The part of a reward that the judge gives: its score / 5. Beside the other parts its score is
logged unchanged, 0–5."""
QUALITY = "quality"
"""The metric that is the judge's score, 0–5."""


@dataclass(frozen=True)
class Metric:
    """A figure of one row's text.

    `quality` is the judge's score, 0–5, in every recipe; the gate has a rule for it. `en` and `zh`
    are nouns, which sentences use: `RL student 0.91 vs SFT student 0.84 keyword coverage`.
    """

    name: str
    en: str
    zh: str
    maximum: float = 1.0
    """Upper end of the scale, which begins at 0: 5 for a judge's score."""
    proportion: bool = True
    """Each row's value is 0 or 1: McNemar's test applies, and the report's short table shows it."""
    digits: int = 3
    interval: bool = True
    """An arm's mean is shown with an interval. Only such metrics are shown by slice, and decide
    which teacher to buy."""
    compared: bool = True
    """The metric is compared between arms."""

    @property
    def words(self) -> Both:
        return Both(self.en, self.zh)


JUDGE_SCORE = Metric(
    QUALITY, "judge score (0–5)", "裁判评分（0–5）", maximum=5.0, proportion=False, digits=2
)
"""The judge's score of a text."""


class PrimaryMetric(NamedTuple):
    """The part of the reward that says how good the policy is, and its name in a sentence."""

    part: str
    words: str
