"""Scans a sheet's XML as a stream: is the sheet plain enough for the fast reader, which does not read all exactly?

The patterns match the way in which Excel, openpyxl and similar programs write a cell. A cell that is written in another
legal way makes the sheet not plain.
"""

import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from openpyxl.reader.excel import ExcelReader
from openpyxl.styles.stylesheet import apply_stylesheet
from openpyxl.utils import column_index_from_string
from openpyxl.xml.constants import SHARED_STRINGS

_BLOCK = 1 << 20
_HEAD = 200
_MAX_TEXT = 16 << 20
_CELL = re.compile(rb'<c r="([A-Z]{1,3})(\d{1,7})"(?: s="(\d+)"| t="(?:s|n|b|str|inlineStr)")*\s*/?>')
_ANY_CELL = re.compile(rb"<c[\s/>]")
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


def scan(path: Path, sheet: str | None) -> Layout:
    """Scan a sheet, the first if no name is given; where there is none of that name, only the names are set.

    Raises the errors of openpyxl where a file is damaged.
    """
    with path.open("rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # openpyxl's warnings about styles and extensions, which don't concern cells
        reader = ExcelReader(stream, read_only=True, keep_links=False)
        reader.read_manifest()
        reader.read_workbook()
        parts = {
            found.name: relation.target
            for found, relation in reader.parser.find_sheets()
            if relation.target in reader.valid_files and "chartsheet" not in relation.Type
        }
        names = list(parts)
        chosen = sheet or (names[0] if names else None)
        if chosen not in parts or not _has_plain_strings(reader):
            return Layout(names)
        apply_stylesheet(reader.archive, reader.wb)
        styles = enumerate(reader.wb._cell_styles)
        dated = (number for number, style in styles if not _is_number_format(reader.wb, style.numFmtId))
        columns = _scan_cells(reader.archive, parts[chosen], frozenset(dated))
        return Layout(names, plain=columns is not None, dated=columns or frozenset())


def _has_plain_strings(reader: Any) -> bool:
    strings = reader.package.find(SHARED_STRINGS)
    if strings is None:
        return True
    return not any(_NOT_PLAIN.search(block) for block in _tags(reader.archive, strings.PartName[1:]))


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
