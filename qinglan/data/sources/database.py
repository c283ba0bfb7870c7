"""Questions from a database: a snapshot of its rows is written to a file, which is then read.

A query's result may change at any time. The snapshot makes a run repeatable and lets it continue
after a kill without another query; its line number is the row's source. The address is only in an
environment variable and in no message: every part of it is removed from a driver's errors.
"""

import os
from collections.abc import Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qinglan.config import Data, Sql
from qinglan.data.sources.records import InputColumns, column_places
from qinglan.errors import ConfigError, WorkbookError
from qinglan.recipes import Input

if TYPE_CHECKING:
    from sqlalchemy import URL

_FETCHED_ROWS = 1000
_EXAMPLE = "postgresql+psycopg://user:password@host/database"


def query_database(data: Data, inputs: Sequence[Input] = ()) -> Iterator[dict[str, Any]]:
    """The used columns of every row that the query returns, in its order; WorkbookError where there
    is no row."""
    from sqlalchemy import create_engine
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError
    from sqlalchemy.pool import NullPool

    from qinglan.ledger.database import libpq_limits

    assert data.sql is not None
    query, variable, url = _require_select(data.sql.query), data.sql.url_env, _url(data.sql)
    try:
        limits = libpq_limits(url) if url.get_driver_name() in ("psycopg", "psycopg2") else {}
        engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=limits)
        if engine.dialect.is_async:
            raise ConfigError(f"{variable}: names an asyncio driver; write it as {_EXAMPLE}")
        with engine.connect() as connection:
            # Where the database can refuse writes, it does: a function that a SELECT calls may
            # write too.
            if engine.dialect.name == "postgresql":
                connection.execution_options(postgresql_readonly=True)
            elif engine.dialect.name == "sqlite":
                connection.exec_driver_sql("PRAGMA query_only = ON")
            options = {
                "stream_results": True,
                "yield_per": _FETCHED_ROWS,
                "no_parameters": True,
            }  # a % is a %
            result = connection.exec_driver_sql(query, execution_options=options)
            names, row = list(result.keys()), None
            places = column_places(names, InputColumns.of(data, inputs), "data.sql.query").values()
            for row in result:
                yield {names[place]: _json_value(row[place]) for place in places}
            if row is None:
                raise WorkbookError(
                    "data.sql.query: returns no rows; correct it, or run again once there are some"
                )
    except NoSuchModuleError:
        raise ConfigError(
            f"{variable}: names no database that SQLAlchemy knows; write it as {_EXAMPLE}"
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{variable}: its driver is not installed; run pip install {error.name}"
        ) from None
    except (SQLAlchemyError, OSError) as error:
        raise WorkbookError(
            f"data.sql: {_without_address(error, url)}; check {variable} and the query"
        ) from None


def _url(sql: Sql) -> "URL":
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    text = os.environ.get(sql.url_env, "").strip()
    if not text:
        raise ConfigError(
            f"data.sql needs the environment variable {sql.url_env}; set it and run again"
        )
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigError(
            f"{sql.url_env}: holds no database address; write it as {_EXAMPLE}"
        ) from None
    file = url.database
    if (
        url.get_backend_name() == "sqlite"
        and file
        and file != ":memory:"
        and not Path(file).is_file()
    ):
        raise ConfigError(
            f"{sql.url_env}: there is no such SQLite file; correct it"
        )  # connecting would make one
    return url


def _require_select(query: str) -> str:
    """The statement without its last semicolon, if it is a single one that only reads."""
    from sqlparse import tokens as kinds
    from sqlparse.lexer import tokenize

    tokens = [
        (kind, text.upper())
        for kind, text in tokenize(query)
        if text.strip() and kind not in kinds.Comment
    ]
    while tokens and tokens[-1][1] == ";":
        tokens.pop()
    writes = {
        text
        for kind, text in tokens
        if kind in kinds.Keyword.DDL
        or (kind in kinds.Keyword.DML and text not in ("SELECT", "REPLACE"))
        or (kind in kinds.Keyword and text == "INTO")
    }
    if (
        not tokens
        or tokens[0][1] not in ("SELECT", "WITH")
        or any(text == ";" for _, text in tokens)
        or writes
    ):
        found = f", and this has {', '.join(sorted(writes))}" if writes else ""
        raise ConfigError(
            f"data.sql.query: only one SELECT statement that changes nothing is allowed{found}"
        )
    return query.strip().rstrip("; \n\t\r")


def _json_value(value: Any) -> Any:
    """The value where JSON can hold it, else its text; bytes and collections give an object, hence
    `not_text`."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Decimal):
        return (
            int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
        )
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": len(value)}
    if isinstance(value, list | tuple | dict | set):
        return {"values": len(value)}
    return value.isoformat() if isinstance(value, date | time) else str(value)


def _without_address(error: Exception, url: "URL") -> str:
    """The driver's message in one line, without statement, parameters and every part of the
    address."""
    message = " ".join(str(getattr(error, "orig", None) or type(error).__name__).split())
    secrets = [
        url.password,
        url.username,
        url.host,
        url.database,
        *(str(value) for value in url.query.values()),
    ]
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        message = message.replace(secret, "…")
    return message[:300]
