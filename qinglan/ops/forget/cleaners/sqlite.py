"""Cleans SQLite databases: Prefect's, MLflow's, and what deletions left in the ledger's file."""

import sqlite3
from contextlib import closing
from pathlib import Path

from qinglan.ledger import LEDGER_FILE
from qinglan.ops.forget.cleaners.removal import Removal
from qinglan.ops.forget.traces import MARK, Traces

SQLITE = b"SQLite format 3\0"
"""A database's first bytes."""
SQLITE_WAIT_S = 60.0
"""Longest wait for another process's transaction."""
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%'"
_TRACES_TABLE = "trace_info"
"""MLflow's table of traces, which its other tables refer to."""
_REMOVE_TRACES = (
    "DELETE FROM trace_info WHERE request_id IN "
    "(SELECT trace_id FROM spans WHERE instr(content, ?))"
)


def clean_database(path: Path, traces: Traces, *, dry_run: bool) -> Removal:
    """Redact every value of a database, and what deletions have left in its pages and its log."""
    is_ledger = path.name == LEDGER_FILE
    with closing(sqlite3.connect(path, timeout=SQLITE_WAIT_S, isolation_level=None)) as db:
        db.create_function("redacted", 1, lambda value: traces.redact(value)[0], deterministic=True)
        # The ledger's answers are dropped as a whole, by their requests.
        tables = [] if is_ledger else [name for (name,) in db.execute(_TABLES)]
        count = sum(_redact_table(db, table, dry_run=dry_run) for table in tables)
        if not dry_run:
            if _TRACES_TABLE in tables:
                _remove_mlflow_traces(db)
            if count or is_ledger or _has_leftovers(path, traces):
                db.execute("VACUUM")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return Removal("values", count, rows=None)


def _redact_table(db: sqlite3.Connection, table: str, *, dry_run: bool) -> int:
    """Put marks into all texts of a table; returns how many values have one."""
    count = 0
    for _, column, *_ in db.execute(f'PRAGMA table_info("{table}")').fetchall():
        has_text = f"""typeof("{column}") = 'text' AND redacted("{column}") != "{column}\""""
        # The names are the database's own.
        query = f'SELECT count(*) FROM "{table}" WHERE {has_text}'  # noqa: S608
        count += db.execute(query).fetchone()[0]
        if not dry_run:
            update = f'UPDATE "{table}" SET "{column}" = redacted("{column}")'  # noqa: S608
            db.execute(f"{update} WHERE {has_text}")
    return count


def _remove_mlflow_traces(db: sqlite3.Connection) -> None:
    """Remove the whole traces of calls in which a text was redacted.

    The answer of such a call need not quote the question, and a preview cuts a long one off.
    """
    # Spans, tags and figures go with their trace.
    db.execute("PRAGMA foreign_keys = ON")
    db.execute(_REMOVE_TRACES, (MARK,))


def _has_leftovers(path: Path, traces: Traces) -> bool:
    """Tell whether a text is still in the database's free pages or in its write-ahead log."""
    for file in (path, path.with_name(f"{path.name}-wal")):
        if file.exists() and traces.bytes_pattern.search(file.read_bytes()):
            return True
    return False
