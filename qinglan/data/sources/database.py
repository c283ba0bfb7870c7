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
    from sqlalchemy import URL, Connection, Engine

_FETCHED_ROWS = 1000
_EXAMPLE = "postgresql+psycopg://user:password@host/database"
_MAX_MESSAGE_CHARS = 300


def query_database(data: Data, inputs: Sequence[Input] = ()) -> Iterator[dict[str, Any]]:
    """The used columns of every row that the query returns, in its order.

    WorkbookError where there is no row, or the database reports an error; ConfigError where the
    address or the query can't be used.
    """
    from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError

    assert data.sql is not None
    query = _require_select(data.sql.query)
    variable = data.sql.url_env
    url = _url(data.sql)
    try:
        with _engine(url, variable).connect() as connection:
            _refuse_writes(connection)
            yield from _rows_of(connection, query, InputColumns.of(data, inputs))
    except NoSuchModuleError:
        raise ConfigError(
            f"{variable}: names no database that SQLAlchemy knows; write it as {_EXAMPLE}"
        ) from None
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{variable}: its driver is not installed; run pip install {error.name}"
        ) from None
    except (SQLAlchemyError, OSError) as error:
        # `from None`: the driver's own message may hold the address.
        raise WorkbookError(
            f"data.sql: {_without_address(error, url)}; check {variable} and the query"
        ) from None


def _url(sql: Sql) -> "URL":
    """The database's address out of the environment."""
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
    if url.get_backend_name() == "sqlite":
        file = url.database
        # Connecting to a file that is not there would create an empty database.
        if file and file != ":memory:" and not Path(file).is_file():
            raise ConfigError(f"{sql.url_env}: there is no such SQLite file; correct it")
    return url


def _engine(url: "URL", variable: str) -> "Engine":
    """An engine that keeps no connection open and shows no parameters in its errors."""
    from sqlalchemy import create_engine
    from sqlalchemy.pool import NullPool

    from qinglan.ledger.database import libpq_limits

    is_libpq = url.get_driver_name() in ("psycopg", "psycopg2")
    limits = libpq_limits(url) if is_libpq else {}
    engine = create_engine(url, poolclass=NullPool, hide_parameters=True, connect_args=limits)
    if engine.dialect.is_async:
        raise ConfigError(f"{variable}: names an asyncio driver; write it as {_EXAMPLE}")
    return engine


def _refuse_writes(connection: "Connection") -> None:
    """Have the database itself refuse writes, where it can: a SELECT may call what writes."""
    if connection.dialect.name == "postgresql":
        connection.execution_options(postgresql_readonly=True)
    elif connection.dialect.name == "sqlite":
        connection.exec_driver_sql("PRAGMA query_only = ON")


def _rows_of(
    connection: "Connection", query: str, columns: InputColumns
) -> Iterator[dict[str, Any]]:
    """The query's rows by the names of their used columns, fetched a block at a time."""
    options = {
        "stream_results": True,
        "yield_per": _FETCHED_ROWS,
        # Without parameters a driver leaves a % in the query as it is.
        "no_parameters": True,
    }
    result = connection.exec_driver_sql(query, execution_options=options)
    names = list(result.keys())
    places = column_places(names, columns, "data.sql.query").values()
    has_rows = False
    for row in result:
        has_rows = True
        yield {names[place]: _json_value(row[place]) for place in places}
    if not has_rows:
        raise WorkbookError(
            "data.sql.query: returns no rows; correct it, or run again once there are some"
        )


def _require_select(query: str) -> str:
    """The statement without its last semicolon, if it is a single one that only reads."""
    from sqlparse import tokens as kinds
    from sqlparse.lexer import tokenize

    words: list[str] = []
    writing_words: set[str] = set()
    for kind, text in tokenize(query):
        word = text.upper()
        if kind in kinds.Comment or not word.strip():
            continue
        words.append(word)
        if _writes(kind, word):
            writing_words.add(word)
    while words and words[-1] == ";":
        words.pop()

    is_select = bool(words) and words[0] in ("SELECT", "WITH")
    has_several_statements = ";" in words
    if not is_select or has_several_statements or writing_words:
        reason = ""
        if writing_words:
            reason = f", and this has {', '.join(sorted(writing_words))}"
        raise ConfigError(
            f"data.sql.query: only one SELECT statement that changes nothing is allowed{reason}"
        )
    return query.strip().rstrip("; \n\t\r")


def _writes(kind: Any, word: str) -> bool:
    """Tell whether a token of this kind begins or belongs to a statement that writes."""
    from sqlparse import tokens as kinds

    if kind in kinds.Keyword.DDL:
        return True
    if kind in kinds.Keyword.DML:
        # REPLACE is a function of texts too; as a statement it would be the query's first word.
        return word not in ("SELECT", "REPLACE")
    # SELECT … INTO makes a table.
    return kind in kinds.Keyword and word == "INTO"


def _json_value(value: Any) -> Any:
    """The value where JSON can hold it, otherwise its text.

    Bytes and collections give an object, which makes the row fail as `not_text`.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": len(value)}
    if isinstance(value, list | tuple | dict | set):
        return {"values": len(value)}
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value)


def _without_address(error: Exception, url: "URL") -> str:
    """The driver's message in one line, without statement, parameters and parts of the address."""
    # The driver's own error; SQLAlchemy's message around it would show the statement.
    driver_error = getattr(error, "orig", None) or type(error).__name__
    message = " ".join(str(driver_error).split())
    options = [str(value) for value in url.query.values()]
    parts = [url.password, url.username, url.host, url.database, *options]
    # The longest first: a short part inside of a longer one would break it up and leave its rest.
    for part in sorted(filter(None, parts), key=len, reverse=True):
        message = message.replace(part, "…")
    return message[:_MAX_MESSAGE_CHARS]
