"""A review workbook as a stream of lines, each with the cells that an import looks at."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openpyxl.cell import MergedCell
from openpyxl.utils import get_column_letter

from qinglan.data.review.sheet import CORRECTED, SHEET, VERDICT
from qinglan.data.sources.excel import CORRUPT, damage, load_book
from qinglan.errors import WorkbookError


class Line:
    """One line of the sheet: its used cells by what their column is."""

    def __init__(self, prefix: str, cells: Mapping[str, Any]) -> None:
        self._prefix, self._cells = prefix, cells

    def at(self, title: str) -> str:
        """`file!sheet!cell`."""
        return f"{self._prefix}!{self.place(title)}"

    def place(self, title: str) -> str:
        """Such as `K7`."""
        return str(self._cells[title].coordinate)

    def text(self, title: str) -> str:
        """What the cell shows, stripped; 12.0 as 12."""
        value = self._cells[title].value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return "" if value is None else str(value).strip()

    def is_blank(self) -> bool:
        """Is there nothing on the line?"""
        return not any(self.text(title) for title in self._cells)

    def has_answer(self) -> bool:
        """A verdict, a rewrite, or a merge that hides one."""
        return any(self.text(t) or isinstance(self._cells[t], MergedCell) for t in (VERDICT, CORRECTED))

    def unreadable(self) -> Iterator[str]:
        """Cells whose value is not what the reviewer sees."""
        for title, cell in self._cells.items():
            if isinstance(cell, MergedCell):
                yield f"{self.at(title)}: is merged with other cells; unmerge them and give every row its own value"
            elif cell.data_type == "f":
                yield f"{self.at(title)}: holds a formula; paste its result as a value"
            elif cell.data_type == "e":
                yield f"{self.at(title)}: holds the error {self.text(title)}; write text"


def read_file(path: Path) -> bytes:
    """The file's content.

    Raises:
        WorkbookError: there is no such file, or it can't be read.
    """
    if not path.is_file():
        raise WorkbookError(f"{path}: no such file; give the filled-in review workbook")
    try:
        return path.read_bytes()
    except OSError as error:
        raise WorkbookError(f"{path}: can't be read: {error.strerror or error}; check its permissions") from error


def lines_of(path: Path, content: bytes, columns: Mapping[str, str]) -> Iterator[Line]:
    """Every line below the header, wherever the columns stand.

    Args:
        columns: the titles of those that are used, by what they are.

    Raises:
        WorkbookError: the file is damaged, or it lacks the sheet or a column.
    """
    sheet = _sheet(path, content)
    header = next(sheet.iter_rows(max_row=1), ())
    titles = ["" if cell.value is None else str(cell.value).strip() for cell in header]
    for title in columns.values():
        if title not in titles:
            raise WorkbookError(f"{path}!{SHEET}: no column `{title}` in row 1; put it back as it was exported")
        if titles.count(title) > 1:
            letters = " and ".join(get_column_letter(n) for n, other in enumerate(titles, 1) if other == title)
            raise WorkbookError(f"{path}!{SHEET}: column `{title}` stands in row 1 twice ({letters}); delete one")
    places = {each: titles.index(title) for each, title in columns.items()}
    for cells in sheet.iter_rows(min_row=2):
        yield Line(f"{path.name}!{SHEET}", {each: cells[place] for each, place in places.items()})


def _sheet(path: Path, content: bytes) -> Any:
    try:
        book = load_book(io.BytesIO(content))
    except CORRUPT as error:
        raise WorkbookError(
            f"{path}: is no readable .xlsx file ({damage(error)}); open it in Excel and save it again"
        ) from error
    sheets = {sheet.title: sheet for sheet in book.worksheets}
    if SHEET not in sheets:
        listed = ", ".join(sheets) or "none"
        raise WorkbookError(
            f"{path}: no sheet `{SHEET}` (sheets: {listed}); give a workbook of `qinglan review export`"
        )
    return sheets[SHEET]
