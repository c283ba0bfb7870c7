"""Planned checks, their results, and a hint for each problem.

They serve `qinglan doctor` and the start of a flow.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Literal

from qinglan.errors import QinglanError, first_line

TimeLimit = Literal["quick", "slow", "longest"]
TIME_LIMITS_S: dict[TimeLimit, float] = {"quick": 12.0, "slow": 22.0, "longest": 25.0}
"""Limits in `qinglan doctor`: for one request; for several, or a process; for what also cleans up
on a cluster."""
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
"""Hint by check, for a problem whose message comes from deeper down and only names it."""
_CHATS = ("teacher", "answerer", "judge")
_COMPARED_TEACHERS = "compare.teachers."


@dataclass(frozen=True)
class Check:
    """A check's result; without a problem all is well or nothing is known."""

    name: str
    detail: str
    problem: str | None = None
    note: str | None = None
    """Says more where there is no problem."""

    def with_hint(self) -> "Check":
        """The check with a hint behind a semicolon, where its problem does not say what to do."""
        if self.problem is None or "; " in self.problem:
            return self
        return replace(self, problem=f"{self.problem.rstrip('. ')}; {_hint_for(self.name)}")


@dataclass(frozen=True)
class PlannedCheck:
    """A check to be made, which may have several results."""

    group: str
    name: str
    detail: str
    make: Callable[[], Check | list[Check]]
    time_limit: TimeLimit = "quick"

    def run(self) -> list[Check]:
        checks = self.make()
        return checks if isinstance(checks, list) else [checks]


def run_check(name: str, detail: str, find_problem: Callable[[], str | None]) -> Check:
    """Run `find_problem`, which raises an error of ours for a problem and may return a note."""
    try:
        note = find_problem()
    except QinglanError as error:
        return Check(name, detail, str(error))
    return Check(name, detail, note=note)


def start_check(planned: PlannedCheck) -> Callable[[], tuple[list[Check], float]]:
    """Start a check; the function that is returned waits for its results and its seconds.

    A check that fails or is not done in time has that as its problem.
    """
    start = time.monotonic()
    limit_s = TIME_LIMITS_S[planned.time_limit]
    future: Future[tuple[list[Check], float]] = Future()

    def run() -> None:
        try:
            future.set_result((planned.run(), time.monotonic() - start))
        except BaseException as error:  # noqa: BLE001 (raised where the result is taken)
            future.set_exception(error)

    def wait() -> tuple[list[Check], float]:
        try:
            return future.result(max(0.0, start + limit_s - time.monotonic()))
        # A proxy that httpx2 refuses, or a bug: the other checks go on.
        except Exception as error:  # noqa: BLE001
            if future.done():
                failure = f"{type(error).__name__}: {first_line(error)}"
                why = f"{failure}; a setting that a library refuses, or a bug: please report it"
            else:
                why = (
                    f"no result after {limit_s:.0f} s; does it hang, or drop packets? "
                    "Try it by hand from here"
                )
        problem = f"{planned.name} ({planned.detail}): {why}"
        return [Check(planned.name, planned.detail, problem)], time.monotonic() - start

    # A daemon's end is not waited for, so that a check that hangs does not hold up doctor's.
    threading.Thread(target=run, daemon=True).start()
    return wait


def _hint_for(name: str) -> str:
    role = name.removesuffix(" answers")
    section, _, _ = role.partition(".")
    if section in _CHATS or role.startswith(_COMPARED_TEACHERS):
        return f"correct {role} in the profile, or ask the service by hand"
    return HINTS.get(name, "see docs/how-to/operate.md")
