"""A person's approval of a model that the gate passed: one more rule of the decision, and what is read before it.

The workbook shows where the challenger lost, and some questions at random, the arms side by side. Nothing in it is read
back: the answer is given in Prefect's form or by `qinglan release approve`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import openpyxl
from openpyxl.styles import Alignment
from openpyxl.utils import get_column_letter
from pydantic import BaseModel, ValidationError

from qinglan.data.workbook_writer import header_cell, text_cell
from qinglan.evaluation.figures import values_of
from qinglan.evaluation.models import APPROVAL, Decision, Rule
from qinglan.evaluation.reasons import Reason, arm_words, reason
from qinglan.recipes import Recipe
from qinglan.rows import ArmRow, Row, hash_fraction
from qinglan.runs.artifacts import Artifact
from qinglan.runs.schema_version import read_record

WAITING_FILE = "waiting.json"
SHEET = "审批"
LOST, FAILED, SAMPLED = "不如{}", "无结果", "随机"
_RETRIEVED = ("改写", "首条内容", "标准文档名次", "首条得分", "裁判分")
_ANSWERED = "回答"
_WIDE = ("问题", "历史摘要", "改写", "首条内容", _ANSWERED)
_CELL_CHARS = 32_000
_WRAPPED = Alignment(wrap_text=True, vertical="top")
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
        try:
            return read_record(cls, folder / WAITING_FILE)
        except (FileNotFoundError, ValidationError):
            return None


def decided_by(decision: Decision, approval: Approval | None) -> Decision:
    """The decision with a person's answer in it; `undecided` while there is none."""
    rule = partial(Rule, name=APPROVAL, required=reason("approval_needed"))
    if approval is None:
        verdict = "undecided"
        last = rule(outcome="unknown", found=reason("nobody_answered"), reason=reason("nobody_approved"))
    elif approval.approve:
        verdict, last = "promote", rule(outcome="pass", found=approval.found)
    else:
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
    """Up to `losses` questions on which the challenger lost most, as many without a result, then some at random."""
    rivals = [arm for arm in arms if arm not in (challenger, "original")]
    lost = {row.id: by for row in rows if (by := list(_beaten_by(arms, row, recipe, challenger, rivals)))}
    hardest = sorted((row for row in rows if row.id in lost), key=lambda row: (-max(lost[row.id])[0], row.id))[:losses]
    failed = [row for row in rows if _value(arms.get(challenger, {}).get(row.id), row, recipe) is None][:losses]
    chosen = {row.id for row in (*hardest, *failed)}
    others = [row for row in rows if row.id not in chosen]
    others = sorted(others, key=lambda row: hash_fraction(f"approval {row.id}"))[:sampled]
    named: list[RowToReview] = []
    for row in hardest:
        rivals_ahead = (LOST.format(arm_words(rival, head=True).zh) for _, rival in lost[row.id])
        named.append(RowToReview(row, "；".join(rivals_ahead)))
    return named + [RowToReview(row, FAILED) for row in failed] + [RowToReview(row, SAMPLED) for row in others]


def write_approval_workbook(
    path: Path, chosen: Sequence[RowToReview], arms: ArmRows, recipe: Recipe, challenger: str
) -> Artifact:
    shown = [challenger, *(arm for arm in arms if arm != challenger)]
    of_question, of_arm = _heads_of(recipe)
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet(SHEET)
    sheet.freeze_panes = "C2"
    heads = [*of_question, *(f"{arm_words(arm, head=True).zh}：{head}" for arm in shown for head in of_arm)]
    for number, head in enumerate(heads, 1):
        sheet.column_dimensions[get_column_letter(number)].width = 36 if head.endswith(_WIDE) else 12
    sheet.append([header_cell(sheet, head) for head in heads])
    for row, why in chosen:
        inputs = [row.inputs.get(each.name) for each in recipe.INPUTS]
        label = [row.gold_id] if recipe.retrieves else []
        texts: list[str | float | None] = [why, row.query, row.profile, row.history, *inputs, *label, row.id]
        values = [*texts, *(value for arm in shown for value in _of_arm(arms[arm].get(row.id), row, recipe))]
        sheet.append([_cell(sheet, value) for value in values])
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(heads))}{len(chosen) + 1}"
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)
    return Artifact.of(path, len(chosen))


def _heads_of(recipe: Recipe) -> tuple[list[str], list[str]]:
    inputs, retrieves = [each.column for each in recipe.INPUTS], recipe.retrieves
    asked = ["抽样原因", "问题", "用户画像", "历史摘要", *inputs, *(["标准文档"] if retrieves else []), "行编号"]
    return asked, list(_RETRIEVED) if retrieves else [_ANSWERED, *(metric.zh for metric in recipe.METRICS)]


def _of_arm(entry: ArmRow | None, row: Row, recipe: Recipe) -> list[str | float | None]:
    if entry is None:
        return [None] * len(_heads_of(recipe)[1])
    text, found = entry.text or f"（{entry.reason}）", entry.retrieved
    if not recipe.retrieves:
        values = values_of(entry, row, recipe)
        return [text, *(values.get(metric.name) for metric in recipe.METRICS)]
    if found is None:
        return [text, None, None, None, entry.judge_score]
    rank = found.rank(row.gold_id) if row.gold_id else None
    title = found.titles[0] if found.titles else ""
    return [text, title, rank, round(found.top1_score, 4), entry.judge_score]


def _beaten_by(
    arms: ArmRows, row: Row, recipe: Recipe, challenger: str, rivals: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """By how much, and by whom; only where both have a value: a call that failed says nothing of the answer."""
    mine = _value(arms.get(challenger, {}).get(row.id), row, recipe)
    for rival in rivals:
        theirs = _value(arms[rival].get(row.id), row, recipe)
        if mine is not None and theirs is not None and theirs > mine:
            yield theirs - mine, rival


def _value(entry: ArmRow | None, row: Row, recipe: Recipe) -> float | None:
    """By the gold document's place where there is one, else by the RAG's score; of answers, by the first metric."""
    if entry is not None and not recipe.retrieves:
        values = values_of(entry, row, recipe)
        return next((values[metric.name] for metric in recipe.METRICS if metric.name in values), None)
    if entry is None or entry.retrieved is None:
        return None
    if row.gold_id is None:
        return entry.retrieved.top1_score
    rank = entry.retrieved.rank(row.gold_id)
    return 1 / rank if rank else 0.0


def _cell(sheet: Any, value: str | float | None) -> Any:
    if not isinstance(value, str):
        return value
    cell = text_cell(sheet, value[:_CELL_CHARS])
    cell.alignment = _WRAPPED
    return cell
