"""Reads a record: its texts, whose it is, and what was asked in it.

A record is what a line of JSON, a table's row or an entry of a JSON list holds. It may be a row of
ours, a row of the user's workbook under its own column names, or anything about a row.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from qinglan.data.sources.records import FIELDS
from qinglan.rows import DIALOGUE, INPUT_REASONS, normalise

ID_KEYS = ("id", "row_id", "case_id", "row", "")
"""Keys whose value says whose record it is; the last stands for a list's entries."""
SHORTEST = 6
"""Characters, by `normalise`, of a text that is searched for: shorter ones are in other people's
texts by chance."""
_ID_IN_LINE = re.compile(r'"(?:redteam-)?(?:regression-)?([0-9a-f]{16})[-"]')
_CASE_KINDS = re.compile("^(redteam-)?(regression-)?")
_CONTEXT = ("query", "profile", "history")
_FIELDS_OF_ROWS = frozenset(FIELDS) - {DIALOGUE}
"""Fields that a row keeps by themselves; a workbook's other columns are its inputs."""

Context = tuple[str, ...]
"""Normalised question, profile, history and dialogue, by which two records ask the same."""


def parsed(line: str) -> Any:
    """The record of a line of JSON; None where it is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def strings_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Each text within a record, with the innermost key that it stands under."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from strings_in(item, name)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def ids_in_line(line: str) -> list[str]:
    """All row ids that a line of JSON names."""
    return _ID_IN_LINE.findall(line)


def row_id_in(text: str) -> str:
    """The row's id in an id that begins with it.

    A red team's case names its row behind the case's kind.
    """
    return _CASE_KINDS.sub("", text)[:16]


def cells_of(record: Any, columns: Mapping[str, str]) -> dict[str, str]:
    """The texts of a row by field, empty where the record is no row.

    `columns` gives a workbook's column by field.
    """
    if not isinstance(record, dict):
        return {}
    is_ours = "query" in record
    values: dict[str, Any] = {}
    for field in _CONTEXT:
        values[field] = record.get(field if is_ours else columns[field])
    for field, column in columns.items():
        if field not in _FIELDS_OF_ROWS:
            values[field] = record.get(column)
    inputs = record.get("inputs")
    # A user's own column may have this name.
    if isinstance(inputs, dict):
        values.update(inputs)
    cells = {field: value.strip() for field, value in values.items() if isinstance(value, str)}
    return cells if cells.get("query") else {}


def query_of_line(line: str, columns: Mapping[str, str]) -> str:
    """The question that a line of JSON asks, empty where it is no row."""
    # Parsing every line of a site would take many times as long.
    may_be_row = '"query"' in line or f'"{columns["query"]}"' in line
    if not may_be_row:
        return ""
    return cells_of(parsed(line), columns).get("query", "")


def context_of(cells: Mapping[str, str]) -> Context:
    """The context of a row with these cells."""
    context = tuple(normalise(cells.get(field, "")) for field in _CONTEXT)
    if all(context):
        # As ingest reads a row: a dialogue counts only where profile or history is empty.
        return (*context, "")
    return (*context, normalise(cells.get(DIALOGUE, "")))


def is_own_row(record: Mapping[str, Any]) -> bool:
    """Tell whether a row has an id that is the hash of what it asks."""
    return "id" in record and record.get("reason") not in INPUT_REASONS


def is_long(text: str) -> bool:
    """Tell whether a text is long enough to be searched for."""
    return len(normalise(text)) >= SHORTEST
