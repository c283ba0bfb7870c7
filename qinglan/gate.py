"""May this model be released? Rules over a finished evaluation, each with what was found and what was required."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Verdict = Literal["promote", "refuse", "undecided"]


class Rule(BaseModel):
    """One requirement and how it came out."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Such as `retrieval_vs_teacher`, `quality_vs_champion`, `cost`, `latency`, `red_team`, `alarms`."""
    outcome: Literal["pass", "fail", "unknown"]
    """`unknown` where the test set can't tell, or nothing was measured; it blocks like a failure, and says so."""
    found: str
    """What was measured, in words: `+0.119 [0.073, 0.167]`."""
    required: str
    reason: str = ""
    """In one sentence, why it failed or what is missing, and what would help."""


class Decision(BaseModel):
    """The gate's answer, for `report.json`, MLflow and Prefect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Verdict
    """`undecided`: nothing failed, but something is unknown."""
    challenger: str
    """The arm."""
    champion: str | None = None
    """Version of the registered model that is to be replaced, if there is one."""
    rules: list[Rule]
    sentence: str
    """The decision in one line, with its reasons."""
