"""What a person reads before approving: where the challenger lost, and some questions at random.

Both sides stand beside each other, which the workbook of `qinglan.review` has no place for; its cells are written the
same way. Nothing is read back: the answer is given in Prefect's form or by `qinglan release approve`.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openpyxl
from openpyxl.styles import Alignment
from openpyxl.utils import get_column_letter

from qinglan.artifacts import Artifact
from qinglan.evaluation import ArmRow
from qinglan.report_words import ARM_HEADS
from qinglan.rows import Row
from qinglan.workbook_writer import header_cell, text_cell

SHEET = "审批"
LOST, FAILED, SAMPLED = "不如{}", "无结果", "随机"
_CELL_CHARS = 32_000
_WRAPPED = Alignment(wrap_text=True, vertical="top")
ArmRows = Mapping[str, Mapping[str, ArmRow]]
"""By arm and row id."""


class Telling(NamedTuple):
    """A question worth reading."""

    row: Row
    why: str


def telling_rows(arms: ArmRows, rows: Sequence[Row], challenger: str, losses: int, sampled: int) -> list[Telling]:
    """The questions on which the challenger lost most, those where it has no result, then some others at random.

    The same ones every time; of the first two kinds `losses` each.
    """
    rivals = [arm for arm in ("champion", "teacher") if arm in arms and arm != challenger]
    lost = {row.id: beaten for row in rows if (beaten := list(_beaten_by(arms, row, challenger, rivals)))}
    hardest = sorted((row for row in rows if row.id in lost), key=lambda row: (-max(lost[row.id])[0], row.id))[:losses]
    failed = [row for row in rows if _value(arms.get(challenger, {}).get(row.id), row) is None][:losses]
    chosen = {row.id for row in (*hardest, *failed)}
    others = sorted((row for row in rows if row.id not in chosen), key=lambda row: _shuffled(row.id))[:sampled]
    named = [Telling(row, "；".join(LOST.format(ARM_HEADS[rival].zh) for _, rival in lost[row.id])) for row in hardest]
    return named + [Telling(row, FAILED) for row in failed] + [Telling(row, SAMPLED) for row in others]


def write_review_book(path: Path, telling: Sequence[Telling], arms: ArmRows, challenger: str) -> Artifact:
    """One line per question, the arms side by side."""
    shown = [arm for arm in (challenger, "champion", "teacher", "original") if arm in arms]
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet(SHEET)
    sheet.freeze_panes = "C2"
    heads = [
        *_HEADS,
        *(f"{ARM_HEADS[arm].zh if arm in ARM_HEADS else arm}：{head}" for arm in shown for head in _OF_ARM),
    ]
    for number, head in enumerate(heads, 1):
        sheet.column_dimensions[get_column_letter(number)].width = 36 if head.endswith(_WIDE) else 12
    sheet.append([header_cell(sheet, head) for head in heads])
    for row, why in telling:
        texts: list[str | float | None] = [why, row.query, row.profile, row.history, row.gold_id, row.id]
        values = [*texts, *(value for arm in shown for value in _of_arm(arms[arm].get(row.id), row))]
        sheet.append([_cell(sheet, value) for value in values])
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(heads))}{len(telling) + 1}"
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)
    return Artifact.of(path, len(telling))


_HEADS = ("抽样原因", "问题", "用户画像", "历史摘要", "标准文档", "行编号")
_OF_ARM = ("改写", "首条内容", "标准文档名次", "首条得分", "裁判分")
_WIDE = ("问题", "历史摘要", "改写", "首条内容")


def _of_arm(entry: ArmRow | None, row: Row) -> list[str | float | None]:
    if entry is None:
        return [None] * len(_OF_ARM)
    found = entry.retrieved
    if found is None:
        return [entry.text or f"（{entry.reason}）", None, None, None, entry.judge_score]
    rank = found.rank(row.gold_id) if row.gold_id else None
    title = found.titles[0] if found.titles else ""
    return [entry.text, title, rank, round(found.top1_score, 4), entry.judge_score]


def _beaten_by(arms: ArmRows, row: Row, challenger: str, rivals: Sequence[str]) -> Iterator[tuple[float, str]]:
    """By how much, and by whom: on the gold document's place where there is one, else on the RAG's score.

    Only where both have a value: a call that failed says nothing of the answer.
    """
    mine = _value(arms.get(challenger, {}).get(row.id), row)
    for rival in rivals:
        theirs = _value(arms[rival].get(row.id), row)
        if mine is not None and theirs is not None and theirs > mine:
            yield theirs - mine, rival


def _value(entry: ArmRow | None, row: Row) -> float | None:
    if entry is None or entry.retrieved is None:
        return None
    if row.gold_id is None:
        return entry.retrieved.top1_score
    rank = entry.retrieved.rank(row.gold_id)
    return 1 / rank if rank else 0.0


def _shuffled(row_id: str) -> str:
    return hashlib.sha256(f"approval {row_id}".encode()).hexdigest()


def _cell(sheet: Any, value: str | float | None) -> Any:
    if not isinstance(value, str):
        return value
    cell = text_cell(sheet, value[:_CELL_CHARS])
    cell.alignment = _WRAPPED
    return cell
