"""Reads files, and folders of files, as one stream of records.

A folder may hold other files too. A file that is still being written must have another name (hidden, or `.partial`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from qinglan.data.sources.excel import read_xlsx
from qinglan.data.sources.readers import blocks, read_csv, read_jsonl, read_parquet
from qinglan.data.sources.records import InputColumns, Record
from qinglan.errors import WorkbookError
from qinglan.runs.artifacts import hash_of, sha256_of

Reader = Callable[[Path, InputColumns], Iterator[Record]]
READERS: dict[str, Reader] = {".xlsx": read_xlsx, ".csv": read_csv, ".jsonl": read_jsonl, ".parquet": read_parquet}
"""By the suffix, in lower case."""

_OLD_EXCEL = ".xls"
_UNFINISHED = re.compile(r"^(\.|~\$)|\.(partial|tmp)$", re.IGNORECASE)


class InputFiles(NamedTuple):
    read: list[Path]
    skipped: list[Path]
    """Files of a folder whose names show that they hold no questions; they are reported."""


def list_files(path: Path) -> InputFiles:
    """The file itself, or a folder's files in the order of their names; WorkbookError where there is none."""
    if not path.is_dir():
        return InputFiles([path], [])
    try:
        found = sorted(file for file in path.iterdir() if file.is_file() and not _UNFINISHED.search(file.name))
    except OSError as error:
        raise _unreadable(path, error) from error
    known = [file for file in found if file.suffix.lower() in (*READERS, _OLD_EXCEL)]
    if not known:
        raise WorkbookError(f"{path}: holds no {', '.join(READERS)} file; put one there or correct data.workbook")
    return InputFiles(known, [file for file in found if file not in known])


def digest_of(path: Path) -> str:
    """Changes with the records that `read_records` would give, and with their sources."""
    try:
        if not path.is_dir():
            _require_file(path)
            return sha256_of(path)
        return hash_of([[file.name, sha256_of(file)] for file in list_files(path).read])
    except OSError as error:
        raise _unreadable(path, error) from error


def read_records(path: Path, columns: InputColumns) -> Iterator[Record]:
    """Every record, file by file; empty ones at a file's end are left out."""
    files, found = list_files(path).read, False
    for file in files:
        for record in _without_blank_end(_read(file, columns)):
            found = True
            yield record
    if not found:
        what = "has a header" if files == [path] else "its files have headers"
        raise WorkbookError(f"{path}: {what} but no rows; fill in questions below it")


def _read(path: Path, columns: InputColumns) -> Iterator[Record]:
    try:
        _require_file(path)
        if not any(block.strip() for block in blocks(path)):
            raise WorkbookError(f"{path}: is empty; fill in a header row and questions")
        yield from READERS[path.suffix.lower()](path, columns)
    except OSError as error:
        raise _unreadable(path, error) from error


def _require_file(path: Path) -> None:
    if not path.exists():
        raise WorkbookError(f"{path}: no such file; correct data.workbook")
    if path.suffix.lower() == _OLD_EXCEL:
        raise WorkbookError(f"{path}: is the old Excel format; save it as .xlsx")
    if path.suffix.lower() not in READERS:
        raise WorkbookError(f"{path}: unknown suffix `{path.suffix}`; save it as {', '.join(READERS)}")


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
