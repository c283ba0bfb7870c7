"""Reads files and folders as one stream of records.

CSV, JSON lines and parquet hold one line or batch in memory. A folder may hold other files too. A
file that is still being written must have another name (hidden, or `.partial`).
"""

import codecs
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from qinglan.data.sources.excel import damage, read_xlsx
from qinglan.data.sources.records import (
    InputColumns,
    MissingColumnError,
    Record,
    cell_text,
    column_places,
)
from qinglan.errors import WorkbookError
from qinglan.runs.artifacts import hash_of, sha256_of

BLOCK = 1 << 20
_MAX_LINE = 16 << 20
_PARQUET_ROWS = 1000
_KEPT_NAMES = 1000
_OLD_EXCEL = ".xls"
_NO_COLUMN = "\0"
"""No header holds it, as `cell_text` removes it; JSON lines are read to the end for it."""
_UNFINISHED = re.compile(r"^(\.|~\$)|\.(partial|tmp)$", re.IGNORECASE)


def read_csv(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Records of a comma-separated file; each has the number of the line where it begins."""
    with path.open(encoding=encoding_of(path), newline="") as stream:
        lines = _csv_lines(path, stream)
        try:
            _, first_cells = next(lines)
        except StopIteration:
            raise WorkbookError(f"{path}: is empty; fill in a header row and questions") from None
        header = [cell_text(name) for name in first_cells]
        places = column_places(header, columns, f"{path}, line 1")
        for number, cells in lines:
            used_cells: dict[str, str] = {}
            for field, place in places.items():
                # A short line simply lacks its last cells.
                if place < len(cells):
                    used_cells[field] = cells[place]
            if _is_blank(cells[len(header) :]):
                flaw = _number_flaw(used_cells.get("query", ""))
            else:
                flaw = "extra_cells"
            yield Record(f"{path.name}:", number, used_cells, flaw, _is_blank(cells))


def _is_blank(cells: Iterable[str]) -> bool:
    return not any(map(str.strip, cells))


def _number_flaw(query: str) -> str | None:
    """Why a number is refused, as in Excel, where cells have types; None for a text."""
    try:
        number = float(query)
    except ValueError:
        return None
    # pandas writes NaN for an empty cell.
    return "empty_query" if math.isnan(number) else "not_text"


def _csv_lines(path: Path, stream: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Cells of each record, with the number of the line on which it begins."""
    # Strict, because an unclosed quote would otherwise swallow the rest of the file.
    reader = csv.reader(stream, strict=True)
    start = 1
    try:
        for cells in reader:
            yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        hint = "close the quotes, and double those inside a cell"
        raise WorkbookError(f"{path}:{start}: not readable as CSV ({error}); {hint}") from error


def encoding_of(path: Path) -> str:
    """Name of a text file's encoding: UTF-8 with or without a byte order mark, or GB18030.

    WorkbookError where it is neither; a damaged UTF-8 file is an error, not GB18030.
    """
    utf8_damage = _damage(path, "utf-8-sig")
    if utf8_damage is None:
        return "utf-8-sig"
    if _is_mostly_utf8(path):
        raise utf8_damage
    gb18030_damage = _damage(path, "gb18030")
    if gb18030_damage is None:
        return "gb18030"
    raise gb18030_damage


def _damage(path: Path, encoding: str) -> WorkbookError | None:
    """The error for the first byte that can't be decoded; None where there is none."""
    decoder = codecs.getincrementaldecoder(encoding)()
    line = 1
    try:
        for block in blocks(path):
            decoder.decode(block)
            line += block.count(b"\n")
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        # `error.object` begins with what the last block left undecoded: no line ends there.
        line += error.object.count(b"\n", 0, error.start)
        return _undecodable(path, line, error.object[error.start])
    return None


def _is_mostly_utf8(path: Path) -> bool:
    """Tell whether more than nine tenths of the bytes that are not ASCII are UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    ascii_bytes = bytes(range(0x80))
    decodable_bytes = 0
    high_bytes = 0
    for block in blocks(path):
        decoded = decoder.decode(block).encode()
        decodable_bytes += len(decoded.translate(None, ascii_bytes))
        high_bytes += len(block.translate(None, ascii_bytes))
    return decodable_bytes > 0.9 * high_bytes


def _undecodable(path: Path, line: int, byte: int) -> WorkbookError:
    return WorkbookError(
        f"{path}:{line}: byte {byte:#04x} is neither UTF-8 nor GB18030 text; save the file as UTF-8"
    )


def blocks(path: Path) -> Iterator[bytes]:
    """A file's content, block by block."""
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            yield block


def read_jsonl(path: Path, columns: InputColumns, prefix: str | None = None) -> Iterator[Record]:
    """Records of a file with one JSON object a line.

    Their sources begin with `prefix`, by default the file's name.
    """
    _require_names(path, columns)
    for number, values in read_objects(path):
        cells = columns.cells(values)
        yield Record(prefix=prefix or f"{path.name}:", number=number, cells=cells)


def _require_names(path: Path, columns: InputColumns) -> None:
    """Refuse a file in which a required column is in no line."""
    required = {columns.names[field] for field in columns.required}
    names: dict[str, None] = {}
    for _, values in read_objects(path):
        for name in values:
            # Further names are only for the message, so a few of them are enough.
            if name in required or len(names) < _KEPT_NAMES:
                names[name] = None
        # An object may lack what it has no value for; usually the first line has them all.
        if required <= names.keys():
            return
    column_places(list(names), columns, str(path))


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, with their lines' numbers.

    Empty lines are skipped; WorkbookError at a line that holds anything else.
    """
    with path.open("rb") as stream:
        # One byte more than allowed tells that a line is too long, without reading all of it.
        lines = iter(partial(stream.readline, _MAX_LINE + 1), b"")
        for number, line in enumerate(lines, start=1):
            if len(line) > _MAX_LINE:
                raise WorkbookError(
                    f"{path}:{number}: longer than {_MAX_LINE >> 20} MiB; write one object a line"
                )
            text = _line_text(path, number, line)
            if text.strip():
                yield number, _object(path, number, text)


def _line_text(path: Path, number: int, line: bytes) -> str:
    """A line's text, without a byte order mark and the end of the line."""
    if number == 1:
        line = line.removeprefix(codecs.BOM_UTF8)
    try:
        return line.removesuffix(b"\n").decode()
    except UnicodeDecodeError as error:
        raise _undecodable(path, number, error.object[error.start]) from error


def _object(path: Path, number: int, text: str) -> dict[str, Any]:
    """The JSON object that a line holds."""
    try:
        value = json.loads(text)
    # Brackets that are nested too deep raise a RecursionError.
    except (ValueError, RecursionError) as error:
        raise WorkbookError(
            f"{path}:{number}: not valid JSON ({error}); write one object a line"
        ) from error
    if not isinstance(value, dict):
        raise WorkbookError(
            f"{path}:{number}: expected a JSON object, found {type(value).__name__}"
        )
    return value


def read_parquet(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Records of a parquet file, numbered from 1; only the used columns are read."""
    import pyarrow.parquet

    with path.open("rb") as stream:
        try:
            file = pyarrow.parquet.ParquetFile(stream)
            file_names = file.schema_arrow.names
            places = column_places(file_names, columns, str(path))
            names = {field: file_names[place] for field, place in places.items()}
            numbers = count(1)
            # Two fields may have the same column, and pyarrow would read it twice.
            distinct_names = list(dict.fromkeys(names.values()))
            for batch in file.iter_batches(_PARQUET_ROWS, columns=distinct_names):
                values_by_column = [batch.column(name).to_pylist() for name in names.values()]
                for values in zip(*values_by_column, strict=True):
                    cells = dict(zip(names, values, strict=True))
                    yield Record(f"{path.name}:", next(numbers), cells)
        except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
            detail = damage(error)[:200]
            raise WorkbookError(
                f"{path}: is damaged or no parquet file ({detail}); write it again"
            ) from error


Reader = Callable[[Path, InputColumns], Iterator[Record]]
READERS: dict[str, Reader] = {
    ".xlsx": read_xlsx,
    ".csv": read_csv,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
"""Readers by the suffix of their files, in lower case."""


class InputFiles(NamedTuple):
    """The files that a path names, as `list_files` finds them."""

    read: list[Path]
    skipped: list[Path]
    """Files of a folder whose names show that they hold no questions; they are reported."""


def list_files(path: Path) -> InputFiles:
    """The file itself, or a folder's files in the order of their names.

    WorkbookError where the folder holds no file of questions.
    """
    try:
        if not path.is_dir():
            return InputFiles([path], [])
        files = sorted(filter(_is_finished_file, path.iterdir()))
    except OSError as error:
        raise _unreadable(path, error) from error
    question_files: list[Path] = []
    skipped_files: list[Path] = []
    for file in files:
        # An old Excel file is refused later on, so that nobody misses its questions.
        if file.suffix.lower() in (*READERS, _OLD_EXCEL):
            question_files.append(file)
        else:
            skipped_files.append(file)
    if not question_files:
        raise WorkbookError(
            f"{path}: holds no {', '.join(READERS)} file; put one there or correct data.workbook"
        )
    return InputFiles(question_files, skipped_files)


def _is_finished_file(path: Path) -> bool:
    return path.is_file() and not _UNFINISHED.search(path.name)


def digest_of(path: Path) -> str:
    """A digest that changes with the records that `read_records` would give, and their sources."""
    files = list_files(path).read
    try:
        if files == [path]:
            _require_file(path)
            return sha256_of(path)
        # A file's name is a part of its rows' sources.
        return hash_of([[file.name, sha256_of(file)] for file in files])
    except OSError as error:
        raise _unreadable(path, error) from error


def read_records(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Every record, file by file; empty ones at a file's end are left out."""
    files = list_files(path).read
    has_records = False
    for file in files:
        try:
            _require_file(file)
            if not any(map(bytes.strip, blocks(file))):
                raise WorkbookError(f"{file}: is empty; fill in a header row and questions")
            read_file = READERS[file.suffix.lower()]
            for record in _without_blank_end(read_file(file, columns)):
                has_records = True
                yield record
        except OSError as error:
            raise _unreadable(file, error) from error
    if not has_records:
        finding = "has a header" if files == [path] else "its files have headers"
        raise WorkbookError(f"{path}: {finding} but no rows; fill in questions below it")


def read_header(path: Path) -> list[str]:
    """The names in the header row, those of a folder's first file.

    WorkbookError where the input can't be read.
    """
    try:
        next(read_records(path, InputColumns({"query": _NO_COLUMN}, frozenset({"query"}))))
    except MissingColumnError as error:
        return error.header
    return []


def _require_file(path: Path) -> None:
    """Refuse a file that is not there, or that no reader reads."""
    if not path.exists():
        raise WorkbookError(f"{path}: no such file; correct data.workbook")
    if path.suffix.lower() == _OLD_EXCEL:
        raise WorkbookError(f"{path}: is the old Excel format; save it as .xlsx")
    if path.suffix.lower() not in READERS:
        raise WorkbookError(
            f"{path}: unknown suffix `{path.suffix}`; save it as {', '.join(READERS)}"
        )


def _without_blank_end(records: Iterable[Record]) -> Iterator[Record]:
    """The records, without the blank ones after which nothing comes."""
    blank_records: list[Record] = []
    for record in records:
        if record.blank:
            # Without their cells, because there may be a million of them.
            blank_records.append(record._replace(cells={}))
            continue
        yield from blank_records
        blank_records.clear()
        yield record


def _unreadable(path: Path, error: OSError) -> WorkbookError:
    return WorkbookError(f"{path}: can't be read: {error.strerror or error}; check its permissions")
