"""Writes rows to a workbook for users; a text never becomes a formula."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import openpyxl
from openpyxl.cell import Cell, WriteOnlyCell
from openpyxl.styles import Alignment, Font, PatternFill
from openpyxl.utils import get_column_letter

from qinglan.config import Columns
from qinglan.data.sources.records import without_illegal
from qinglan.errors import ConfigError
from qinglan.recipes import Input, Recipe
from qinglan.rows import Retrieved, Row
from qinglan.runs.artifacts import Artifact, written_whole

ROWS_A_SHEET = 1_048_575
"""Most rows of a sheet in Excel, less the header."""
MAX_CELL_CHARS = 32_767
"""Most characters of a cell in Excel."""

CellValue = str | float | None
WRAPPED = Alignment(wrap_text=True, vertical="top")
_YELLOW = PatternFill("solid", fgColor="FFF8DC")


class Column(NamedTuple):
    """A column of a sheet: its title, and what it shows of a row."""

    title: str
    width: int
    """Width in characters, as Excel counts it."""
    value: Callable[[Row], CellValue] = lambda _: None
    fill_in: bool = False
    """Is it for reviewers to fill in?"""
    machine: bool = False
    """Is it for the import alone?"""


def write_rows(path: Path, rows: Iterable[Row], recipe: Recipe) -> Artifact:
    """Write an .xlsx with every row and its result.

    The file's digest differs from write to write.
    """
    return write_columns(path, rows, columns_of(recipe))


def write_columns(path: Path, rows: Iterable[Row], columns: Sequence[Column]) -> Artifact:
    """Write an .xlsx with these columns of every row.

    Cells longer than Excel's 32,767 characters are cut. Rows beyond an Excel sheet's 1,048,576 go
    to further sheets.
    """
    book = openpyxl.Workbook(write_only=True)
    count = 0
    for number, numbered_rows in groupby(enumerate(rows), _sheet_number):
        sheet = book.create_sheet(f"数据{number + 1}" if number else "数据")
        count += fill_sheet(sheet, columns, (row for _, row in numbered_rows))
    if not count:
        # A workbook needs a sheet, and its reader the titles.
        fill_sheet(book.create_sheet("数据"), columns, ())
    with written_whole(path) as partial:
        book.save(partial)
    return Artifact.of(path, count)


def _sheet_number(numbered_row: tuple[int, Row]) -> int:
    """The number of the sheet that a row goes to, both counted from 0."""
    row_number, _ = numbered_row
    return row_number // ROWS_A_SHEET


def write_questions(path: Path, rows: Iterable[Row], recipe: Recipe) -> Artifact:
    """Write an .xlsx for the recipe's ingest.

    It has the questions, the recipe's inputs, and where the rows come from.
    """
    if path.exists() or path.suffix != ".xlsx":
        raise ConfigError(f"--out {path}: name an .xlsx file that is not there yet")
    question = Column(str(Columns.model_fields["query"].default), 48, lambda row: row.query)
    origin = Column("来源", 28, lambda row: row.source)
    inputs = input_columns(recipe, (question, origin), 40)
    return write_columns(path, rows, (question, *inputs, origin))


def fill_sheet(
    sheet: Any,
    columns: Sequence[Column],
    rows: Iterable[Row],
    *,
    freeze: str = "A2",
    wrapped: bool = False,
) -> int:
    """Write a header and a line a row to a sheet in openpyxl's write-only mode.

    Returns how many rows there were.
    """
    # Panes and widths come first: the mode writes them before the first line.
    sheet.freeze_panes = freeze
    header = []
    for place, column in enumerate(columns, start=1):
        sheet.column_dimensions[get_column_letter(place)].width = column.width
        cell = header_cell(sheet, column.title)
        if column.fill_in:
            cell.fill = _YELLOW
        header.append(cell)
    sheet.append(header)
    count = 0
    for row in rows:
        sheet.append([_cell(sheet, column, column.value(row), wrapped) for column in columns])
        count += 1
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(columns))}{count + 1}"
    return count


def _cell(sheet: Any, column: Column, value: CellValue, wrapped: bool) -> Cell | CellValue:
    """A column's cell; the bare value where it needs no format."""
    is_text = isinstance(value, str)
    if not wrapped and not is_text:
        return value
    # A number needs a cell of its own only for its format.
    cell = text_cell(sheet, value) if isinstance(value, str) else WriteOnlyCell(sheet, value)
    if wrapped:
        cell.alignment = WRAPPED
    if column.fill_in:
        cell.fill = _YELLOW
    if column.machine:
        cell.font = Font(color="999999", size=9)
    if column.fill_in or column.machine:
        # The format of texts, so that `=1` or `3-4` stays as typed.
        cell.number_format = "@"
    return cell


def header_cell(sheet: Any, title: str) -> Cell:
    """A bold cell, for a sheet in openpyxl's write-only mode."""
    cell = WriteOnlyCell(sheet, title)
    cell.font = Font(bold=True)
    return cell


def text_cell(sheet: Any, text: str) -> Cell:
    """A cell that holds text and stays text, without illegal characters.

    It is for a sheet in openpyxl's write-only mode.
    """
    cell = WriteOnlyCell(sheet, without_illegal(text))
    # openpyxl takes "=…" for a formula and "#N/A" for an error.
    cell.data_type = "s"
    if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        # So it stays text when a user edits the cell.
        cell.quotePrefix = True
    return cell


def of_retrieval(
    field: Literal["original_retrieved", "answer_retrieved"],
    value: Callable[[Retrieved, Row], CellValue],
) -> Callable[[Row], CellValue]:
    """A column's value from a retrieval; empty where there was none."""

    def column_value(row: Row) -> CellValue:
        retrieved: Retrieved | None = getattr(row, field)
        return None if retrieved is None else value(retrieved, row)

    return column_value


def gold_rank(retrieved: Retrieved, row: Row) -> CellValue:
    """1-based rank of the gold document, 0 where it was missed, empty where the row names none."""
    return None if row.gold_id is None else retrieved.rank(row.gold_id)


def top1_score(retrieved: Retrieved, _: Row) -> CellValue:
    """The best passage's score, as a sheet shows it."""
    return round(retrieved.top1_score, 4)


def _quality(retrieved: Retrieved, _: Row) -> CellValue:
    return round(retrieved.quality, 4)


def _first_title(retrieved: Retrieved, _: Row) -> CellValue:
    return retrieved.titles[0] if retrieved.titles else ""


def part_columns(recipe: Recipe, width: int) -> list[Column]:
    """A column for each part of an answer's score by rule."""
    return [Column(f"规则：{name}", width, _part(name)) for name in recipe.grader.rule_parts]


def _part(name: str) -> Callable[[Row], CellValue]:
    return lambda row: (row.parts or {}).get(name)


def input_titles(inputs: Iterable[Input], other_titles: Collection[str]) -> dict[str, str]:
    """A title for each input by name.

    It is that of the recipe, unless the sheet has another column of that title.
    """
    titles = {}
    for recipe_input in inputs:
        title = recipe_input.column
        if title in other_titles:
            title = f"{title}（输入）"
        titles[recipe_input.name] = title
    return titles


def input_columns(recipe: Recipe, other_columns: Iterable[Column], width: int) -> list[Column]:
    """A column for each input, titled so that it differs from the sheet's other columns."""
    titles = input_titles(recipe.INPUTS, [column.title for column in other_columns])
    return [Column(title, width, _input_text(name)) for name, title in titles.items()]


def _input_text(name: str) -> Callable[[Row], CellValue]:
    return lambda row: row.inputs.get(name, "")


def thing_of(recipe: Recipe) -> str:
    """The name of a teacher's answer."""
    return "改写" if recipe.grader.retrieves else "回答"


def columns_of(recipe: Recipe) -> tuple[Column, ...]:
    """The columns of the sheet that shows every row and its result."""
    thing = thing_of(recipe)
    graded: Sequence[Column] = _RETRIEVAL if recipe.grader.retrieves else part_columns(recipe, 12)
    results = (
        Column(thing, 48 if recipe.grader.retrieves else 64, lambda row: row.answer),
        *_VERDICT,
        *graded,
    )
    last = (
        Column("标准文档", 20, lambda row: row.gold_id),
        Column("意图", 12, lambda row: row.intent),
        Column(f"{thing}耗时（毫秒）", 17, lambda row: row.answer_latency_ms),
        Column(f"{thing}成本（美元）", 17, lambda row: row.answer_cost_usd),
        Column("来源", 28, lambda row: row.source),
        Column("行编号", 20, lambda row: row.id),
    )
    inputs = input_columns(recipe, (*_QUESTION, *results, *last), 40)
    return (*_QUESTION, *inputs, *results, *last)


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
_RETRIEVAL = (
    Column("原问题首条得分", 15, of_retrieval("original_retrieved", top1_score)),
    Column("改写首条得分", 13, of_retrieval("answer_retrieved", top1_score)),
    Column("原问题检索质量", 15, of_retrieval("original_retrieved", _quality)),
    Column("改写检索质量", 13, of_retrieval("answer_retrieved", _quality)),
    Column("原问题标准文档名次", 19, of_retrieval("original_retrieved", gold_rank)),
    Column("改写标准文档名次", 17, of_retrieval("answer_retrieved", gold_rank)),
    Column("改写首条内容", 40, of_retrieval("answer_retrieved", _first_title)),
)
