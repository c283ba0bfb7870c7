"""Reads Excel sheets: plain ones by calamine, all others by openpyxl; both give the same records.

Calamine is five times as fast and needs a fifth of the memory, but returns an error cell as an empty one and a
formula as its last result, and reads dates differently. So a scan of the sheet's XML, as a stream, decides: a sheet
with more than texts, numbers and booleans in unmerged cells is read by openpyxl. The scan's patterns match the way in
which Excel, openpyxl and similar programs write a cell; one that is written in another legal way is not plain.
"""

import mmap
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import openpyxl
from openpyxl.cell import Cell, MergedCell
from openpyxl.reader.excel import ExcelReader
from openpyxl.styles.stylesheet import apply_stylesheet
from openpyxl.utils import column_index_from_string, get_column_letter
from openpyxl.utils.exceptions import InvalidFileException
from openpyxl.xml.constants import SHARED_STRINGS

from qinglan.data.sources.records import InputColumns, Record, cell_text, column_places
from qinglan.errors import WorkbookError

MAX_UNPACKED_BYTES, MAX_CELLS = 4 << 30, 20_000_000
"""Of a whole workbook; openpyxl keeps some hundred bytes of memory for a cell."""

_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
CORRUPT = (
    zipfile.BadZipFile, zlib.error, InvalidFileException, KeyError, ValueError, TypeError, IndexError,
    AttributeError, EOFError, OSError, NotImplementedError, SyntaxError,
)  # fmt: skip
"""What openpyxl raises on damaged files; XML parse errors are SyntaxErrors."""

_BLOCK = 1 << 20
_HEAD = 200
_MAX_TEXT = 16 << 20
_CELL = re.compile(rb'<c r="([A-Z]{1,3})(\d{1,7})"(?: s="(\d+)"| t="(?:s|n|b|str|inlineStr)")*\s*/?>')
_ANY_CELL = re.compile(rb"<c[\s/>]")
_CELL_OF_ANY_WRITER = re.compile(rb"<(?:\w+:)?c[\s/>]")
_NOT_PLAIN = re.compile(
    rb"<f[\s/>]|<mergeCell\s"  # formulas, merged cells
    rb"|<v>-?\d{16}"  # a whole number that is no exact float
    rb"|<\w+:(?:worksheet|sst|row|c)[\s/>]|<!"  # names with a prefix, CDATA, comments, entities
    rb"|_x[0-9A-Fa-f]{4}_|\r|&#(?:13|x0?[dD]);"  # escapes and line ends that readers treat differently
)
_NUMBER_FORMATS = frozenset({*range(14), *range(37, 41), 48, 49})
"""Excel's own formats that are certainly not dates."""
_DATE_LETTERS = re.compile(r"[dmhysDMHYS]")
_MAX_EMPTY_SHARE = 4
_ALWAYS_DENSE_ENOUGH = 20_000_000
"""Cells of the rectangle around all values, which calamine keeps in memory at 32 bytes each."""


class Layout(NamedTuple):
    """The names of a workbook's sheets, and whether the scanned one is plain."""

    sheets: list[str]
    plain: bool = False
    dated: frozenset[int] = frozenset()
    """Columns, from 0, with a format that may be a date's."""


def read_xlsx(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Records of one sheet; a formula, a merged or an error cell is the record's flaw."""
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:8] == _OLE_MAGIC:
            if content.find(_ENCRYPTED) >= 0:
                raise WorkbookError(f"{path}: is encrypted; remove its password in Excel and save it again")
            raise WorkbookError(f"{path}: is an old .xls file under the name .xlsx; save it as .xlsx in Excel")
        if content[:2] != b"PK":
            hint = "if it is text, rename it to .csv, else save it as .xlsx"
            raise WorkbookError(f"{path}: is not an Excel file; {hint}")
    try:
        layout = scan(path, columns.sheet)
        if not layout.sheets:
            raise WorkbookError(f"{path}: has no worksheet; put the questions into one")
        sheet = columns.sheet or layout.sheets[0]
        if sheet not in layout.sheets:
            raise WorkbookError(f"{path}: no sheet `{sheet}` (sheets: {', '.join(layout.sheets)}); correct data.sheet")
        return _plain_records(path, sheet, layout, columns) or _exact_records(path, sheet, layout, columns)
    except CORRUPT as error:
        raise WorkbookError(f"{path}: is damaged ({damage(error)}); open it in Excel and save it again") from error


def _plain_records(path: Path, name: str, layout: Layout, columns: InputColumns) -> Iterator[Record] | None:
    """Records read by calamine; None where its result is not exact."""
    from python_calamine import CalamineError, CalamineWorkbook

    if not layout.plain:
        return None
    try:
        sheet = CalamineWorkbook.from_path(path).get_sheet_by_name(name)
    except (CalamineError, OSError):  # openpyxl reports the error
        return None
    first_column = sheet.start[1] if sheet.start else 0  # calamine leaves out columns before it, but no rows
    rows = ([""] * first_column + row for row in sheet.iter_rows())
    header = [cell_text(value) for value in next(rows, [])]
    if not any(header):
        return None
    places = column_places(header, columns, f"{path}!{name}, row 1")
    if not layout.dated.isdisjoint(places.values()):
        return None
    prefix = f"{path.name}!{name}!{get_column_letter(places['query'] + 1)}"
    return (
        Record(
            prefix=prefix,
            number=number,
            cells={field: values[place] for field, place in places.items()},
            blank=not any(value != "" and cell_text(value) for value in values),
        )
        for number, values in enumerate(rows, 2)
    )


def _exact_records(path: Path, name: str, layout: Layout, columns: InputColumns) -> Iterator[Record]:
    """Records read by openpyxl."""
    with path.open("rb") as stream:
        rows = _cells_by_row(load_book(stream)[name])
    if not rows:
        sheets, hint = ", ".join(layout.sheets), "fill it in or choose another with --set data.sheet=NAME"
        raise WorkbookError(f"{path}!{name}: the sheet is empty (sheets: {sheets}); {hint}")
    first = rows.get(1, {})
    header = [cell_text(first[n].value) if n in first else "" for n in range(1, max(first, default=0) + 1)]
    places = column_places(header, columns, f"{path}!{name}, row 1")
    prefix = f"{path.name}!{name}!{get_column_letter(places['query'] + 1)}"
    return (_exact_record(prefix, number, rows.get(number, {}), places) for number in range(2, max(rows) + 1))


def _exact_record(prefix: str, number: int, row: Mapping[int, Cell | MergedCell], places: Mapping[str, int]) -> Record:
    used = {field: row[place + 1] for field, place in places.items() if place + 1 in row}
    flaw = None
    if any(isinstance(cell, MergedCell) for cell in used.values()):
        flaw = "merged_cell"
    elif any(cell.data_type == "f" for cell in used.values()):
        flaw = "formula_cell"
    elif any(cell.data_type == "e" for cell in used.values()):
        flaw = "not_text"
    return Record(
        prefix=prefix,
        number=number,
        # an array formula has its text as an attribute
        cells={field: getattr(cell.value, "text", cell.value) for field, cell in used.items()},
        flaw=flaw,
        blank=all(cell_text(cell.value) == "" for cell in row.values()),
    )


def _cells_by_row(sheet: Any) -> dict[int, dict[int, Cell | MergedCell]]:
    """By row and column, from 1, up to the last row that holds a value: a style far below is no row."""
    last = max((row for (row, _), cell in sheet._cells.items() if cell.value is not None), default=0)
    rows: dict[int, dict[int, Cell | MergedCell]] = {}
    for (row, column), cell in sheet._cells.items():
        if row <= last:
            rows.setdefault(row, {})[column] = cell
    return rows


def load_book(stream: IO[bytes]) -> Any:
    """An openpyxl workbook; raises one of `CORRUPT` on a damaged one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl's warnings about styles and extensions, which don't concern cells
        return openpyxl.load_workbook(stream, keep_links=False)


def require_size(path: Path, archive: zipfile.ZipFile) -> None:
    """Refuse a workbook that may not fit into memory, before it is read whole."""
    unpacked, cells = sum(member.file_size for member in archive.infolist()), 0
    most, hint = "more than any workbook of questions", "save the sheet as .csv"
    if unpacked > MAX_UNPACKED_BYTES:
        what = f"unpacks to {unpacked / 2**30:,.0f} GiB, {most} ({MAX_UNPACKED_BYTES >> 30} GiB)"
        raise WorkbookError(f"{path}: {what}; {hint}")
    for part in (name for name in archive.namelist() if name.endswith(".xml")):
        with archive.open(part) as stream:
            while block := stream.read(_BLOCK):
                cells += len(_CELL_OF_ANY_WRITER.findall(block))
                if cells > MAX_CELLS:
                    raise WorkbookError(f"{path}: has more than {MAX_CELLS:,} cells, {most}; {hint}")


def damage(error: Exception) -> str:
    """An error's message, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def scan(path: Path, sheet: str | None) -> Layout:
    """Scan a sheet, the first if no name is given; where there is none of that name, only the names are set.

    Raises the errors of openpyxl where a file is damaged.
    """
    with path.open("rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl's warnings about styles and extensions, which don't concern cells
        reader = ExcelReader(stream, read_only=True, keep_links=False)
        require_size(path, reader.archive)
        reader.read_manifest()
        reader.read_workbook()
        parts = {
            found.name: relation.target
            for found, relation in reader.parser.find_sheets()
            if relation.target in reader.valid_files and "chartsheet" not in relation.Type
        }
        names = list(parts)
        chosen = sheet or (names[0] if names else None)
        strings = reader.package.find(SHARED_STRINGS)
        texts = _tags(reader.archive, strings.PartName[1:]) if strings else ()
        if chosen not in parts or any(_NOT_PLAIN.search(block) for block in texts):
            return Layout(names)
        apply_stylesheet(reader.archive, reader.wb)
        styles = enumerate(reader.wb._cell_styles)
        dated = (number for number, style in styles if not _is_number_format(reader.wb, style.numFmtId))
        columns = _scan_cells(reader.archive, parts[chosen], frozenset(dated))
        return Layout(names, plain=columns is not None, dated=columns or frozenset())


def _scan_cells(archive: zipfile.ZipFile, part: str, dated_styles: frozenset[int]) -> frozenset[int] | None:
    """The columns that may hold dates, None where the sheet is not plain."""
    styled: set[tuple[bytes, bytes]] = set()
    cells, last_row = 0, 0
    for block in _tags(archive, part):
        found = _CELL.findall(block)
        if len(found) != len(_ANY_CELL.findall(block)) or _NOT_PLAIN.search(block):
            return None
        cells += len(found)
        styled.update((column, style) for column, _, style in found)
        last_row = max(last_row, max((int(row) for _, row, _ in found), default=0))
    columns = {column: column_index_from_string(column.decode()) for column, _ in styled}
    area = last_row * max(columns.values(), default=0)
    if area > max(_ALWAYS_DENSE_ENOUGH, _MAX_EMPTY_SHARE * cells):
        return None
    return frozenset(columns[column] - 1 for column, style in styled if style and int(style) in dated_styles)


def _is_number_format(book: Any, number: int) -> bool:
    if number in _NUMBER_FORMATS:
        return True
    own = number - 164
    return 0 <= own < len(book._number_formats) and not _DATE_LETTERS.search(book._number_formats[own])


def _tags(archive: zipfile.ZipFile, part: str) -> Iterator[bytes]:
    """A member in blocks that end before a tag: no tag is cut in two, nor the text that follows one."""
    with archive.open(part) as stream:
        rest = stream.read(_HEAD).replace(b"?>\r\n", b"?>\n")  # this line end belongs to no text
        while block := stream.read(_BLOCK):
            rest += block
            cut = rest.rfind(b"<")
            if len(rest) - cut > _MAX_TEXT:
                raise ValueError(f"a text of more than {_MAX_TEXT >> 20} MiB in {part}")
            yield rest[:cut]
            rest = rest[cut:]
    yield rest
