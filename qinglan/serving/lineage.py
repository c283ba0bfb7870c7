"""Follows a figure back to what it was made of.

The way is version → run → evaluate stage → rows → workbook cell and paid calls. The figure is
computed again from the rows and must be the one that was reported.
"""

from collections.abc import Mapping, Sequence
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
    """An arm of a run and, where it was registered, the version, whose figures are followed."""

    released: Released | None
    run: Path
    arm: str


class Figure(NamedTuple):
    metric: str
    reported: float | None
    recomputed: float | None
    rows: int
    """Rows that have a value."""
    of: int
    """All rows of the arm."""
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
    """The subject that an alias, a version's number or a run means.

    Args:
        arm: of a run; the profile's challenger if not given.
    """
    if name in ALIASES or name.isdigit():
        released = registry_of(profile).named(name)
        if arm and arm != released.arm:
            problem = f"is the {released.arm} arm of its run"
            raise ConfigError(f"release {released.version}: {problem}; leave out --arm {arm}")
        return Subject(released, find_run(profile.paths.runs, released.run_id), released.arm)
    return Subject(None, find_run(profile.paths.runs, name), arm or profile.gate.challenger)


def figure_of(profile: Profile, subject: Subject, metric: str | None = None) -> Figure:
    """A metric as reported, and as the mean over the arm's rows.

    Args:
        metric: the first of the recipe's that the arm has if none is named.
    """
    stage, rows, entries = _evaluated(subject)
    stage.artifacts["evaluation"].verify()
    evaluation = stage.load("evaluation", Evaluation)
    arm = evaluation.arms[subject.arm]
    if not metric:
        names = [recipe_metric.name for recipe_metric in evaluation.metrics]
        measured_names = [name for name in names if arm.mean(name) is not None]
        metric = measured_names[0] if measured_names else ""
    values = _values(profile, metric, entries, rows)
    present = [value for value in values.values() if value is not None]
    return Figure(
        metric=metric,
        reported=arm.mean(metric),
        recomputed=sum(present) / len(present) if present else None,
        rows=len(present),
        of=len(entries),
        stage=stage,
        file=stage.path(f"arm_{subject.arm}"),
    )


def rows_behind(
    profile: Profile, subject: Subject, metric: str, ids: Sequence[str] = (), worst: int = 0
) -> list[RowTrace]:
    """Rows followed to workbook and ledger: those with these ids, or the worst ones.

    Args:
        worst: how many rows with the lowest values, where no ids are given.
    """
    stage, rows, entries = _evaluated(subject)
    values = _values(profile, metric, entries, rows)
    rows_by_id = {row.id: row for row in rows}
    for row_id in ids:
        if row_id not in rows_by_id:
            raise ConfigError(
                f"row `{row_id}`: is not among the {len(rows):,} test questions "
                f"of {subject.run.name}"
            )
    chosen_ids = list(ids) or _worst_ids(values, worst)
    entries_by_id = {entry.row_id: entry for entry in entries}
    teacher_entries: dict[str, ArmRow] = {}
    if subject.arm != "teacher" and "arm_teacher" in stage.artifacts:
        teacher_entries = {entry.row_id: entry for entry in _entries(stage, "teacher")}
    traces: list[RowTrace] = []
    with site_ledger(profile) as ledger:
        for row_id in chosen_ids:
            row = rows_by_id[row_id]
            entry = entries_by_id[row_id]
            trace = RowTrace(
                row=row,
                value=values[row_id],
                entry=entry,
                teacher=teacher_entries.get(row_id),
                paid=_paid_calls(ledger, entry, row),
            )
            traces.append(trace)
    return traces


def _worst_ids(values: Mapping[str, float | None], count: int) -> list[str]:
    """The ids of the rows with the lowest values."""
    present = [(value, row_id) for row_id, value in values.items() if value is not None]
    return [row_id for _, row_id in sorted(present)[:count]]


def _evaluated(subject: Subject) -> tuple[StageResult, list[Row], list[ArmRow]]:
    stage = stage_of(subject.run, "evaluate")
    test = stage_of(subject.run, "dataset").artifacts["test"].verify()
    return stage, list(read_jsonl(test, Row)), _entries(stage, subject.arm)


def _entries(stage: StageResult, arm: str) -> list[ArmRow]:
    artifact = stage.artifacts.get(f"arm_{arm}")
    if artifact is None:
        arms = [name for name in stage.artifacts if name.startswith("arm_")]
        names = ", ".join(name.removeprefix("arm_") for name in arms)
        raise ConfigError(f"run {stage.run_id}: did not evaluate an arm `{arm}`; it has {names}")
    return list(read_jsonl(artifact.verify(), ArmRow))


def _values(
    profile: Profile, metric: str, entries: Sequence[ArmRow], rows: Sequence[Row]
) -> dict[str, float | None]:
    """The metric's values by row id."""
    scores = scores_of(entries, rows, get_recipe(profile.recipe))
    if metric not in scores:
        raise ConfigError(
            f"metric `{metric}`: is not a mean over rows; those are {', '.join(scores)}"
        )
    values: dict[str, float | None] = {}
    for row_id, score in scores[metric].items():
        # A recipe may give True for 1.
        values[row_id] = None if score is None else float(score)
    return values


def _paid_calls(ledger: Ledger, entry: ArmRow, row: Row) -> list[PaidCall]:
    """The calls behind one row: the teacher's, then the arm's."""
    keys = [key for key in (row.answer_request, *entry.requests) if key]
    calls: list[PaidCall] = []
    # The teacher's own arm has the call of its answer once more.
    for key in dict.fromkeys(keys):
        call = ledger.get(key)
        role = "teacher" if key == row.answer_request else "judge"
        at_s = None
        if call:
            role = call.role
            for attempt in ledger.attempts("request_hash", key):
                # The attempt that was paid ended as the call in the ledger did.
                if attempt.outcome == call.finish_reason:
                    at_s = attempt.created_s
        calls.append(PaidCall(role, key, at_s, call))
    return calls
