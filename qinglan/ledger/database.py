"""The ledger's database: where it is, how one connects to it, and its tables."""

import random
import sqlite3
import time
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from qinglan.config import LedgerStore, require_secret
from qinglan.errors import LedgerError

SCHEMA_VERSION = 3
RETRIEVALS_KEPT_S = 30 * 86400.0
"""Older ones are dropped when a ledger is opened: they only save asking the RAG again, and every
run adds some."""
_DROPPED_AT_ONCE = 50_000
# How long PostgreSQL may let us wait. The queue tries an order again for 60 s and keeps its
# answers, so what does not answer must be an error well before. A server that can't be reached is
# one after 10 s, a lost connection after 15 s: data that nobody acknowledges, or two unanswered
# probes while we wait for a result. A process that stops within a transaction loses its locks after
# 15 s, and who waits for them gives up only after 25 s. A statement may take longer than an order
# is tried: the longest questions add up millions of calls.
_LIBPQ = {
    "connect_timeout": 10,
    "tcp_user_timeout": 15_000,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
_LIMITS = {
    "idle_in_transaction_session_timeout": "15s",
    "lock_timeout": "25s",
    "statement_timeout": "5min",
}
_LOCK_TIMEOUT_S = 60
_LOCK_RETRY_S = 0.1
LEDGER_FILE = "ledger.db"
"""Name of the SQLite database in the state folder."""
_ADVISORY_LOCK = 7213094021
"""Number of the lock under which one process at a time makes the tables."""

TABLES = sa.MetaData()
_key = partial(sa.Column, type_=sa.Text, primary_key=True)
_text = partial(sa.Column, type_=sa.Text, nullable=False)
_number = partial(sa.Column, type_=sa.Double, nullable=False)
META = sa.Table("ledger_meta", TABLES, sa.Column("version", sa.Integer, primary_key=True))


def _table_of_tries(name: str, *columns: sa.Column[Any]) -> sa.Table:
    """A table with a row for each try at a request; `columns` stand in its middle."""
    return sa.Table(
        name,
        TABLES,
        sa.Column("id", sa.Integer, primary_key=True),
        _text("request_hash", index=True),
        _text("run_id"),
        _text("tenant"),
        _text("role"),
        _text("model"),
        *columns,
        _number("cost_usd"),
        sa.Column("latency_ms", sa.Double),
        _number("created_s"),
        sa.Index(f"{name}_by_run", "run_id", "role"),
    )


CALLS = _table_of_tries(
    "calls",
    _text("text"),
    sa.Column("reasoning", sa.Text),
    sa.Column("refusal", sa.Text),
    _text("finish_reason"),
    sa.Column("prompt_tokens", sa.Integer, nullable=False),
    sa.Column("completion_tokens", sa.Integer, nullable=False),
)
FAILURES = _table_of_tries(
    "failures", _text("reason"), sa.Column("estimated", sa.Boolean, nullable=False)
)
CLAIMS = sa.Table("claims", TABLES, _key("request_hash"), sa.Column("holder", sa.Text, index=True))
HOLDERS = sa.Table("holders", TABLES, _key("holder"), _number("seen_s"))
SPENT = sa.Table("spent", TABLES, _key("period"), _number("usd"))
BATCHES = sa.Table(
    "batches",
    TABLES,
    _key("digest"),
    _text("server"),
    _text("role"),
    _text("status"),
    _text("batch_id"),
    sa.Column("request_hashes", sa.JSON, nullable=False),
    _number("created_s"),
)
RETRIEVALS = sa.Table(
    "retrievals",
    TABLES,
    _key("key"),
    _text("scope", index=True),
    sa.Column("found", sa.JSON, nullable=False),
    _number("created_s", index=True),
)


def ledger_url(store: LedgerStore, state: Path) -> sa.URL:
    """Address of a site's ledger: the database that the environment variable names, or a file under
    `state`."""
    if store.url_env is None:
        state.mkdir(parents=True, exist_ok=True)
        return sa.URL.create("sqlite", database=str(state / LEDGER_FILE))
    url = url_of(require_secret(store.url_env, "the ledger"))
    if url is None or url.get_backend_name() not in ("postgresql", "sqlite"):
        hint = "set it again, with %40 for an @ in the password"
        raise LedgerError(
            f"ledger: {store.url_env} holds no postgresql://user:password@host/database; {hint}"
        )
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    return url


def libpq_limits(url: sa.URL) -> dict[str, int]:
    """Settings by which libpq ends the wait for a server that is gone; without what the URL itself
    says."""
    return {name: value for name, value in _LIBPQ.items() if name not in url.query}


def make_engine(url: str | sa.URL) -> sa.Engine:
    url = sa.make_url(url)
    if url.get_backend_name() == "postgresql":
        return _postgresql_engine(url)
    return _sqlite_engine(url)


def _postgresql_engine(url: sa.URL) -> sa.Engine:
    try:
        # A killed server or a fail-over costs one retry of the caller, not a dead pool.
        engine = sa.create_engine(
            url,
            connect_args=libpq_limits(url),
            pool_pre_ping=True,
            pool_size=2,
            hide_parameters=True,
        )
    except ModuleNotFoundError:
        message = (
            "ledger: PostgreSQL's driver is not installed; run pip install 'qinglan[postgres]'"
        )
        raise LedgerError(message) from None

    @sa.event.listens_for(engine, "begin")
    def _limit(connection: sa.Connection) -> None:
        # For the transaction: PgBouncer refuses a connection that asks for them, and shares its
        # sessions.
        settings = [sa.func.set_config(name, value, True) for name, value in _LIMITS.items()]
        connection.execute(sa.select(*settings))

    return engine


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": _LOCK_TIMEOUT_S}, hide_parameters=True)

    @sa.event.listens_for(engine, "connect")
    def _set_up(connection: Any, _record: Any) -> None:
        # BEGIN is ours to send, see below.
        connection.isolation_level = None
        _use_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        # A transaction that reads first and writes later can be refused the lock at once, without
        # waiting for it.
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def is_unreachable(error: sa.exc.DBAPIError) -> bool:
    """Can PostgreSQL's server not be reached, or is it being started or stopped?"""
    if not isinstance(error, sa.exc.OperationalError):
        return False
    # None where no server said anything.
    code = getattr(error.orig, "sqlstate", "")
    return code is None or code.startswith(("08", "57P"))


def _use_wal(connection: sqlite3.Connection) -> None:
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            # Refused at once, without SQLite's timeout, while another process makes or opens the
            # file.
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
        time.sleep(random.uniform(0, _LOCK_RETRY_S))


def url_of(address: str) -> sa.URL | None:
    """The URL; None where it is no address, or has an @ in its password: that would end in the
    host, which messages name."""
    try:
        url = sa.make_url(address)
    except (sa.exc.ArgumentError, ValueError):
        return None
    return None if "@" in (url.host or "") else url


def shown(url: sa.URL) -> str:
    """The address without the password, which may stand among the parameters too."""
    return url.set(query={}).render_as_string(hide_password=True)


def prepare(db: sa.Connection, name: str) -> None:
    """Make the tables of an empty ledger, and drop what is kept for a time only; LedgerError for
    another version."""
    if db.dialect.name == "postgresql":
        # Two processes that make the same tables get in each other's way.
        db.execute(sa.text(f"SELECT pg_advisory_xact_lock({_ADVISORY_LOCK})"))
    META.create(db, checkfirst=True)
    versions = set(db.scalars(sa.select(META.c.version)))
    other_versions = versions - {SCHEMA_VERSION}
    if other_versions:
        version = max(other_versions)
        problem = f"is of version {version}, this Qinglan writes version {SCHEMA_VERSION}"
        raise LedgerError(f"ledger {name}: {problem}; use the Qinglan that made it")
    TABLES.create_all(db)
    if not versions:
        db.execute(sa.insert(META).values(version=SCHEMA_VERSION))
    _drop_old_retrievals(db)


def _drop_old_retrievals(db: sa.Connection) -> None:
    oldest_kept_s = time.time() - RETRIEVALS_KEPT_S
    # No more than one statement can within its limit, or a ledger that has many could never be
    # opened again.
    old_keys = (
        sa.select(RETRIEVALS.c.key)
        .where(RETRIEVALS.c.created_s < oldest_kept_s)
        .limit(_DROPPED_AT_ONCE)
    )
    db.execute(sa.delete(RETRIEVALS).where(RETRIEVALS.c.key.in_(old_keys)))
