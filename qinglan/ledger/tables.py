"""The ledger's tables."""

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from qinglan.errors import LedgerError

SCHEMA_VERSION = 2
RETRIEVALS_KEPT_S = 30 * 86400.0
"""Older ones are dropped when a ledger is opened: they only save asking the RAG again, and every run adds some."""

TABLES = sa.MetaData()


def _text(name: str, *, null: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=null)


_WHO = ("run_id", "tenant", "role", "model")
META = sa.Table("ledger_meta", TABLES, sa.Column("version", sa.Integer, primary_key=True))
CALLS = sa.Table(
    "calls",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("request_hash", sa.Text, nullable=False, index=True),
    *map(_text, _WHO),
    _text("text"),
    _text("reasoning", null=True),
    _text("refusal", null=True),
    _text("finish_reason"),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
    sa.Column("cost_usd", sa.Double, nullable=False),
    sa.Column("latency_ms", sa.Double),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Index("calls_by_run", "run_id", "role"),
)
FAILURES = sa.Table(
    "failures",
    TABLES,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("request_hash", sa.Text, nullable=False, index=True),
    *map(_text, _WHO),
    _text("reason"),
    sa.Column("latency_ms", sa.Double),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Index("failures_by_run", "run_id", "role"),
)
CLAIMS = sa.Table(
    "claims", TABLES, sa.Column("request_hash", sa.Text, primary_key=True), sa.Column("holder", sa.Text, index=True)
)
HOLDERS = sa.Table(
    "holders", TABLES, sa.Column("holder", sa.Text, primary_key=True), sa.Column("seen_s", sa.Double, nullable=False)
)
SPENT = sa.Table(
    "spent", TABLES, sa.Column("period", sa.Text, primary_key=True), sa.Column("usd", sa.Double, nullable=False)
)
BATCHES = sa.Table(
    "batches",
    TABLES,
    sa.Column("digest", sa.Text, primary_key=True),
    _text("server"),
    _text("role"),
    _text("status"),
    _text("batch_id"),
    sa.Column("request_hashes", sa.JSON, nullable=False),
    sa.Column("created_s", sa.Double, nullable=False),
)
RETRIEVALS = sa.Table(
    "retrievals",
    TABLES,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("scope", sa.Text, nullable=False, index=True),
    sa.Column("found", sa.JSON, nullable=False),
    sa.Column("created_s", sa.Double, nullable=False, index=True),
)


def prepare(db: sa.Connection, insert: Callable[[sa.Table], Any], name: str) -> None:
    """Make the tables of an empty ledger, and drop what is kept for a time only.

    Raises:
        LedgerError: the ledger is of another version.
    """
    if db.dialect.name == "postgresql":  # two processes that make the same tables get in each other's way
        db.execute(sa.text("SELECT pg_advisory_xact_lock(7213094021)"))
    META.create(db, checkfirst=True)
    versions = set(db.execute(sa.select(META.c.version)).scalars())
    if other := versions - {SCHEMA_VERSION}:
        raise LedgerError(
            f"ledger {name}: is of version {max(other)}, this Qinglan writes version {SCHEMA_VERSION}; "
            "use the Qinglan that made it"
        )
    TABLES.create_all(db)
    if not versions:
        db.execute(insert(META).values(version=SCHEMA_VERSION))
    db.execute(sa.delete(RETRIEVALS).where(RETRIEVALS.c.created_s < time.time() - RETRIEVALS_KEPT_S))
