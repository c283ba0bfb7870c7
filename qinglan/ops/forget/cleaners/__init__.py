"""One cleaner for each format: it takes the rows, and elsewhere their texts, out of a file."""

from pathlib import Path

from qinglan.ops.forget.cleaners.removal import NOTHING, Removal, text_of
from qinglan.ops.forget.cleaners.sqlite import SQLITE, clean_database
from qinglan.ops.forget.cleaners.tables import clean_parquet, clean_workbook
from qinglan.ops.forget.cleaners.text_files import (
    clean_json,
    clean_jsonl,
    clean_lines,
    clean_text,
    empty_file,
)
from qinglan.ops.forget.stores import is_jsonl
from qinglan.ops.forget.traces import Traces


def clean_file(path: Path, traces: Traces, *, dry_run: bool) -> Removal:
    """Take the rows out of a file, or with `dry_run` only count what would go.

    A damaged file raises what its format's library raises.
    """
    # Both are compressed, so that nothing can be searched for in their bytes.
    if path.suffix == ".parquet":
        return clean_parquet(path, traces, dry_run=dry_run)
    if path.suffix == ".xlsx":
        return clean_workbook(path, traces, dry_run=dry_run)
    content = path.read_bytes()
    if content.startswith(SQLITE):
        return clean_database(path, traces, dry_run=dry_run)
    if is_jsonl(path):
        return clean_jsonl(path, text_of(content), traces, dry_run=dry_run)
    if not traces.bytes_pattern.search(content):
        return NOTHING
    if path.suffix == ".arrow":
        # An engine's copy of the training rows.
        return empty_file(path, dry_run=dry_run)
    text = text_of(content)
    if path.suffix == ".json":
        return clean_json(path, text, traces, dry_run=dry_run)
    if path.suffix in (".md", ".csv"):
        return clean_lines(path, text, traces, dry_run=dry_run)
    return clean_text(path, text, traces, dry_run=dry_run)
