"""Reads Excel sheets cell by cell.

So formulas, merged cells and errors are seen as what they are.
"""

import mmap
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import openpyxl
from openpyxl.cell import Cell, MergedCell
from openpyxl.utils import get_column_letter
from openpyxl.utils.exceptions import InvalidFileException

from qinglan.data.sources.records import InputColumns, Record, cell_text, column_places
from qinglan.errors import WorkbookError

MAX_UNPACKED_BYTES = 1 << 30
"""Largest size of a whole workbook, unpacked."""
MAX_CELLS = 2_000_000
"""Most cells of a whole workbook; openpyxl keeps some 500 bytes of memory for each."""

_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ZIP_MAGIC = b"PK"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
CORRUPT = (
    zipfile.BadZipFile,
    zlib.error,
    InvalidFileException,
    KeyError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    EOFError,
    OSError,
    NotImplementedError,
    SyntaxError,
)
"""Exceptions that openpyxl raises on damaged files; XML parse errors are SyntaxErrors."""

_BLOCK = 1 << 20
_CELL = re.compile(rb"<(?:\w+:)?c[\s/>]")
_MERGED = "merged"
_FLAWS = {_MERGED: "merged_cell", "f": "formula_cell", "e": "not_text"}
"""A row's flaw by the kind of its cells; the first that one of them has is the row's."""


def read_xlsx(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Records of one sheet; a formula, a merged or an error cell is the record's flaw."""
    _require_xlsx(path)
    try:
        with path.open("rb") as stream:
            sheets = sheets_of(path, stream)
        title = _chosen_title(path, sheets, columns.sheet)
        rows = _cells_by_row(sheets[title])
    except CORRUPT as error:
        raise WorkbookError(
            f"{path}: is damaged ({damage(error)}); open it in Excel and save it again"
        ) from error
    if not rows:
        hint = "fill it in or choose another with --set data.sheet=NAME"
        titles = ", ".join(sheets)
        raise WorkbookError(f"{path}!{title}: the sheet is empty (sheets: {titles}); {hint}")

    places = column_places(_header(rows.get(1, {})), columns, f"{path}!{title}, row 1")
    query_letter = get_column_letter(places["query"] + 1)
    prefix = f"{path.name}!{title}!{query_letter}"
    numbers = range(2, max(rows) + 1)
    return (_record(prefix, number, rows.get(number, {}), places) for number in numbers)


def _require_xlsx(path: Path) -> None:
    """Refuse what only has the suffix, and say what the file is instead."""
    # Mapped, because the mark of encryption may be anywhere in a large file.
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        if content[: len(_OLE_MAGIC)] == _OLE_MAGIC:
            # Excel wraps an encrypted .xlsx into the container that .xls files have.
            if content.find(_ENCRYPTED) >= 0:
                raise WorkbookError(
                    f"{path}: is encrypted; remove its password in Excel and save it again"
                )
            raise WorkbookError(
                f"{path}: is an old .xls file under the name .xlsx; save it as .xlsx in Excel"
            )
        if content[: len(_ZIP_MAGIC)] != _ZIP_MAGIC:
            hint = "if it is text, rename it to .csv, else save it as .xlsx"
            raise WorkbookError(f"{path}: is not an Excel file; {hint}")


def _chosen_title(path: Path, sheets: Mapping[str, Any], title: str | None) -> str:
    """The title of the sheet to read: the one that the profile names, otherwise the first."""
    if not sheets:
        raise WorkbookError(f"{path}: has no worksheet; put the questions into one")
    title = title or next(iter(sheets))
    if title not in sheets:
        titles = ", ".join(sheets)
        raise WorkbookError(f"{path}: no sheet `{title}` (sheets: {titles}); correct data.sheet")
    return title


def _header(first_row: Mapping[int, Cell | MergedCell]) -> list[str]:
    """The texts of the header's cells, empty ones between them included."""
    header = []
    for number in range(1, max(first_row, default=0) + 1):
        cell = first_row.get(number)
        header.append("" if cell is None else cell_text(cell.value))
    return header


def _record(
    prefix: str, number: int, row: Mapping[int, Cell | MergedCell], places: Mapping[str, int]
) -> Record:
    """A sheet's row as a record; `places` count columns from 0, `row` counts them from 1."""
    used_cells: list[Cell | MergedCell] = []
    values: dict[str, Any] = {}
    for field, place in places.items():
        cell = row.get(place + 1)
        if cell is None:
            continue
        used_cells.append(cell)
        # openpyxl gives an array formula as an object that has the text as an attribute.
        values[field] = getattr(cell.value, "text", cell.value)
    is_blank = all(cell_text(cell.value) == "" for cell in row.values())
    return Record(
        prefix=prefix,
        number=number,
        cells=values,
        flaw=_flaw(used_cells),
        blank=is_blank,
    )


def _flaw(cells: Iterable[Cell | MergedCell]) -> str | None:
    """The reason for which these cells can't be read; None where they can."""
    kinds = set(map(_kind_of, cells))
    for kind, flaw in _FLAWS.items():
        if kind in kinds:
            return flaw
    return None


def _kind_of(cell: Cell | MergedCell) -> str:
    """The kind of a cell's value in openpyxl's letters, or `_MERGED`."""
    return _MERGED if isinstance(cell, MergedCell) else cell.data_type


def _cells_by_row(sheet: Any) -> dict[int, dict[int, Cell | MergedCell]]:
    """Cells by row and column, from 1, up to the last row that holds a value."""
    # A style far below the last value makes cells too, but no rows.
    last_row = 0
    for (row, _), cell in sheet._cells.items():
        if cell.value is not None:
            last_row = max(last_row, row)
    rows: dict[int, dict[int, Cell | MergedCell]] = {}
    for (row, column), cell in sheet._cells.items():
        if row <= last_row:
            rows.setdefault(row, {})[column] = cell
    return rows


def load_book(stream: IO[bytes]) -> Any:
    """An openpyxl workbook; raises one of `CORRUPT` on a damaged one."""
    with warnings.catch_warnings():
        # openpyxl warns about styles and extensions, which don't concern cells.
        warnings.simplefilter("ignore")
        return openpyxl.load_workbook(stream, keep_links=False)


def sheets_of(path: Path, stream: IO[bytes]) -> dict[str, Any]:
    """The sheets by their titles, without chart sheets.

    Raises one of `CORRUPT` on a damaged workbook, WorkbookError on one that is too large.
    """
    with zipfile.ZipFile(stream) as archive:
        _require_size(path, archive)
    return {sheet.title: sheet for sheet in load_book(stream).worksheets}


def _require_size(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a workbook that may not fit into memory, before it is read whole."""
    excess = "more than any workbook of questions"
    hint = "save the sheet as .csv"
    unpacked_bytes = sum(member.file_size for member in archive.infolist())
    if unpacked_bytes > MAX_UNPACKED_BYTES:
        limit = f"{MAX_UNPACKED_BYTES >> 30} GiB"
        unpacked = f"{unpacked_bytes / 2**30:,.0f} GiB"
        raise WorkbookError(f"{path}: unpacks to {unpacked}, {excess} ({limit}); {hint}")
    cells = 0
    for name in archive.namelist():
        if not name.endswith(".xml"):
            continue
        with archive.open(name) as part:
            while block := part.read(_BLOCK):
                cells += len(_CELL.findall(block))
                if cells > MAX_CELLS:
                    raise WorkbookError(
                        f"{path}: has more than {MAX_CELLS:,} cells, {excess}; {hint}"
                    )


def damage(error: Exception) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
