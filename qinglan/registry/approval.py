"""A person's approval of a model that the gate passed: one more rule of the decision, and what is
read before it.

The workbook shows where the challenger lost, and some questions at random, the arms side by side.
Nothing in it is read back: the answer is given in Prefect's form or by `qinglan release approve`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import openpyxl
from pydantic import BaseModel

from qinglan.data.workbook_writer import CellValue, Column, fill_sheet, input_columns
from qinglan.evaluation.figures import values_of
from qinglan.evaluation.models import APPROVAL, Decision, Rule
from qinglan.evaluation.reasons import Reason, arm_words, reason
from qinglan.recipes import Recipe
from qinglan.rows import ArmRow, Row, hash_fraction
from qinglan.runs.artifacts import Artifact
from qinglan.runs.schema_version import find_record

WAITING_FILE = "waiting.json"
SHEET = "审批"
LOST, FAILED, SAMPLED = "不如{}", "无结果", "随机"
_RETRIEVED = ("改写", "首条内容", "标准文档名次", "首条得分", "裁判分")
_ANSWERED = "回答"
_WIDE = ("改写", "首条内容", _ANSWERED)
ArmRows = Mapping[str, Mapping[str, ArmRow]]
"""By arm and row id."""


class Approval(BaseModel, frozen=True, extra="forbid"):
    approve: bool
    reviewer: str
    comment: str = ""

    @property
    def found(self) -> Reason:
        code = "approved" if self.approve else "refused"
        return reason(code, reviewer=self.reviewer or reason("nameless"), comment=self.comment)


class Waiting(BaseModel):
    """`waiting.json` in the gate's folder, for as long as the flow waits for a person."""

    flow_run_id: UUID
    api_url: str
    """Of the Prefect server that the flow runs under, without a login."""
    page: str
    until: str
    workbook: Path

    @classmethod
    def read(cls, folder: Path) -> "Waiting | None":
        return find_record(cls, folder / WAITING_FILE)


def decided_by(decision: Decision, approval: Approval | None) -> Decision:
    """The decision with a person's answer in it; `undecided` while there is none."""
    rule = partial(Rule, name=APPROVAL, required=reason("approval_needed"))
    verdict = "undecided"
    last = rule(
        outcome="unknown", found=reason("nobody_answered"), reason=reason("nobody_approved")
    )
    if approval and approval.approve:
        verdict, last = "promote", rule(outcome="pass", found=approval.found)
    elif approval:
        verdict, last = "refuse", rule(outcome="fail", found=approval.found, reason=approval.found)
    others = [each for each in decision.rules if each.name != APPROVAL]
    return decision.model_copy(update={"verdict": verdict, "rules": [*others, last]})


def lacks_only_approval(decision: Decision) -> bool:
    blocking = [rule.name for rule in decision.rules if rule.outcome != "pass"]
    return decision.verdict == "undecided" and blocking == [APPROVAL]


class RowToReview(NamedTuple):
    row: Row
    why: str


def rows_to_review(
    arms: ArmRows, rows: Sequence[Row], recipe: Recipe, challenger: str, losses: int, sampled: int
) -> list[RowToReview]:
    """Up to `losses` questions on which the challenger lost most, as many without a result, then
    some at random."""
    rivals = [arm for arm in arms if arm not in (challenger, "original")]
    lost = {
        row.id: by
        for row in rows
        if (by := list(_beaten_by(arms, row, recipe, challenger, rivals)))
    }
    hardest = sorted(
        (row for row in rows if row.id in lost), key=lambda row: (-max(lost[row.id])[0], row.id)
    )[:losses]
    failed = [
        row for row in rows if _value(arms.get(challenger, {}).get(row.id), row, recipe) is None
    ][:losses]
    chosen = {row.id for row in (*hardest, *failed)}
    others = [row for row in rows if row.id not in chosen]
    others = sorted(others, key=lambda row: hash_fraction(f"approval {row.id}"))[:sampled]
    ahead = {
        row.id: [LOST.format(arm_words(rival, head=True).zh) for _, rival in lost[row.id]]
        for row in hardest
    }
    named = [RowToReview(row, "；".join(ahead[row.id])) for row in hardest]
    return (
        named
        + [RowToReview(row, FAILED) for row in failed]
        + [RowToReview(row, SAMPLED) for row in others]
    )


def write_approval_workbook(
    path: Path, chosen: Sequence[RowToReview], arms: ArmRows, recipe: Recipe, challenger: str
) -> Artifact:
    why = {row.id: why for row, why in chosen}
    columns = [
        Column("抽样原因", 12, lambda row: why[row.id]),
        Column("问题", 36, lambda row: row.query),
        Column("用户画像", 12, lambda row: row.profile),
        Column("历史摘要", 36, lambda row: row.history),
        *input_columns(recipe, (), 12),
        *([Column("标准文档", 12, lambda row: row.gold_id)] if recipe.grader.retrieves else []),
        Column("行编号", 12, lambda row: row.id),
    ]
    for arm in (challenger, *(arm for arm in arms if arm != challenger)):
        columns += _columns_of(arm, arms[arm], recipe)
    book = openpyxl.Workbook(write_only=True)
    fill_sheet(
        book.create_sheet(SHEET), columns, [row for row, _ in chosen], freeze="C2", wrapped=True
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)
    return Artifact.of(path, len(chosen))


def _columns_of(arm: str, entries: Mapping[str, ArmRow], recipe: Recipe) -> Iterator[Column]:
    heads = (
        _RETRIEVED
        if recipe.grader.retrieves
        else (_ANSWERED, *(metric.zh for metric in recipe.grader.metrics))
    )
    for place, head in enumerate(heads):

        def value(row: Row, place: int = place) -> CellValue:
            entry = entries.get(row.id)
            return _of_arm(entry, row, recipe)[place] if entry else None

        yield Column(f"{arm_words(arm, head=True).zh}：{head}", 36 if head in _WIDE else 12, value)


def _of_arm(entry: ArmRow, row: Row, recipe: Recipe) -> list[CellValue]:
    text, found = entry.text or f"（{entry.reason}）", entry.retrieved
    if not recipe.grader.retrieves:
        values = values_of(entry, row, recipe)
        return [text, *(values.get(metric.name) for metric in recipe.grader.metrics)]
    if found is None:
        return [text, None, None, None, entry.judge_score]
    rank = found.rank(row.gold_id) if row.gold_id else None
    title = found.titles[0] if found.titles else ""
    return [text, title, rank, round(found.top1_score, 4), entry.judge_score]


def _beaten_by(
    arms: ArmRows, row: Row, recipe: Recipe, challenger: str, rivals: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """By how much, and by whom; only where both have a value: a call that failed says nothing of
    the answer."""
    mine = _value(arms.get(challenger, {}).get(row.id), row, recipe)
    for rival in rivals:
        theirs = _value(arms[rival].get(row.id), row, recipe)
        if mine is not None and theirs is not None and theirs > mine:
            yield theirs - mine, rival


def _value(entry: ArmRow | None, row: Row, recipe: Recipe) -> float | None:
    """By the gold document's place where there is one, else by the RAG's score; of answers, by the
    first metric."""
    if entry is not None and not recipe.grader.retrieves:
        values = values_of(entry, row, recipe)
        return next(
            (values[metric.name] for metric in recipe.grader.metrics if metric.name in values), None
        )
    if entry is None or entry.retrieved is None:
        return None
    if row.gold_id is None:
        return entry.retrieved.top1_score
    rank = entry.retrieved.rank(row.gold_id)
    return 1 / rank if rank else 0.0
