"""Cleans files of text: JSON lines, JSON, lines of Markdown and CSV, and logs."""

import json
from pathlib import Path
from typing import Any

from qinglan.ops.forget.cleaners.removal import Removal, rewrite_text
from qinglan.ops.forget.records import parsed, query_of_line
from qinglan.ops.forget.traces import Traces


def clean_jsonl(path: Path, text: str, traces: Traces, *, dry_run: bool) -> Removal:
    """Remove the records of the rows, and the rows' texts from other records."""
    kept_lines: list[str] = []
    rows = 0
    changes = 0
    for line in text.split("\n"):
        has_trace = traces.pattern.search(line) is not None
        # A short question is no text to search for, but may be the whole of what a row asks.
        may_be_row = has_trace or bool(query_of_line(line, traces.columns))
        record = parsed(line) if may_be_row else None
        if record is not None and traces.is_about(record):
            rows += 1
            continue
        count = 0
        cleaned = line
        if has_trace and record:
            cleaned, count = _cleaned_json(record, traces)
        elif has_trace:
            cleaned, count = traces.redact(line)
        # JSON is written anew only where it loses something: its form may be another one.
        kept_lines.append(cleaned if count else line)
        changes += count
    if rows + changes and not dry_run:
        rewrite_text(path, "\n".join(kept_lines))
    return Removal("rows", rows + changes, rows)


def clean_json(path: Path, text: str, traces: Traces, *, dry_run: bool) -> Removal:
    """Remove the rows' entries, and their texts elsewhere in the file."""
    cleaned, count = _cleaned_json(json.loads(text), traces, indent=1)
    if count and not dry_run:
        rewrite_text(path, cleaned + "\n")
    return Removal("entries", count)


def clean_lines(path: Path, text: str, traces: Traces, *, dry_run: bool) -> Removal:
    """Remove each line that has a row's id or text."""
    lines = text.split("\n")
    kept_lines = [line for line in lines if not traces.pattern.search(line)]
    count = len(lines) - len(kept_lines)
    if count and not dry_run:
        rewrite_text(path, "\n".join(kept_lines))
    return Removal("lines", count)


def clean_text(path: Path, text: str, traces: Traces, *, dry_run: bool) -> Removal:
    """Put a mark in the place of each text of the rows."""
    cleaned, count = traces.redact(text)
    if count and not dry_run:
        rewrite_text(path, cleaned)
    return Removal("texts", count)


def empty_file(path: Path, *, dry_run: bool) -> Removal:
    """Empty a file that its owner makes again from the rows that stay."""
    if not dry_run:
        rewrite_text(path, "")
    return Removal("rows", 1)


def _cleaned_json(value: Any, traces: Traces, indent: int | None = None) -> tuple[str, int]:
    """JSON without the rows' entries and with marks for their texts, and how many both are."""
    kept_value, entries = _without_entries(value, traces)
    text, marks = traces.redact(json.dumps(kept_value, ensure_ascii=False, indent=indent))
    return text, entries + marks


def _without_entries(value: Any, traces: Traces) -> tuple[Any, int]:
    """A value of JSON without keys and list entries that are about a row, and their number."""
    dropped = 0
    if isinstance(value, dict):
        kept_items: dict[str, Any] = {}
        for key, item in value.items():
            if key in traces.ids:
                dropped += 1
                continue
            kept_items[key], dropped_within = _without_entries(item, traces)
            dropped += dropped_within
        return kept_items, dropped
    if isinstance(value, list):
        kept_entries: list[Any] = []
        for item in value:
            entry, dropped_within = _without_entries(item, traces)
            dropped += dropped_within
            if _is_entry_of_row(entry, traces):
                dropped += 1
            else:
                kept_entries.append(entry)
        return kept_entries, dropped
    return value, 0


def _is_entry_of_row(entry: Any, traces: Traces) -> bool:
    if isinstance(entry, dict):
        return traces.is_about(entry)
    return str(entry) in traces.ids
