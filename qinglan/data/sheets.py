"""Sheets of workbooks for users: columns, cells and formats; a text never becomes a formula."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import openpyxl
from openpyxl.cell import Cell, WriteOnlyCell
from openpyxl.styles import Alignment, Font, PatternFill
from openpyxl.utils import get_column_letter

from qinglan.data.sources.records import without_illegal
from qinglan.rows import Row
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
