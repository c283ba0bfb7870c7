"""Reads files (CSV, JSON lines and parquet hold one line or batch in memory), and folders, as one
stream of records.

A folder may hold other files too. A file that is still being written must have another name
(hidden, or `.partial`).
"""

import codecs
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
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
            header = [cell_text(name) for name in next(lines)[1]]
        except StopIteration:
            raise WorkbookError(f"{path}: is empty; fill in a header row and questions") from None
        places, prefix = column_places(header, columns, f"{path}, line 1"), f"{path.name}:"
        for number, cells in lines:
            used = {field: cells[place] for field, place in places.items() if place < len(cells)}
            has_extra = any(cell.strip() for cell in cells[len(header) :])
            flaw = "extra_cells" if has_extra else _number_flaw(used.get("query", ""))
            yield Record(prefix, number, used, flaw, blank=not any(cell.strip() for cell in cells))


def _number_flaw(query: str) -> str | None:
    """Why a number is refused, as in Excel, where cells have types; pandas writes NaN for an empty
    cell."""
    try:
        number = float(query)
    except ValueError:
        return None
    return "empty_query" if math.isnan(number) else "not_text"


def _csv_lines(path: Path, stream: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Records with the number of the line on which each begins; strict, so that an unclosed quote
    is an error."""
    reader, start = csv.reader(stream, strict=True), 1
    try:
        for cells in reader:
            yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        hint = "close the quotes, and double those inside a cell"
        raise WorkbookError(f"{path}:{start}: not readable as CSV ({error}); {hint}") from error


def encoding_of(path: Path) -> str:
    """UTF-8 with or without a byte order mark, else GB18030; a damaged UTF-8 file is an error, not
    GB18030."""
    if (damage := _damage(path, "utf-8-sig")) is None:
        return "utf-8-sig"
    if not _is_mostly_utf8(path) and (damage := _damage(path, "gb18030")) is None:
        return "gb18030"
    raise damage


def _damage(path: Path, encoding: str) -> WorkbookError | None:
    """The error for the first byte that can't be decoded; None where there is none."""
    decoder, lines = codecs.getincrementaldecoder(encoding)(), 1
    try:
        for block in blocks(path):
            decoder.decode(block)
            lines += block.count(b"\n")
        decoder.decode(b"", final=True)
    except (
        UnicodeDecodeError
    ) as error:  # its object begins with the last block's rest: no line ends there
        return _undecodable(
            path, lines + error.object.count(b"\n", 0, error.start), error.object[error.start]
        )
    return None


def _is_mostly_utf8(path: Path) -> bool:
    decoder, ascii_bytes = (
        codecs.getincrementaldecoder("utf-8")(errors="ignore"),
        bytes(range(0x80)),
    )
    readable, high = 0, 0
    for block in blocks(path):
        readable += len(decoder.decode(block).encode().translate(None, ascii_bytes))
        high += len(block.translate(None, ascii_bytes))
    return readable > 0.9 * high


def _undecodable(path: Path, line: int, byte: int) -> WorkbookError:
    return WorkbookError(
        f"{path}:{line}: byte {byte:#04x} is neither UTF-8 nor GB18030 text; save the file as UTF-8"
    )


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            yield block


def read_jsonl(path: Path, columns: InputColumns, prefix: str | None = None) -> Iterator[Record]:
    """Records of a file with one JSON object a line; their sources begin with `prefix`, by default
    the file's name."""
    # The required columns are searched for line by line; usually the first line has them.
    required = {columns.names[field] for field in columns.required}
    seen: dict[str, None] = {}
    for _, values in read_objects(path):
        seen.update((key, None) for key in values if key in required or len(seen) < _KEPT_NAMES)
        if required <= seen.keys():
            break
    else:
        column_places(list(seen), columns, str(path))
    for number, values in read_objects(path):
        cells = {field: values[name] for field, name in columns.names.items() if name in values}
        yield Record(prefix=prefix or f"{path.name}:", number=number, cells=cells)


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with one a line, with their lines' numbers; WorkbookError at a line
    that holds none."""
    with path.open("rb") as stream:
        for number, line in enumerate(iter(lambda: stream.readline(_MAX_LINE + 1), b""), 1):
            if len(line) > _MAX_LINE:
                raise WorkbookError(
                    f"{path}:{number}: longer than {_MAX_LINE >> 20} MiB; write one object a line"
                )
            try:
                text = (
                    (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
                    .removesuffix(b"\n")
                    .decode()
                )
            except UnicodeDecodeError as error:
                raise _undecodable(path, number, error.object[error.start]) from error
            if not text.strip():
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise WorkbookError(
                    f"{path}:{number}: not valid JSON ({error}); write one object a line"
                ) from error
            if not isinstance(value, dict):
                raise WorkbookError(
                    f"{path}:{number}: expected a JSON object, found {type(value).__name__}"
                )
            yield number, value


def read_parquet(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Records of a parquet file, numbered from 1; only the used columns are read."""
    import pyarrow.parquet

    with path.open("rb") as stream:
        try:
            file = pyarrow.parquet.ParquetFile(stream)
            places = column_places(file.schema_arrow.names, columns, str(path))
            names = {field: file.schema_arrow.names[place] for field, place in places.items()}
            numbers = count(1)
            for batch in file.iter_batches(
                _PARQUET_ROWS, columns=list(dict.fromkeys(names.values()))
            ):
                values_by_column = [batch.column(name).to_pylist() for name in names.values()]
                for values in zip(*values_by_column, strict=True):
                    yield Record(
                        f"{path.name}:", next(numbers), dict(zip(names, values, strict=True))
                    )
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
"""By the suffix, in lower case."""


class InputFiles(NamedTuple):
    read: list[Path]
    skipped: list[Path]
    """Files of a folder whose names show that they hold no questions; they are reported."""


def list_files(path: Path) -> InputFiles:
    """The file itself, or a folder's files in the order of their names; WorkbookError where there
    is none."""
    try:
        if not path.is_dir():
            return InputFiles([path], [])
        found = sorted(
            file for file in path.iterdir() if file.is_file() and not _UNFINISHED.search(file.name)
        )
    except OSError as error:
        raise _unreadable(path, error) from error
    known = [file for file in found if file.suffix.lower() in (*READERS, _OLD_EXCEL)]
    if not known:
        raise WorkbookError(
            f"{path}: holds no {', '.join(READERS)} file; put one there or correct data.workbook"
        )
    return InputFiles(known, [file for file in found if file not in known])


def digest_of(path: Path) -> str:
    """Changes with the records that `read_records` would give, and with their sources."""
    files = list_files(path).read
    try:
        if files == [path]:
            _require_file(path)
            return sha256_of(path)
        return hash_of([[file.name, sha256_of(file)] for file in files])
    except OSError as error:
        raise _unreadable(path, error) from error


def read_records(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Every record, file by file; empty ones at a file's end are left out."""
    files, found = list_files(path).read, False
    for file in files:
        try:
            _require_file(file)
            if not any(block.strip() for block in blocks(file)):
                raise WorkbookError(f"{file}: is empty; fill in a header row and questions")
            for record in _without_blank_end(READERS[file.suffix.lower()](file, columns)):
                found = True
                yield record
        except OSError as error:
            raise _unreadable(file, error) from error
    if not found:
        what = "has a header" if files == [path] else "its files have headers"
        raise WorkbookError(f"{path}: {what} but no rows; fill in questions below it")


def read_header(path: Path) -> list[str]:
    """The names in the header row, those of a folder's first file; WorkbookError where the input
    can't be read."""
    try:
        next(read_records(path, InputColumns({"query": _NO_COLUMN}, frozenset({"query"}))))
    except MissingColumnError as error:
        return error.found
    return []


def _require_file(path: Path) -> None:
    if not path.exists():
        raise WorkbookError(f"{path}: no such file; correct data.workbook")
    if path.suffix.lower() == _OLD_EXCEL:
        raise WorkbookError(f"{path}: is the old Excel format; save it as .xlsx")
    if path.suffix.lower() not in READERS:
        raise WorkbookError(
            f"{path}: unknown suffix `{path.suffix}`; save it as {', '.join(READERS)}"
        )


def _without_blank_end(records: Iterable[Record]) -> Iterator[Record]:
    waiting: list[Record] = []
    for record in records:
        if record.blank:
            waiting.append(record._replace(cells={}))  # there may be a million
            continue
        yield from waiting
        waiting.clear()
        yield record


def _unreadable(path: Path, error: OSError) -> WorkbookError:
    return WorkbookError(f"{path}: can't be read: {error.strerror or error}; check its permissions")
