"""The workbook: user questions in (.xlsx, .csv, .jsonl), every row with its verdict out.

A file that can't be understood raises one `WorkbookError`; a row that can't be used comes back as a failed row with
its reason, so that nothing disappears between the workbook and the report. Cells are read for what they hold, never
evaluated: a formula is refused, a text that begins with ``=`` is text, and both ways round it stays text.
"""

import csv
import difflib
import io
import json
import math
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple, get_args

import openpyxl
from openpyxl.cell import Cell, MergedCell, WriteOnlyCell
from openpyxl.styles import Font
from openpyxl.utils import get_column_letter
from openpyxl.utils.exceptions import InvalidFileException

from qinglan.artifacts import Artifact, hash_of
from qinglan.config import Columns, Data, Tenant
from qinglan.errors import WorkbookError
from qinglan.rows import Retrieved, Row, Split, normalise, row_id

REMEDIES = {
    "empty_query": "fill in the question or delete the row",
    "not_text": "write it as text; numbers, dates, errors and lists are not questions",
    "query_too_long": "shorten the question, or allow it with --set data.max_query_chars=N",
    "context_too_long": "shorten profile and history, or allow them with --set data.max_context_chars=N",
    "duplicate": "delete one of the two",
    "formula_cell": "paste the formula's result as a value",
    "merged_cell": "unmerge the cells and give every row its own value",
    "extra_cells": "the line has more cells than the header; put text that contains commas in double quotes",
    "bad_split": "write train, dev or test, or leave the cell empty",
}
"""What to do about each reason for which reading fails a row."""

INPUT_REASONS = frozenset(REMEDIES)
"""Rows failed for one of these were never questions: no stage after reading looks at them."""

_FIELDS = tuple(Columns.model_fields)
_OLE_MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
_CORRUPT = (
    zipfile.BadZipFile, zlib.error, InvalidFileException, KeyError, ValueError, TypeError, IndexError,
    AttributeError, EOFError, OSError, NotImplementedError, SyntaxError,
)  # fmt: skip
"""What openpyxl raises on damaged files; XML parse errors are SyntaxErrors."""

# Not allowed in XML 1.0, or not encodable at all (lone surrogates out of JSON escapes).
_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]|_x000D_")


class _Record(NamedTuple):
    """One input row as it stands in the file."""

    source: str
    cells: Mapping[str, Any]
    """Value by field name (`query`, `profile`, …); absent columns are absent."""
    flaw: str | None = None
    """A reason that only the file format can tell, such as a merged cell."""
    blank: bool = False


def read_rows(path: Path, data: Data, tenant: Tenant) -> list[Row]:
    """Every row of the file, in its order, `ok` or `failed` with one of `INPUT_REASONS`; ids are unique.

    Empty rows at the end are no rows. Absent optional columns are fine under their default names; one that the
    profile names must be there.

    Raises:
        WorkbookError: the file as a whole can't be used.
    """
    readers = {".xlsx": _read_xlsx, ".csv": _read_csv, ".jsonl": _read_jsonl}
    content = _read_bytes(path, readers)
    records = list(readers[path.suffix.lower()](path, content, data))
    while records and records[-1].blank:
        records.pop()
    if not records:
        raise WorkbookError(f"{path}: has a header but no rows; fill in questions below it")
    return list(_rows(records[: data.limit], data, tenant))


def problems(rows: Sequence[Row]) -> list[str]:
    """One line per failed row: where, why, and what to do."""
    first = {row.id: row.source for row in rows if row.reason not in INPUT_REASONS}
    return [_problem(row, first) for row in rows if row.status == "failed"]


def _problem(row: Row, first: Mapping[str, str]) -> str:
    line = f"{row.source}: {row.reason}"
    if row.reason == "duplicate":
        original = first.get(row_id(row.tenant, row.query, row.profile, row.history), "another row")
        return f"{line}: repeats {original}; {REMEDIES['duplicate']}"
    return f"{line}: {REMEDIES[row.reason]}" if row.reason in REMEDIES else line


# From records to rows


def _rows(records: Iterable[_Record], data: Data, tenant: Tenant) -> Iterator[Row]:
    seen: set[str] = set()
    for record in records:
        texts = {field: _text(record.cells.get(field)) for field in _FIELDS}
        split = texts["split"].lower()
        row = Row(
            id=row_id(tenant.id, texts["query"], texts["profile"], texts["history"]),
            tenant=tenant.id,
            query=texts["query"],
            profile=texts["profile"],
            history=texts["history"],
            gold_id=texts["gold"] or None,
            split=split if split in get_args(Split) else None,
            source=record.source,
        )
        reason = record.flaw or _flaw(row, record.cells, data)
        if reason is None and split and row.split is None:
            reason = "bad_split"
        if reason is None and row.id in seen:
            reason = "duplicate"
        if reason is None:
            seen.add(row.id)
        yield _refused(row, reason) if reason else row


def _refused(row: Row, reason: str) -> Row:
    """The row failed, under an id of its own: what it asks may be nothing, or another row's question."""
    return row.failed(reason).model_copy(update={"id": hash_of(row.id, row.source)[:16]})


def _flaw(row: Row, cells: Mapping[str, Any], data: Data) -> str | None:
    query = cells.get("query")
    if _is_empty(query):
        return "empty_query"
    if not isinstance(query, str) or any(isinstance(value, list | dict) for value in cells.values()):
        return "not_text"
    if not normalise(row.query):  # only punctuation, emoji or invisible characters
        return "empty_query"
    if len(row.query) > data.max_query_chars:
        return "query_too_long"
    return "context_too_long" if len(row.profile) + len(row.history) > data.max_context_chars else None


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value)) or value == ""


def _text(value: Any) -> str:
    """A cell as a prompt may quote it: no illegal characters, 12.0 as 12, dates in ISO form."""
    if _is_empty(value):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, date | time):
        value = value.isoformat()
    return _ILLEGAL.sub("", str(value)).strip()


# Files


def _read_bytes(path: Path, known: Iterable[str]) -> bytes:
    try:
        if path.is_dir():
            raise WorkbookError(f"{path}: is a directory; give the file's path in data.workbook")
        if not path.exists():
            raise WorkbookError(f"{path}: no such file; correct data.workbook")
        if path.suffix.lower() == ".xls":
            raise WorkbookError(f"{path}: is the old Excel format; save it as .xlsx")
        if path.suffix.lower() not in known:
            raise WorkbookError(f"{path}: unknown suffix `{path.suffix}`; save it as {', '.join(known)}")
        content = path.read_bytes()
    except OSError as error:
        raise WorkbookError(f"{path}: can't be read: {error.strerror or error}; check its permissions") from error
    if not content.strip():
        raise WorkbookError(f"{path}: is empty; fill in a header row and questions")
    return content


def _locate(found: Sequence[str], columns: Columns, where: str) -> dict[str, int]:
    """Position of each used column that is there.

    Raises:
        WorkbookError: a column that must be there is not, or a used one is there twice.
    """
    places = {}
    for field in _FIELDS:
        name, default = getattr(columns, field), Columns.model_fields[field].default
        if found.count(name) > 1:
            letters = " and ".join(get_column_letter(i + 1) for i, other in enumerate(found) if other == name)
            raise WorkbookError(f"{where}: column `{name}` stands in the header twice ({letters}); rename one")
        if name in found:
            places[field] = found.index(name)
        elif field == "query" or name != default:
            raise WorkbookError(_missing_column(found, field, name, where))
    return places


def _missing_column(found: Sequence[str], field: str, name: str, where: str) -> str:
    names = [other for other in found if other]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
    if len(names) == 1 and re.search(r"[;\t|]", names[0]):
        return f"{where}: cells are not separated by commas (header: {names[0]!r}); save it as comma-separated CSV"
    listed = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    return (
        f"{where}: no column `{name}` (found: {listed or 'none'}{f'; nearest: {near[0]}' if near else ''}); "
        f"rename it or run with --set data.columns.{field}={near[0] if near else 'NAME'}"
    )


# Excel


def _read_xlsx(path: Path, content: bytes, data: Data) -> Iterator[_Record]:
    sheet = _open_sheet(path, content, data.sheet)
    where = f"{path}!{sheet.title}"
    last = max((place[0] for place, cell in sheet._cells.items() if cell.value is not None), default=0)
    if not last:
        raise WorkbookError(
            f"{where}: the sheet is empty (sheets: {', '.join(_sheet_names(sheet.parent))}); "
            "fill it in or choose another with --set data.sheet=NAME"
        )
    rows = sheet.iter_rows(max_row=last)
    header = [_text(cell.value) for cell in next(rows)]
    places = _locate(header, data.columns, f"{where}, row 1")
    return (_xlsx_record(f"{path.name}!{sheet.title}", cells, places) for cells in rows)


def _xlsx_record(prefix: str, row: Sequence[Cell | MergedCell], places: Mapping[str, int]) -> _Record:
    used = {field: row[place] for field, place in places.items()}
    flaw = None
    if any(isinstance(cell, MergedCell) for cell in used.values()):
        flaw = "merged_cell"
    elif any(cell.data_type == "f" for cell in used.values()):
        flaw = "formula_cell"
    elif any(cell.data_type == "e" for cell in used.values()):
        flaw = "not_text"
    return _Record(
        source=f"{prefix}!{used['query'].coordinate}",
        cells={field: _xlsx_value(cell) for field, cell in used.items()},
        flaw=flaw,
        blank=all(_text(cell.value) == "" for cell in row),
    )


def _xlsx_value(cell: Cell | MergedCell) -> Any:
    """The value; an array formula as its text."""
    return getattr(cell.value, "text", cell.value)


def _open_sheet(path: Path, content: bytes, name: str | None) -> Any:
    if content.startswith(_OLE_MAGIC):
        if _ENCRYPTED in content:
            raise WorkbookError(f"{path}: is encrypted; remove its password in Excel and save it again")
        raise WorkbookError(f"{path}: is an old .xls file under the name .xlsx; open it in Excel and save it as .xlsx")
    if not content.startswith(b"PK"):
        raise WorkbookError(f"{path}: is not an Excel file; if it is text, rename it to .csv, else save it as .xlsx")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # openpyxl's remarks on styles and extensions that don't concern cells
            book = openpyxl.load_workbook(io.BytesIO(content), keep_links=False)
    except _CORRUPT as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise WorkbookError(f"{path}: is damaged ({detail}); open it in Excel and save it again") from error
    names = _sheet_names(book)
    if not names:
        raise WorkbookError(f"{path}: has no worksheet; put the questions into one")
    if name is not None and name not in names:
        raise WorkbookError(f"{path}: no sheet `{name}` (sheets: {', '.join(names)}); correct data.sheet")
    return book[name or names[0]]


def _sheet_names(book: Any) -> list[str]:
    return [sheet.title for sheet in book.worksheets]  # `sheetnames` would count charts


# CSV and JSON lines


def _read_csv(path: Path, content: bytes, data: Data) -> Iterator[_Record]:
    lines = _csv_lines(path, _decode_csv(path, content))
    try:
        header = [_text(name) for name in next(lines)[1]]
    except StopIteration:
        raise WorkbookError(f"{path}: is empty; fill in a header row and questions") from None
    places = _locate(header, data.columns, f"{path}, line 1")
    return (_csv_record(f"{path.name}:{number}", cells, places, len(header)) for number, cells in lines)


def _csv_record(source: str, cells: Sequence[str], places: Mapping[str, int], width: int) -> _Record:
    used = {field: cells[place] for field, place in places.items() if place < len(cells)}
    return _Record(
        source=source,
        cells=used,
        flaw="extra_cells" if any(cell.strip() for cell in cells[width:]) else _number_flaw(used.get("query", "")),
        blank=not any(cell.strip() for cell in cells),
    )


def _number_flaw(query: str) -> str | None:
    """What a number is refused for in Excel, where cells have types; NaN is how pandas writes an empty one."""
    try:
        number = float(query)
    except ValueError:
        return None
    return "empty_query" if math.isnan(number) else "not_text"


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Records with the number of the line on which each begins; an unclosed quote can't swallow the rest."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise WorkbookError(
                f"{path}:{start}: not readable as CSV ({error}); close the quotes, and double those inside a cell"
            ) from error
        yield start, cells


def _decode_csv(path: Path, content: bytes) -> str:
    """UTF-8 with or without a mark, else GB18030, unless it is a damaged UTF-8 file (which GB18030 would garble)."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if _is_mostly_utf8(content):
            raise _undecodable(path, content, error.start) from error
    try:
        return content.decode("gb18030")
    except UnicodeDecodeError as error:
        raise _undecodable(path, content, error.start) from error


def _is_mostly_utf8(content: bytes) -> bool:
    readable = sum(len(char.encode()) for char in content.decode("utf-8", errors="ignore") if char > "\x7f")
    return readable > 0.9 * sum(byte >= 0x80 for byte in content)


def _undecodable(path: Path, content: bytes, place: int) -> WorkbookError:
    line = content.count(b"\n", 0, place) + 1
    return WorkbookError(
        f"{path}:{line}: byte {content[place]:#04x} is neither UTF-8 nor GB18030 text; save the file as UTF-8"
    )


def _read_jsonl(path: Path, content: bytes, data: Data) -> Iterator[_Record]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _undecodable(path, content, error.start) from error
    lines = [(n, _json_object(path, n, line)) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    names = list(dict.fromkeys(key for _, values in lines for key in values))
    places = _locate(names, data.columns, str(path))
    fields = {field: names[place] for field, place in places.items()}
    for number, values in lines:
        cells = {field: values[name] for field, name in fields.items() if name in values}
        yield _Record(source=f"{path.name}:{number}", cells=cells)


def _json_object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkbookError(f"{path}:{number}: not valid JSON ({error}); write one object a line") from error
    if not isinstance(value, dict):
        raise WorkbookError(f"{path}:{number}: expected a JSON object, found {type(value).__name__}")
    return value


# Writing


def write_rows(path: Path, rows: Iterable[Row]) -> Artifact:
    """An .xlsx with every row and its verdict, for people; the file's digest differs from write to write.

    Text never becomes a formula, whatever it begins with; cells longer than Excel's 32,767 characters are cut.
    """
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("数据")
    sheet.freeze_panes = "A2"
    for number, column in enumerate(_COLUMNS, 1):
        sheet.column_dimensions[get_column_letter(number)].width = column.width
    sheet.append([_header_cell(sheet, column.title) for column in _COLUMNS])
    count = 0
    for row in rows:
        sheet.append([_cell(sheet, column.value(row)) for column in _COLUMNS])
        count += 1
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(_COLUMNS))}{count + 1}"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    book.save(partial)
    partial.replace(path)
    return Artifact.of(path, count)


def _header_cell(sheet: Any, title: str) -> Cell:
    cell = WriteOnlyCell(sheet, title)
    cell.font = Font(bold=True)
    return cell


def _cell(sheet: Any, value: str | float | None) -> Cell | float | None:
    if not isinstance(value, str):
        return value
    cell = WriteOnlyCell(sheet, _ILLEGAL.sub("", value))
    cell.data_type = "s"  # openpyxl takes "=…" for a formula and "#N/A" for an error
    if value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        cell.quotePrefix = True  # stays text when somebody edits the cell
    return cell


class _Column(NamedTuple):
    title: str
    width: int
    value: Callable[[Row], str | float | None]


def _of(retrieved: Callable[[Row], Retrieved | None], what: Callable[[Retrieved], str | float | None]) -> Any:
    """A column over a retrieval that may not have happened."""

    def value(row: Row) -> str | float | None:
        found = retrieved(row)
        return None if found is None else what(found)

    return value


def _original(row: Row) -> Retrieved | None:
    return row.original_retrieved


def _rewritten(row: Row) -> Retrieved | None:
    return row.rewrite_retrieved


def _gold_rank(retrieved: Callable[[Row], Retrieved | None]) -> Callable[[Row], int | None]:
    """1-based rank of the gold document, 0 where it was missed, empty where there is none to find."""

    def value(row: Row) -> int | None:
        found = retrieved(row)
        return None if found is None or row.gold_id is None else found.rank(row.gold_id)

    return value


def _top1_score(found: Retrieved) -> float:
    return round(found.top1_score, 4)


def _quality(found: Retrieved) -> float:
    return round(found.quality, 4)


def _first_title(found: Retrieved) -> str:
    return found.titles[0] if found.titles else ""


_COLUMNS = (
    _Column("问题", 48, lambda row: row.query),
    _Column("用户画像", 24, lambda row: row.profile),
    _Column("历史摘要", 32, lambda row: row.history),
    _Column("改写", 48, lambda row: row.rewrite),
    _Column("状态", 8, lambda row: row.status),
    _Column("原因", 22, lambda row: row.reason),
    _Column("划分", 8, lambda row: row.split),
    _Column("裁判分", 9, lambda row: row.judge_score),
    _Column("原问题首条得分", 15, _of(_original, _top1_score)),
    _Column("改写首条得分", 13, _of(_rewritten, _top1_score)),
    _Column("原问题检索质量", 15, _of(_original, _quality)),
    _Column("改写检索质量", 13, _of(_rewritten, _quality)),
    _Column("标准文档", 20, lambda row: row.gold_id),
    _Column("原问题标准文档名次", 19, _gold_rank(_original)),
    _Column("改写标准文档名次", 17, _gold_rank(_rewritten)),
    _Column("改写首条内容", 40, _of(_rewritten, _first_title)),
    _Column("改写耗时（毫秒）", 17, lambda row: row.rewrite_latency_ms),
    _Column("改写成本（美元）", 17, lambda row: row.rewrite_cost_usd),
    _Column("来源", 28, lambda row: row.source),
    _Column("行编号", 20, lambda row: row.id),
)
