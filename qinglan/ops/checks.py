"""A planned check, its result, and a hint for each: for `qinglan doctor` and the start of a flow."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from qinglan.errors import QinglanError

TIME_LIMITS_S = {"quick": 12.0, "slow": 22.0, "longest": 25.0}
"""In `qinglan doctor`: for one request; for several, or a process; for what also cleans up on a cluster."""
_SEPARATOR = "; "
"""Stands in a message between what is wrong and what to do about it."""
HINTS = {
    "recipe": "correct the profile, or the recipe's file (docs/add-a-recipe.md)",
    "workbook": "correct data, or what it names",
    "compare": "correct compare.teachers",
    "red team": "correct evaluate.red_team, or what it names (docs/red-team.md)",
    "champion": "bring its files back, or promote another version: `qinglan release list`",
    "local judge": "correct judge.local, or leave it out",
    "rag": "correct the service, or what the rag section names (docs/rag-service.md)",
    "ledger": "correct ledger.url_env, or the database that it names",
    "base model": "correct student.base_model",
    "critic model": "correct rl.critic_model",
    "device": "correct the trainer section, or run on another machine",
    "ray": "see the cluster's own log, or correct trainer.ray_dashboard_url",
    "trainer packages": "correct trainer.python, or run `make setup`",
    "prefect": "correct the address, or unset what names it",
    "mlflow": "correct tracking.uri",
    "mount": "see the cluster's own log, or correct trainer.ray_dashboard_url",
    "nodes": "install the same environment on every node",
}
"""By check, for a problem whose message comes from deeper down and only names it."""


@dataclass(frozen=True)
class Check:
    """A check's result; without a problem where all is well or nothing is known, and then `note` says more."""

    name: str
    detail: str
    problem: str | None = None
    note: str | None = None

    def with_hint(self) -> "Check":
        """The same; a problem that does not say what to do gets a hint."""
        if self.problem is None or _SEPARATOR in self.problem:
            return self
        hint = HINTS.get(self.name, "see docs/doctor.md")
        role = self.name.removesuffix(" answers")
        if role.partition(".")[0] in ("teacher", "answerer", "judge") or role.startswith("compare.teachers."):
            hint = f"correct {role} in the profile, or ask the service by hand"
        return replace(self, problem=f"{self.problem.rstrip('. ')}{_SEPARATOR}{hint}")


@dataclass(frozen=True)
class PlannedCheck:
    """A check that may have several results."""

    group: str
    name: str
    detail: str
    run: Callable[[], list[Check]]
    time_limit: Literal["quick", "slow", "longest"] = "quick"


def run_check(name: str, detail: str, find_problem: Callable[[], str | None]) -> Check:
    """Run `find_problem`, which raises an error of ours for a problem and may return a note."""
    try:
        return Check(name, detail, note=find_problem())
    except QinglanError as error:
        return Check(name, detail, str(error))
