"""Reads Excel sheets cell by cell, so that formulas, merged cells and errors are seen as what they
are."""

import mmap
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import openpyxl
from openpyxl.cell import Cell, MergedCell
from openpyxl.utils import get_column_letter
from openpyxl.utils.exceptions import InvalidFileException

from qinglan.data.sources.records import InputColumns, Record, cell_text, column_places
from qinglan.errors import WorkbookError

MAX_UNPACKED_BYTES, MAX_CELLS = 1 << 30, 2_000_000
"""Of a whole workbook; openpyxl keeps some 500 bytes of memory for a cell."""

_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
CORRUPT = (
    zipfile.BadZipFile, zlib.error, InvalidFileException, KeyError, ValueError, TypeError, IndexError,
    AttributeError, EOFError, OSError, NotImplementedError, SyntaxError,
)  # fmt: skip
"""What openpyxl raises on damaged files; XML parse errors are SyntaxErrors."""

_BLOCK = 1 << 20
_CELL = re.compile(rb"<(?:\w+:)?c[\s/>]")
_FLAWS = {"merged": "merged_cell", "f": "formula_cell", "e": "not_text"}
"""By the kind of a cell; the first that a row has counts."""


def read_xlsx(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Records of one sheet; a formula, a merged or an error cell is the record's flaw."""
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        if content[:8] == _OLE_MAGIC:
            if content.find(_ENCRYPTED) >= 0:
                raise WorkbookError(
                    f"{path}: is encrypted; remove its password in Excel and save it again"
                )
            raise WorkbookError(
                f"{path}: is an old .xls file under the name .xlsx; save it as .xlsx in Excel"
            )
        if content[:2] != b"PK":
            hint = "if it is text, rename it to .csv, else save it as .xlsx"
            raise WorkbookError(f"{path}: is not an Excel file; {hint}")
    try:
        with path.open("rb") as stream:
            sheets = sheets_of(path, stream)
        names = ", ".join(sheets)
        if not sheets:
            raise WorkbookError(f"{path}: has no worksheet; put the questions into one")
        name = columns.sheet or next(iter(sheets))
        if name not in sheets:
            raise WorkbookError(f"{path}: no sheet `{name}` (sheets: {names}); correct data.sheet")
        rows = _cells_by_row(sheets[name])
    except CORRUPT as error:
        raise WorkbookError(
            f"{path}: is damaged ({damage(error)}); open it in Excel and save it again"
        ) from error
    if not rows:
        hint = "fill it in or choose another with --set data.sheet=NAME"
        raise WorkbookError(f"{path}!{name}: the sheet is empty (sheets: {names}); {hint}")
    first = rows.get(1, {})
    header = [
        cell_text(first[n].value) if n in first else "" for n in range(1, max(first, default=0) + 1)
    ]
    places = column_places(header, columns, f"{path}!{name}, row 1")
    prefix = f"{path.name}!{name}!{get_column_letter(places['query'] + 1)}"
    return (
        _record(prefix, number, rows.get(number, {}), places) for number in range(2, max(rows) + 1)
    )


def _record(
    prefix: str, number: int, row: Mapping[int, Cell | MergedCell], places: Mapping[str, int]
) -> Record:
    used = {field: row[place + 1] for field, place in places.items() if place + 1 in row}
    kinds = {"merged" if isinstance(cell, MergedCell) else cell.data_type for cell in used.values()}
    return Record(
        prefix=prefix,
        number=number,
        # an array formula has its text as an attribute
        cells={field: getattr(cell.value, "text", cell.value) for field, cell in used.items()},
        flaw=next((flaw for kind, flaw in _FLAWS.items() if kind in kinds), None),
        blank=all(cell_text(cell.value) == "" for cell in row.values()),
    )


def _cells_by_row(sheet: Any) -> dict[int, dict[int, Cell | MergedCell]]:
    """By row and column, from 1, up to the last row that holds a value: a style far below is no
    row."""
    last = max(
        (row for (row, _), cell in sheet._cells.items() if cell.value is not None), default=0
    )
    rows: dict[int, dict[int, Cell | MergedCell]] = {}
    for (row, column), cell in sheet._cells.items():
        if row <= last:
            rows.setdefault(row, {})[column] = cell
    return rows


def load_book(stream: IO[bytes]) -> Any:
    """An openpyxl workbook; raises one of `CORRUPT` on a damaged one."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # openpyxl's warnings about styles and extensions, which don't concern cells
        return openpyxl.load_workbook(stream, keep_links=False)


def sheets_of(path: Path, stream: IO[bytes]) -> dict[str, Any]:
    """The sheets by their titles, without chart sheets; raises one of `CORRUPT` on a damaged
    workbook."""
    with zipfile.ZipFile(stream) as archive:
        _require_size(path, archive)
    return {sheet.title: sheet for sheet in load_book(stream).worksheets}


def _require_size(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a workbook that may not fit into memory, before it is read whole."""
    unpacked, cells = sum(member.file_size for member in archive.infolist()), 0
    most, hint = "more than any workbook of questions", "save the sheet as .csv"
    if unpacked > MAX_UNPACKED_BYTES:
        what = f"unpacks to {unpacked / 2**30:,.0f} GiB, {most} ({MAX_UNPACKED_BYTES >> 30} GiB)"
        raise WorkbookError(f"{path}: {what}; {hint}")
    for part in (name for name in archive.namelist() if name.endswith(".xml")):
        with archive.open(part) as stream:
            while block := stream.read(_BLOCK):
                cells += len(_CELL.findall(block))
                if cells > MAX_CELLS:
                    raise WorkbookError(
                        f"{path}: has more than {MAX_CELLS:,} cells, {most}; {hint}"
                    )


def damage(error: Exception) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
