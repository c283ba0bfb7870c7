"""Planned checks, their results, and a hint for each problem: for `qinglan doctor` and the start of
a flow."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal

from qinglan.errors import QinglanError, first_line

TIME_LIMITS_S = {"quick": 12.0, "slow": 22.0, "longest": 25.0}
"""In `qinglan doctor`: for one request; for several, or a process; for what also cleans up on a
cluster."""
HINTS = {
    "recipe": "correct the profile, or the recipe's file (docs/how-to/add-a-recipe.md)",
    "workbook": "correct data, or what it names",
    "compare": "correct compare.teachers",
    "red team": "correct evaluate.red_team, or what it names (docs/reference/gate.md)",
    "champion": "bring its files back, or promote another version: `qinglan release list`",
    "local judge": "correct judge.local, or leave it out",
    "rag": "correct the service, or what the rag section names (docs/how-to/rag.md)",
    "ledger": "correct ledger.url_env, or the database that it names",
    "base model": "correct student.base_model",
    "schedule": "correct sft, rl or dataset",
    "critic model": "correct rl.critic_model",
    "device": "correct the trainer section, or run on another machine",
    "ray": "see the cluster's own log, or correct trainer.ray_dashboard_url",
    "trainer packages": "correct trainer.python, or run `make setup`",
    "mount": "see the cluster's own log, or correct trainer.ray_dashboard_url",
}
"""By check, for a problem whose message comes from deeper down and only names it."""


@dataclass(frozen=True)
class Check:
    """A check's result; without a problem where all is well or nothing is known, and then `note`
    says more."""

    name: str
    detail: str
    problem: str | None = None
    note: str | None = None

    def with_hint(self) -> "Check":
        """The same; a problem that does not say what to do, behind a semicolon, gets a hint."""
        if self.problem is None or "; " in self.problem:
            return self
        hint = HINTS.get(self.name, "see docs/how-to/operate.md")
        role = self.name.removesuffix(" answers")
        if role.partition(".")[0] in ("teacher", "answerer", "judge") or role.startswith(
            "compare.teachers."
        ):
            hint = f"correct {role} in the profile, or ask the service by hand"
        return replace(self, problem=f"{self.problem.rstrip('. ')}; {hint}")


@dataclass(frozen=True)
class PlannedCheck:
    """A check that may have several results."""

    group: str
    name: str
    detail: str
    make: Callable[[], Check | list[Check]]
    time_limit: Literal["quick", "slow", "longest"] = "quick"

    def run(self) -> list[Check]:
        made = self.make()
        return made if isinstance(made, list) else [made]


def run_check(name: str, detail: str, find_problem: Callable[[], object]) -> Check:
    """Run `find_problem`, which raises an error of ours for a problem; text that it returns is a
    note."""
    try:
        found = find_problem()
    except QinglanError as error:
        return Check(name, detail, str(error))
    return Check(name, detail, note=found if isinstance(found, str) else None)


def start_check(planned: PlannedCheck) -> Callable[[], tuple[list[Check], float]]:
    """Start a check; what is returned waits for its results and its seconds. A failure becomes a
    problem, too."""
    began, name, limit_s = (
        time.monotonic(),
        f"{planned.name} ({planned.detail})",
        TIME_LIMITS_S[planned.time_limit],
    )
    future: Future[tuple[list[Check], float]] = Future()

    def run() -> None:
        try:
            future.set_result((planned.run(), time.monotonic() - began))
        except BaseException as error:  # noqa: BLE001 (raised where the result is taken)
            future.set_exception(error)

    threading.Thread(
        target=run, daemon=True
    ).start()  # a daemon: one that hangs does not hold up the end

    def wait() -> tuple[list[Check], float]:
        try:
            return future.result(max(0.0, began + limit_s - time.monotonic()))
        except Exception as error:  # noqa: BLE001 (a proxy that httpx2 refuses, a bug: the other checks go on)
            why = f"no result after {limit_s:.0f} s; does it hang, or drop packets? Try it by hand from here"
            if future.done():
                first = f"{type(error).__name__}: {first_line(error)}"
                why = f"{first}; a setting that a library refuses, or a bug: please report it"
        return [Check(planned.name, planned.detail, f"{name}: {why}")], time.monotonic() - began

    return wait
