"""Reads user questions as rows.

A file that can't be read raises one `WorkbookError`; a row that can't be used is returned as a
failed row with its reason, so that no row is missing from the report. Cells are never evaluated: a
formula is refused, and a text that begins with ``=`` is text. Rows are a stream: only the source of
each question's first row stays in memory.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from qinglan.config import Data, Tenant
from qinglan.data.forgotten import NONE, Tombstones
from qinglan.data.sources.files import read_jsonl, read_records
from qinglan.data.sources.records import FIELDS, InputColumns, Record, cell_text, input_field
from qinglan.recipes import Input, identifying
from qinglan.rows import DIALOGUE, HINTS, Row, Split, documents_of, normalise, row_id
from qinglan.runs.artifacts import hash_of

_SPLITS = get_args(Split)


def read_rows(
    path: Path,
    data: Data,
    tenant: Tenant,
    report: Callable[[str], None] = lambda _: None,
    *,
    inputs: Sequence[Input] = (),
    forgotten: Tombstones = NONE,
) -> Iterator[Row]:
    """Every row of a file or folder, in its order; ids are unique.

    A row is `ok`, or `failed` with one of `rows.INPUT_REASONS`. Empty rows at a file's end are left
    out. Optional columns may be absent, unless the profile names them.

    Args:
        path: with `data.sql`, the snapshot of the database's rows.
        report: gets one line per failed row: source, reason and hint.
        inputs: the recipe's further columns.
        forgotten: rows that come without their texts, as failed ones.
    """
    columns = InputColumns.of(data, inputs)
    records = read_jsonl(path, columns, "sql:") if data.sql else read_records(path, columns)
    if data.limit:
        records = _limited(records, data.limit)
    first_sources: dict[str, str] = {}
    for record in records:
        source = f"{record.prefix}{record.number}"
        row = _row(record, source, tenant, inputs)
        if forgotten.cover(row):
            report(f"{source}: forgotten: {HINTS['forgotten']}")
            # Nothing of what it was may come back, not even the id that is a hash of its texts.
            empty_row = Row(id=hash_of(source)[:16], tenant=tenant.id, query="", source=source)
            yield empty_row.failed("forgotten")
            continue
        reason = record.flaw or _flaw(row, record.cells, data, inputs)
        repeats = ""
        if reason is None and row.id in first_sources:
            reason = "duplicate"
            repeats = f"repeats {first_sources[row.id]}; "
        if reason is None:
            first_sources[row.id] = source
            yield row
            continue
        report(f"{source}: {reason}: {repeats}{HINTS[reason]}")
        # Its id is its own, because its question may be empty or another row's.
        yield row.failed(reason).with_id(hash_of(row.id, row.source)[:16])


def without_forgotten(
    records: Iterable[dict[str, Any]],
    data: Data,
    tenant: Tenant,
    inputs: Sequence[Input],
    forgotten: Tombstones,
) -> Iterator[dict[str, Any]]:
    """A database's rows; forgotten ones are there, but empty."""
    columns = InputColumns.of(data, inputs)
    for values in records:
        record = Record(prefix="", number=0, cells=columns.cells(values))
        if forgotten.cover(_row(record, "", tenant, inputs)):
            # A row's source is its line in the snapshot, so that leaving one out would move others.
            yield dict.fromkeys(values)
        else:
            yield values


def _limited(records: Iterable[Record], limit: int) -> Iterator[Record]:
    """The first records, at most a third of them from each named split."""
    # A sorted workbook begins with rows of one split; a trial needs all three.
    split_limit = math.ceil(limit / len(_SPLITS))
    counts: Counter[str] = Counter()
    for record in records:
        split = cell_text(record.cells.get("split")).lower()
        if counts[split] < (split_limit if split else limit):
            counts[split] += 1
            yield record
        if counts.total() == limit:
            return


def _row(record: Record, source: str, tenant: Tenant, inputs: Sequence[Input]) -> Row:
    """The row that a record is, with an id, and not yet checked."""
    texts = {field: cell_text(record.cells.get(field)) for field in FIELDS}
    input_texts: dict[str, str] = {}
    for recipe_input in inputs:
        text = cell_text(record.cells.get(input_field(recipe_input.name)))
        if text:
            input_texts[recipe_input.name] = text

    dialogue: dict[str, str] = {}
    needs_dialogue = not (texts["profile"] and texts["history"])
    if texts[DIALOGUE] and needs_dialogue:
        dialogue[DIALOGUE] = texts[DIALOGUE]

    question = (texts["query"], texts["profile"], texts["history"])
    split = texts["split"].lower()
    return Row(
        id=row_id(tenant.id, *question, identifying(input_texts, inputs) | dialogue),
        tenant=tenant.id,
        query=texts["query"],
        profile=texts["profile"],
        history=texts["history"],
        # A cell of separators alone names no document.
        gold_id=texts["gold"] if documents_of(texts["gold"]) else None,
        intent=texts["intent"] or None,
        inputs=input_texts | dialogue,
        pool=texts["pool"] or None,
        split=split if split in _SPLITS else None,
        source=source,
    )


def _flaw(row: Row, cells: Mapping[str, Any], data: Data, inputs: Sequence[Input]) -> str | None:
    """The reason for which the row is no question; None where it is one."""
    query = cells.get("query")
    is_text = isinstance(query, str)
    if query == "" or not (is_text or row.query):
        return "empty_query"
    if not is_text or any(isinstance(value, list | dict | bytes) for value in cells.values()):
        return "not_text"
    # Only punctuation, emoji or invisible characters.
    if not normalise(row.query):
        return "empty_query"
    for recipe_input in inputs:
        if recipe_input.required and recipe_input.name not in row.inputs:
            return "empty_input"
    if len(row.query) > data.max_query_chars:
        return "query_too_long"
    context = (row.profile, row.history, *identifying(row.inputs, inputs).values())
    if sum(map(len, context)) > data.max_context_chars:
        return "context_too_long"
    if len(row.inputs.get(DIALOGUE, "")) > data.max_dialogue_chars:
        return "dialogue_too_long"
    if row.split is None and cell_text(cells.get("split")):
        return "bad_split"
    return None
