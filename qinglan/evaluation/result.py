"""What an evaluation found: `evaluation.json`."""

from pydantic import BaseModel

from qinglan.recipes import Finding, Metric
from qinglan.redteam import RedTeamResult
from qinglan.report import Arm, ArmName, Example, Shared, Slice
from qinglan.statistics import Comparison


class Evaluation(BaseModel):
    """What the evaluate stage hands to gate and report."""

    metrics: list[Metric] = []
    """The recipe's, in the order in which they decide."""
    arms: dict[ArmName, Arm]
    comparisons: list[Comparison]
    examples: list[Example]
    shared: list[Shared]
    slices: list[Slice] = []
    red_team: dict[ArmName, list[RedTeamResult]] = {}
    """Of the students; the base model is not tried."""
    findings: list[Finding] = []
    """Tables of the recipe's own."""
    unjudged: dict[str, int] = {}
    """Questions that no arm has a judge's score for, by the reason why the panel's call failed."""
