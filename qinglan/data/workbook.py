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
    """Every row of a file or folder, in its order, `ok` or `failed` with one of
    `rows.INPUT_REASONS`; ids are unique.

    Empty rows at a file's end are left out. Optional columns may be absent, unless the profile
    names them.

    Args:
        path: with `data.sql`, the snapshot of the database's rows.
        report: gets one line per failed row: source, reason and hint.
        inputs: the recipe's further columns.
        forgotten: rows that come without their texts, as failed ones.
    """
    columns = InputColumns.of(data, inputs)
    records = read_jsonl(path, columns, "sql:") if data.sql else read_records(path, columns)
    first_sources: dict[str, str] = {}
    for record in _limited(records, data.limit) if data.limit else records:
        source = f"{record.prefix}{record.number}"
        row = _row(record, source, tenant, inputs)
        if forgotten.cover(row):
            report(f"{source}: forgotten: {HINTS['forgotten']}")
            yield Row(id=hash_of(source)[:16], tenant=tenant.id, query="", source=source).failed(
                "forgotten"
            )
            continue
        reason = record.flaw or _flaw(row, record.cells, data, inputs)
        repeats = ""
        if reason is None and (first := first_sources.setdefault(row.id, source)) is not source:
            reason, repeats = "duplicate", f"repeats {first}; "
        if reason is None:
            yield row
            continue
        report(f"{source}: {reason}: {repeats}{HINTS[reason]}")
        # Its id is its own, because its question may be empty or another row's.
        yield row.failed(reason).model_copy(update={"id": hash_of(row.id, row.source)[:16]})


def without_forgotten(
    records: Iterable[dict[str, Any]],
    data: Data,
    tenant: Tenant,
    inputs: Sequence[Input],
    forgotten: Tombstones,
) -> Iterator[dict[str, Any]]:
    """A database's rows; forgotten ones are empty, as the others' numbers are their sources."""
    names = InputColumns.of(data, inputs).names
    for each in records:
        cells = {field: each[name] for field, name in names.items() if name in each}
        yield (
            dict.fromkeys(each)
            if forgotten.cover(_row(Record("", 0, cells), "", tenant, inputs))
            else each
        )


def _limited(records: Iterable[Record], limit: int) -> Iterator[Record]:
    """The first records, at most a third of each named split: a sorted workbook begins with rows of
    one split."""
    taken: Counter[str] = Counter()
    for record in records:
        split = cell_text(record.cells.get("split")).lower()
        if taken[split] < (math.ceil(limit / len(_SPLITS)) if split else limit):
            taken[split] += 1
            yield record
        if taken.total() == limit:
            return


def _row(record: Record, source: str, tenant: Tenant, inputs: Sequence[Input]) -> Row:
    texts = {field: cell_text(record.cells.get(field)) for field in FIELDS}
    further = {each.name: cell_text(record.cells.get(input_field(each.name))) for each in inputs}
    split = texts["split"].lower()
    # A dialogue of which nothing is needed is not kept.
    dialogue = (
        {DIALOGUE: texts[DIALOGUE]}
        if texts[DIALOGUE] and not (texts["profile"] and texts["history"])
        else {}
    )
    asked = identifying(further, inputs) | dialogue
    return Row(
        id=row_id(tenant.id, texts["query"], texts["profile"], texts["history"], asked),
        tenant=tenant.id,
        query=texts["query"],
        profile=texts["profile"],
        history=texts["history"],
        gold_id=texts["gold"] if documents_of(texts["gold"]) else None,
        intent=texts["intent"] or None,
        inputs={name: text for name, text in further.items() if text} | dialogue,
        pool=texts["pool"] or None,
        split=split if split in _SPLITS else None,
        source=source,
    )


def _flaw(row: Row, cells: Mapping[str, Any], data: Data, inputs: Sequence[Input]) -> str | None:
    query = cells.get("query")
    if query == "" or not (isinstance(query, str) or row.query):
        return "empty_query"
    if not isinstance(query, str) or any(
        isinstance(value, list | dict | bytes) for value in cells.values()
    ):
        return "not_text"
    if not normalise(row.query):  # only punctuation, emoji or invisible characters
        return "empty_query"
    if any(each.required and each.name not in row.inputs for each in inputs):
        return "empty_input"
    if len(row.query) > data.max_query_chars:
        return "query_too_long"
    if (
        sum(map(len, (row.profile, row.history, *identifying(row.inputs, inputs).values())))
        > data.max_context_chars
    ):
        return "context_too_long"
    if len(row.inputs.get(DIALOGUE, "")) > data.max_dialogue_chars:
        return "dialogue_too_long"
    return "bad_split" if row.split is None and cell_text(cells.get("split")) else None
