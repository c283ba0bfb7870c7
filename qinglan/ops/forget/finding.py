"""Finds the rows that tombstones name, and all that the site's files say of them."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import ValidationError

from qinglan.data.forgotten import Tombstones
from qinglan.ops.forget.records import (
    ID_KEYS,
    Context,
    cells_of,
    context_of,
    ids_in_line,
    is_long,
    parsed,
    query_of_line,
    row_id_in,
    strings_in,
)
from qinglan.ops.forget.stores import SiteFiles
from qinglan.ops.forget.traces import Traces
from qinglan.rows import Row, normalise, row_id
from qinglan.runs.artifacts import hash_of
from qinglan.text import forms_of


@dataclass
class NamedRows:
    """The rows that tombstones name, with all that files say of them."""

    rows: dict[str, Row] = field(default_factory=dict)
    """Rows by wording and context, as each of them asks for answers of its own."""
    ids: set[str] = field(default_factory=set)
    contexts: set[Context] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    """Texts that are long enough to be searched for."""
    answers: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Answers and samples of RL by row id: the judge was asked about each."""
    requests: set[str] = field(default_factory=set)
    """Ledger keys that the rows name themselves."""
    review_files: set[str] = field(default_factory=set)
    """Names of the reviewers' workbooks that had one of the rows."""

    def traces(self, texts: Collection[str], columns: Mapping[str, str]) -> Traces:
        """The traces of the rows; `texts` are those of their texts to search for."""
        return Traces(frozenset(self.ids), frozenset(self.contexts), frozenset(texts), columns)


def find_rows(
    tombstones: Tombstones,
    questions: Collection[str],
    tenant: str,
    columns: Mapping[str, str],
    files: SiteFiles,
) -> NamedRows:
    """Look up in the files of JSON lines what tombstones name.

    `questions` are those whose wording is still known, `columns` are a workbook's by field.
    """
    named_rows = NamedRows()
    for question in filter(normalise, questions):
        wording = question.strip()
        # The ledger may know the question without context where no file has its row.
        named_rows.rows[wording] = Row(
            id=row_id(tenant, wording), tenant=tenant, query=wording, source=""
        )
        if is_long(wording):
            named_rows.texts.add(wording)
    plain_ids = {row.id for row in named_rows.rows.values()}

    @cache
    def is_named(identifier: str) -> bool:
        return identifier in plain_ids or tombstones.has_row(identifier)

    names_questions = any(line.kind == "question" for line in tombstones.lines)
    for line in files.jsonl_lines():
        asks = names_questions and tombstones.has_question(query_of_line(line, columns))
        if asks or any(map(is_named, ids_in_line(line))):
            _note_record(named_rows, parsed(line), is_named, columns, asks=asks)
    return named_rows


def texts_of_other_rows(
    named_rows: NamedRows, columns: Mapping[str, str], files: SiteFiles
) -> set[str]:
    """The texts of the named rows that another row has too."""
    traces = named_rows.traces(named_rows.texts, columns)
    forms_by_text = {text: forms_of(text) for text in named_rows.texts}
    shared_texts: set[str] = set()
    for line in files.jsonl_lines():
        if not traces.texts_pattern.search(line):
            continue
        record = parsed(line)
        is_row = bool(cells_of(record, columns))
        if not is_row or traces.names(record):
            continue
        for text, forms in forms_by_text.items():
            if any(form in line for form in forms):
                shared_texts.add(text)
    return shared_texts


def _note_record(
    named_rows: NamedRows,
    record: Any,
    is_named: Callable[[str], bool],
    columns: Mapping[str, str],
    *,
    asks: bool,
) -> None:
    """Add what a record says; with `asks`, its question is one that a tombstone names."""
    ids = _ids_of(record, is_named)
    named_rows.ids |= ids
    # A record without such an id only refers to a row, as its near-duplicate does by its group.
    if not isinstance(record, dict) or not (ids or asks):
        return
    cells = cells_of(record, columns)
    if cells:
        named_rows.texts.update(filter(is_long, cells.values()))
        named_rows.contexts.add(context_of(cells))
    for request in (*(record.get("requests") or ()), record.get("answer_request")):
        if request is not None:
            named_rows.requests.add(request)
    is_review = "fingerprint" in record
    if is_review:
        named_rows.review_files.add(record["file"])
    is_sample_of_rl = isinstance(record.get("text"), str)
    if is_sample_of_rl:
        named_rows.answers[str(record.get("row_id"))].add(record["text"])
    _note_row(named_rows, record)


def _note_row(named_rows: NamedRows, record: dict[str, Any]) -> None:
    """Add a record that is a row of ours; others are left."""
    try:
        row = Row.model_validate(record)
    except ValidationError:
        return
    # The id of a row that failed at its reading is no question's.
    if not row.was_question:
        return
    named_rows.ids.add(row.id)
    wording = hash_of(row.id, row.query, row.profile, row.history, row.inputs)
    named_rows.rows[wording] = row
    named_rows.answers[row.id].add(row.answer or "")


def _ids_of(record: Any, is_named: Callable[[str], bool]) -> set[str]:
    """Ids of named rows that a record is about."""
    ids: set[str] = set()
    for key, text in strings_in(record):
        if key in ID_KEYS:
            ids.add(row_id_in(text))
    return set(filter(is_named, ids))
