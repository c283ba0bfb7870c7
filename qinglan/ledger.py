"""The ledger: every paid call, by the hash of what was asked.

SQLite in WAL mode: each answer is committed before anyone uses it, so a killed process loses at most the calls in
flight, and several processes (the flow, the reward workers) may share one file. Two that ask the same at the same
moment both pay: both calls are kept and counted, and the first answer is the one that is given from then on. Answers
that turned out unusable (a refusal, a truncated text) are kept too: asking again would pay again.
"""

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (
    request_hash TEXT NOT NULL, run_id TEXT NOT NULL, tenant TEXT NOT NULL, role TEXT NOT NULL,
    model TEXT NOT NULL, text TEXT NOT NULL, finish_reason TEXT NOT NULL, refusal TEXT,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, cost_usd REAL NOT NULL,
    latency_ms REAL NOT NULL, created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS failures (
    request_hash TEXT NOT NULL, run_id TEXT NOT NULL, tenant TEXT NOT NULL, role TEXT NOT NULL,
    model TEXT NOT NULL, reason TEXT NOT NULL, created_s REAL NOT NULL);
CREATE INDEX IF NOT EXISTS calls_by_request ON calls (request_hash);
CREATE INDEX IF NOT EXISTS calls_by_run ON calls (run_id, role);
CREATE INDEX IF NOT EXISTS failures_by_run ON failures (run_id, role);
"""


class Call(BaseModel):
    """One answered and paid call."""

    model_config = ConfigDict(frozen=True)

    request_hash: str
    run_id: str
    tenant: str
    role: str
    """teacher or judge"""
    model: str
    text: str
    finish_reason: str
    refusal: str | None = None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    latency_ms: float


class Usage(BaseModel):
    """What a run spent on one role.

    `failed` counts requests without a usable HTTP answer, retries included; `cached` answers came from the ledger and
    cost nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    calls: int = 0
    cached: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


class Ledger:
    """Calls by request hash. Safe for threads and processes; opened per process, never pickled."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, timeout=60, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(_SCHEMA)

    def get(self, request_hash: str) -> Call | None:
        """The answer to this request, if it was ever paid for."""
        columns = ", ".join(Call.model_fields)
        with self._lock:
            row = self._connection.execute(
                f"SELECT {columns} FROM calls WHERE request_hash = ? ORDER BY rowid LIMIT 1",  # noqa: S608 (our own names)
                (request_hash,),
            ).fetchone()
        return Call(**dict(zip(Call.model_fields, row, strict=True))) if row else None

    def record(self, call: Call) -> None:
        """Keep an answer."""
        values = {**call.model_dump(), "created_s": time.time()}
        marks = ", ".join(f":{name}" for name in values)
        with self._lock:
            self._connection.execute(
                f"INSERT INTO calls ({', '.join(values)}) VALUES ({marks})",  # noqa: S608
                values,
            )

    def record_failure(self, request_hash: str, run_id: str, tenant: str, role: str, model: str, reason: str) -> None:
        """Count a request that brought no answer."""
        with self._lock:
            self._connection.execute(
                "INSERT INTO failures VALUES (?, ?, ?, ?, ?, ?, ?)",
                (request_hash, run_id, tenant, role, model, reason, time.time()),
            )

    def usage(self, run_id: str, role: str) -> Usage:
        """Calls, tokens and dollars of one run; `cached` is not the ledger's to know."""
        with self._lock:
            calls, prompt, completion, cost = self._connection.execute(
                "SELECT count(*), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),"
                " coalesce(sum(cost_usd), 0) FROM calls WHERE run_id = ? AND role = ?",
                (run_id, role),
            ).fetchone()
            (failed,) = self._connection.execute(
                "SELECT count(*) FROM failures WHERE run_id = ? AND role = ?", (run_id, role)
            ).fetchone()
        return Usage(
            calls=calls + failed,
            failed=failed,
            prompt_tokens=prompt,
            completion_tokens=completion,
            cost_usd=cost,
        )

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


@contextmanager
def open_ledger(path: Path) -> Iterator[Ledger]:
    """A ledger that is closed at the end."""
    ledger = Ledger(path)
    try:
        yield ledger
    finally:
        ledger.close()
