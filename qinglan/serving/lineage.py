"""From a figure back to what it was made of: version → run → evaluate stage → rows → workbook cell
and paid calls.

The figure is computed again from the rows and must be the one that was reported.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from qinglan.clients.roles import site_ledger
from qinglan.config import Profile
from qinglan.errors import ConfigError
from qinglan.evaluation.figures import scores_of
from qinglan.evaluation.models import Evaluation
from qinglan.ledger import Call, Ledger
from qinglan.recipes import get_recipe
from qinglan.registry import ALIASES, Released, registry_of
from qinglan.rows import ArmRow, Row
from qinglan.runs.artifacts import StageResult, read_jsonl
from qinglan.runs.run import find_run, stage_of

_TOLERANCE = 1e-9


class Subject(NamedTuple):
    """Whose figure: an arm of a run and, where it was registered, the version."""

    released: Released | None
    run: Path
    arm: str


class Figure(NamedTuple):
    metric: str
    reported: float | None
    recomputed: float | None
    rows: int
    """That have a value."""
    of: int
    stage: StageResult
    file: Path

    @property
    def agrees(self) -> bool:
        if self.reported is None or self.recomputed is None:
            return self.reported is self.recomputed
        return abs(self.reported - self.recomputed) <= _TOLERANCE


class PaidCall(NamedTuple):
    role: str
    request: str
    at_s: float | None
    call: Call | None
    """None where the ledger does not have it, such as after it was moved."""


class RowTrace(NamedTuple):
    """One test question: where it came from, what the arm made of it, and what was paid for it."""

    row: Row
    value: float | None
    entry: ArmRow
    teacher: ArmRow | None
    paid: list[PaidCall]


def subject_of(profile: Profile, name: str, arm: str | None = None) -> Subject:
    """What an alias, a version's number or a run means; a run's arm is the profile's challenger if
    not given."""
    if name in ALIASES or name.isdigit():
        released = registry_of(profile).named(name)
        if arm and arm != released.arm:
            problem = f"is the {released.arm} arm of its run"
            raise ConfigError(f"release {released.version}: {problem}; leave out --arm {arm}")
        return Subject(released, find_run(profile.paths.runs, released.run_id), released.arm)
    return Subject(None, find_run(profile.paths.runs, name), arm or profile.gate.challenger)


def figure_of(profile: Profile, subject: Subject, metric: str | None = None) -> Figure:
    """A metric, the first of the recipe's if none is named, as reported and as the mean over the
    arm's rows."""
    stage, rows, entries = _evaluated(subject)
    stage.artifacts["evaluation"].verify()
    evaluation = stage.load("evaluation", Evaluation)
    arm = evaluation.arms[subject.arm]
    metric = metric or next(
        (each.name for each in evaluation.metrics if arm.mean(each.name) is not None), ""
    )
    present = [
        value for value in _values(profile, metric, entries, rows).values() if value is not None
    ]
    recomputed, file = (
        sum(present) / len(present) if present else None,
        stage.path(f"arm_{subject.arm}"),
    )
    return Figure(metric, arm.mean(metric), recomputed, len(present), len(entries), stage, file)


def rows_behind(
    profile: Profile, subject: Subject, metric: str, ids: Sequence[str] = (), worst: int = 0
) -> list[RowTrace]:
    """Rows by id, or those with the lowest values, followed to workbook and ledger."""
    stage, rows, entries = _evaluated(subject)
    values, by_id = _values(profile, metric, entries, rows), {row.id: row for row in rows}
    if unknown := [each for each in ids if each not in by_id]:
        raise ConfigError(
            f"row `{unknown[0]}`: is not among the {len(rows):,} test questions of {subject.run.name}"
        )
    lowest = sorted((value, each) for each, value in values.items() if value is not None)[:worst]
    arm = {entry.row_id: entry for entry in entries}
    has_teacher = subject.arm != "teacher" and "arm_teacher" in stage.artifacts
    teachers = {entry.row_id: entry for entry in _entries(stage, "teacher")} if has_teacher else {}
    traces: list[RowTrace] = []
    with site_ledger(profile) as ledger:
        for each in ids or [each for _, each in lowest]:
            paid = _paid_calls(ledger, arm[each], by_id[each])
            traces.append(RowTrace(by_id[each], values[each], arm[each], teachers.get(each), paid))
    return traces


def _evaluated(subject: Subject) -> tuple[StageResult, list[Row], list[ArmRow]]:
    stage = stage_of(subject.run, "evaluate")
    test = stage_of(subject.run, "dataset").artifacts["test"].verify()
    return stage, list(read_jsonl(test, Row)), _entries(stage, subject.arm)


def _entries(stage: StageResult, arm: str) -> list[ArmRow]:
    if (artifact := stage.artifacts.get(f"arm_{arm}")) is None:
        known = ", ".join(
            name.removeprefix("arm_") for name in stage.artifacts if name.startswith("arm_")
        )
        raise ConfigError(f"run {stage.run_id}: did not evaluate an arm `{arm}`; it has {known}")
    return list(read_jsonl(artifact.verify(), ArmRow))


def _values(
    profile: Profile, metric: str, entries: Sequence[ArmRow], rows: Sequence[Row]
) -> dict[str, float | None]:
    scores = scores_of(entries, rows, get_recipe(profile.recipe))
    if metric not in scores:
        raise ConfigError(
            f"metric `{metric}`: is not a mean over rows; those are {', '.join(scores)}"
        )
    # A recipe may give True for 1.
    return {row: None if value is None else float(value) for row, value in scores[metric].items()}


def _paid_calls(ledger: Ledger, entry: ArmRow, row: Row) -> list[PaidCall]:
    paid: list[PaidCall] = []
    for key in dict.fromkeys(filter(None, (row.answer_request, *entry.requests))):
        call = ledger.get(key)
        tries = ledger.attempts("request_hash", key)
        at_s = [each.created_s for each in tries if call and each.outcome == call.finish_reason]
        role = "teacher" if key == row.answer_request else "judge"
        paid.append(PaidCall(call.role if call else role, key, at_s[-1] if at_s else None, call))
    return paid
