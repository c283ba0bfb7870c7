"""The workbook out: every row with its verdict, for people.

Text never becomes a formula, whatever it begins with.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openpyxl
from openpyxl.cell import Cell, WriteOnlyCell
from openpyxl.styles import Font
from openpyxl.utils import get_column_letter

from qinglan.data.sources.records import without_illegal
from qinglan.recipes import Input, Recipe
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import Artifact

ROWS_A_SHEET = 1_048_575
"""Excel's limit, less the header."""


class Column(NamedTuple):
    """A column of the sheet."""

    title: str
    width: int
    value: Callable[[Row], str | float | None]


def write_rows(path: Path, rows: Iterable[Row], recipe: Recipe) -> Artifact:
    """An .xlsx with every row and its verdict, for people; the file's digest differs from write to write.

    Text never becomes a formula, whatever it begins with; cells longer than Excel's 32,767 characters are cut. What
    goes beyond an Excel sheet's 1,048,576 rows stands on further sheets.
    """
    book = openpyxl.Workbook(write_only=True)
    columns, count, filled = columns_of(recipe), 0, 0
    sheet = _new_sheet(book, 1, columns)
    for row in rows:
        if filled == ROWS_A_SHEET:
            _close(sheet, filled, columns)
            sheet, filled = _new_sheet(book, count // ROWS_A_SHEET + 1, columns), 0
        sheet.append([_cell(sheet, column.value(row)) for column in columns])
        count, filled = count + 1, filled + 1
    _close(sheet, filled, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    book.save(partial)
    partial.replace(path)
    return Artifact.of(path, count)


def header_cell(sheet: Any, title: str) -> Cell:
    """A bold cell, for a sheet in openpyxl's write-only mode."""
    cell = WriteOnlyCell(sheet, title)
    cell.font = Font(bold=True)
    return cell


def text_cell(sheet: Any, text: str) -> Cell:
    """A cell that holds text and stays text, for a sheet in openpyxl's write-only mode; illegal characters go."""
    cell = WriteOnlyCell(sheet, without_illegal(text))
    cell.data_type = "s"  # openpyxl takes "=…" for a formula and "#N/A" for an error
    if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        cell.quotePrefix = True  # stays text when somebody edits the cell
    return cell


def _new_sheet(book: Any, number: int, columns: Sequence[Column]) -> Any:
    sheet = book.create_sheet("数据" if number == 1 else f"数据{number}")
    sheet.freeze_panes = "A2"
    for place, column in enumerate(columns, 1):
        sheet.column_dimensions[get_column_letter(place)].width = column.width
    sheet.append([header_cell(sheet, column.title) for column in columns])
    return sheet


def _close(sheet: Any, rows: int, columns: Sequence[Column]) -> None:
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(columns))}{rows + 1}"
    sheet.close()  # write-only sheets go to disk as they are filled; this one is complete


def _cell(sheet: Any, value: str | float | None) -> Cell | float | None:
    return text_cell(sheet, value) if isinstance(value, str) else value


def _of(retrieved: Callable[[Row], Retrieved | None], what: Callable[[Retrieved], str | float | None]) -> Any:
    """A column over a retrieval that may not have happened."""

    def value(row: Row) -> str | float | None:
        found = retrieved(row)
        return None if found is None else what(found)

    return value


def _original(row: Row) -> Retrieved | None:
    return row.original_retrieved


def _rewritten(row: Row) -> Retrieved | None:
    return row.answer_retrieved


def _gold_rank(retrieved: Callable[[Row], Retrieved | None]) -> Callable[[Row], int | None]:
    """1-based rank of the gold document, 0 where it was missed, empty where there is none to find."""

    def value(row: Row) -> int | None:
        found = retrieved(row)
        return None if found is None or row.gold_id is None else found.rank(row.gold_id)

    return value


def _top1_score(found: Retrieved) -> float:
    return round(found.top1_score, 4)


def _quality(found: Retrieved) -> float:
    return round(found.quality, 4)


def _first_title(found: Retrieved) -> str:
    return found.titles[0] if found.titles else ""


def _input(name: str) -> Callable[[Row], str]:
    return lambda row: row.inputs.get(name, "")


def _part(name: str) -> Callable[[Row], float | None]:
    return lambda row: (row.parts or {}).get(name)


def input_titles(inputs: Iterable[Input], taken: Collection[str]) -> dict[str, str]:
    """A column's title for each input by name: what the recipe calls it, unless the sheet has another of that title."""
    return {each.name: f"{each.column}（输入）" if each.column in taken else each.column for each in inputs}


def columns_of(recipe: Recipe) -> tuple[Column, ...]:
    """What people see of a row: what was asked, what came of it, where it stands."""
    results: tuple[Column, ...] = _REWRITE
    costs = _REWRITE_COSTS
    if not recipe.retrieves:
        parts = (Column(f"规则：{name}", 12, _part(name)) for name in recipe.rule_parts)
        results, costs = (*_ANSWER, *parts), _ANSWER_COSTS
    fixed = (*_QUESTION, *results, *_LABELS, *costs, *_PLACE)
    titles = input_titles(recipe.INPUTS, [column.title for column in fixed])
    inputs = tuple(Column(title, 40, _input(name)) for name, title in titles.items())
    return (*_QUESTION, *inputs, *results, *_LABELS, *costs, *_PLACE)


_QUESTION = (
    Column("问题", 48, lambda row: row.query),
    Column("用户画像", 24, lambda row: row.profile),
    Column("历史摘要", 32, lambda row: row.history),
)
_VERDICT = (
    Column("状态", 8, lambda row: row.status),
    Column("原因", 22, lambda row: row.reason),
    Column("划分", 8, lambda row: row.split),
    Column("数据池", 10, lambda row: row.pool),
    Column("裁判分", 9, lambda row: row.judge_score),
)
_ANSWER = (Column("回答", 64, lambda row: row.answer), *_VERDICT)
_REWRITE = (
    Column("改写", 48, lambda row: row.answer),
    *_VERDICT,
    Column("原问题首条得分", 15, _of(_original, _top1_score)),
    Column("改写首条得分", 13, _of(_rewritten, _top1_score)),
    Column("原问题检索质量", 15, _of(_original, _quality)),
    Column("改写检索质量", 13, _of(_rewritten, _quality)),
    Column("原问题标准文档名次", 19, _gold_rank(_original)),
    Column("改写标准文档名次", 17, _gold_rank(_rewritten)),
    Column("改写首条内容", 40, _of(_rewritten, _first_title)),
)
_LABELS = (
    Column("标准文档", 20, lambda row: row.gold_id),
    Column("意图", 12, lambda row: row.intent),
)
_REWRITE_COSTS = (
    Column("改写耗时（毫秒）", 17, lambda row: row.answer_latency_ms),
    Column("改写成本（美元）", 17, lambda row: row.answer_cost_usd),
)
_ANSWER_COSTS = (
    Column("回答耗时（毫秒）", 17, lambda row: row.answer_latency_ms),
    Column("回答成本（美元）", 17, lambda row: row.answer_cost_usd),
)
_PLACE = (
    Column("来源", 28, lambda row: row.source),
    Column("行编号", 20, lambda row: row.id),
)
