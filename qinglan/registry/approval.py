"""A person's approval of a model that the gate passed, and the workbook to read before giving it.

The workbook shows questions on which the challenger lost or gave no result, and some questions at
random, the arms side by side. Nothing in it is read back: the answer is given in Prefect's form or
by `qinglan release approve`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import openpyxl
from pydantic import BaseModel

from qinglan.data.grade_columns import NARROW, WIDE, grade_columns
from qinglan.data.sheets import CellValue, Column, fill_sheet
from qinglan.data.workbook_writer import input_columns
from qinglan.evaluation.models import APPROVAL, Decision, Rule, Verdict
from qinglan.evaluation.reasons import Reason, arm_words, reason
from qinglan.recipes import Recipe
from qinglan.rows import ArmRow, Row, hash_fraction
from qinglan.runs.artifacts import Artifact
from qinglan.runs.schema_version import find_record

WAITING_FILE = "waiting.json"
SHEET = "审批"
LOST = "不如{}"
FAILED = "无结果"
SAMPLED = "随机"
ArmRows = Mapping[str, Mapping[str, ArmRow]]
"""Rows by arm and row id."""


class Approval(BaseModel, frozen=True, extra="forbid"):
    """A person's answer about a model that the gate passed."""

    approve: bool
    reviewer: str
    comment: str = ""

    @property
    def found(self) -> Reason:
        """The answer in the words of a rule of the decision."""
        code = "approved" if self.approve else "refused"
        reviewer = self.reviewer or reason("nameless")
        return reason(code, reviewer=reviewer, comment=self.comment)


class Waiting(BaseModel):
    """The file `waiting.json` in the gate's folder, for as long as the flow waits for a person."""

    flow_run_id: UUID
    api_url: str
    """Address of the Prefect server that the flow runs under, without a login."""
    page: str
    until: str
    workbook: Path

    @classmethod
    def read(cls, folder: Path) -> "Waiting | None":
        return find_record(cls, folder / WAITING_FILE)


def decided_by(decision: Decision, approval: Approval | None) -> Decision:
    """The decision with a person's answer as its last rule.

    It is `undecided` while there is no answer.
    """
    approval_rule = partial(Rule, name=APPROVAL, required=reason("approval_needed"))
    verdict: Verdict
    if approval is None:
        verdict = "undecided"
        last_rule = approval_rule(
            outcome="unknown",
            found=reason("nobody_answered"),
            reason=reason("nobody_approved"),
        )
    elif approval.approve:
        verdict = "promote"
        last_rule = approval_rule(outcome="pass", found=approval.found)
    else:
        verdict = "refuse"
        last_rule = approval_rule(outcome="fail", found=approval.found, reason=approval.found)
    gate_rules = [rule for rule in decision.rules if rule.name != APPROVAL]
    return decision.model_copy(update={"verdict": verdict, "rules": [*gate_rules, last_rule]})


def lacks_only_approval(decision: Decision) -> bool:
    """Tell whether a person's approval is all that keeps the model from its release."""
    blocking = [rule.name for rule in decision.rules if rule.outcome != "pass"]
    return decision.verdict == "undecided" and blocking == [APPROVAL]


class RowToReview(NamedTuple):
    row: Row
    why: str


class _Defeat(NamedTuple):
    """A question on which a rival did better than the challenger."""

    gap: float
    rival: str


def rows_to_review(
    arms: ArmRows, rows: Sequence[Row], recipe: Recipe, challenger: str, losses: int, sampled: int
) -> list[RowToReview]:
    """The questions that a person is to look at, each with the reason for it.

    These are up to `losses` questions on which the challenger lost most, as many on which it has
    no result, and `sampled` of the others at random.
    """
    rivals = [arm for arm in arms if arm not in (challenger, "original")]
    defeats_by_row: dict[str, list[_Defeat]] = {}
    lost_rows: list[Row] = []
    failed_rows: list[Row] = []
    for row in rows:
        value = _value(arms.get(challenger, {}).get(row.id), row, recipe)
        if value is None:
            failed_rows.append(row)
            continue
        rival_values = {rival: _value(arms[rival].get(row.id), row, recipe) for rival in rivals}
        defeats = _defeats(value, rival_values)
        if defeats:
            defeats_by_row[row.id] = defeats
            lost_rows.append(row)

    def by_largest_gap(row: Row) -> tuple[float, str]:
        return -max(defeats_by_row[row.id]).gap, row.id

    lost_rows = sorted(lost_rows, key=by_largest_gap)[:losses]
    failed_rows = failed_rows[:losses]
    chosen_ids = {row.id for row in (*lost_rows, *failed_rows)}
    other_rows = [row for row in rows if row.id not in chosen_ids]
    other_rows = sorted(other_rows, key=lambda row: hash_fraction(f"approval {row.id}"))[:sampled]
    chosen: list[RowToReview] = []
    for row in lost_rows:
        chosen.append(RowToReview(row, _names_of_winners(defeats_by_row[row.id])))
    for row in failed_rows:
        chosen.append(RowToReview(row, FAILED))
    for row in other_rows:
        chosen.append(RowToReview(row, SAMPLED))
    return chosen


def _defeats(value: float, rival_values: Mapping[str, float | None]) -> list[_Defeat]:
    """The rivals whose value is above the challenger's, and by how much.

    A rival without a value does not count: a call that failed says nothing of the answer.
    """
    defeats: list[_Defeat] = []
    for rival, rival_value in rival_values.items():
        if rival_value is not None and rival_value > value:
            defeats.append(_Defeat(rival_value - value, rival))
    return defeats


def _names_of_winners(defeats: Iterable[_Defeat]) -> str:
    return "；".join(LOST.format(arm_words(defeat.rival, head=True).zh) for defeat in defeats)


def write_approval_workbook(
    path: Path, chosen: Sequence[RowToReview], arms: ArmRows, recipe: Recipe, challenger: str
) -> Artifact:
    why = {row_to_review.row.id: row_to_review.why for row_to_review in chosen}
    columns = [
        Column("抽样原因", NARROW, lambda row: why[row.id]),
        Column("问题", WIDE, lambda row: row.query),
        Column("用户画像", NARROW, lambda row: row.profile),
        Column("历史摘要", WIDE, lambda row: row.history),
        *input_columns(recipe, (), NARROW),
        *grade_columns(recipe).of_question,
        Column("行编号", NARROW, lambda row: row.id),
    ]
    columns += _columns_of(challenger, arms[challenger], recipe)
    for arm, entries in arms.items():
        if arm != challenger:
            columns += _columns_of(arm, entries, recipe)
    book = openpyxl.Workbook(write_only=True)
    rows = [row_to_review.row for row_to_review in chosen]
    fill_sheet(book.create_sheet(SHEET), columns, rows, freeze="C2", wrapped=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)
    return Artifact.of(path, len(chosen))


def _columns_of(arm: str, entries: Mapping[str, ArmRow], recipe: Recipe) -> Iterator[Column]:
    """The columns that show one arm's results; `entries` are by row id."""
    arm_name = arm_words(arm, head=True).zh
    for column in grade_columns(recipe).of_arm:
        cell = partial(_cell, entries, column.value)
        yield Column(f"{arm_name}：{column.title}", column.width, cell)


def _cell(
    entries: Mapping[str, ArmRow], value: Callable[[ArmRow, Row], CellValue], row: Row
) -> CellValue:
    entry = entries.get(row.id)
    return None if entry is None else value(entry, row)


def _value(entry: ArmRow | None, row: Row, recipe: Recipe) -> float | None:
    """The value by which an arm's result for one question is compared; None where there is none."""
    return None if entry is None else recipe.grader.value_to_compare(entry, row)
