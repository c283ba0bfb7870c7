"""Questions out of a database: written down once, read-only, and no message shows the address."""

import socket
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qinglan.config import Columns, Data, Sql, Tenant
from qinglan.data.sources.database import query_database
from qinglan.data.workbook import read_rows
from qinglan.errors import ConfigError, QinglanError, WorkbookError
from qinglan.ledger import database as ledger_database
from qinglan.recipes import Input
from qinglan.rows import Row
from qinglan.runs.artifacts import write_jsonl

Ask = Callable[..., list[Row]]


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sekret.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE log (id INTEGER, 问题, 用户画像, 标准文档, updated)")
        rows = [
            (1, "头疼", 35.0, 7, b"x"),
            (2, "头疼！", 35, None, b"x"),
            (3, 42, "老人", None, None),
        ]
        connection.executemany(
            "INSERT INTO log VALUES (?, ?, ?, ?, ?)", [*rows, (4, "100%怎么办", b"x", None, None)]
        )
        connection.executemany(
            "INSERT INTO log VALUES (?, ?, '', '', '')", [(n, f"问{n}") for n in range(5, 3000)]
        )
    connection.close()
    monkeypatch.setenv("LOG_DB", f"sqlite:///{path}")
    return path


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    def work(query: str, *inputs: Input, **data: Any) -> list[Row]:
        settings = data_of(query, **data)
        write_jsonl(tmp_path / "run" / "source.jsonl", query_database(settings, inputs))
        return list(read_rows(tmp_path / "run" / "source.jsonl", settings, Tenant(), inputs=inputs))

    return work


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises(QinglanError) as caught:
        work()
    printed = "".join(traceback.format_exception(caught.value))
    assert "sekret" not in printed
    assert "\n" not in str(caught.value)
    return str(caught.value)


def data_of(query: str = "SELECT 问题 FROM log", **data: Any) -> Data:
    return Data(sql=Sql(url_env="LOG_DB", query=query), **data)


def test_rows_of_a_query_are_read_only_and_of_the_used_columns(
    database: Path, ask: Ask, tmp_path: Path
) -> None:
    rows = ask("SELECT * FROM log ORDER BY id")
    assert [row.source for row in rows[:5]] == [f"sql:{number}" for number in range(1, 6)]
    assert [row.reason for row in rows[:5]] == [None, "duplicate", "not_text", "not_text", None]
    assert (len(rows), rows[0].profile, rows[0].gold_id) == (2999, "35", "7")
    (row,) = ask(
        "SELECT id, 问题, '塞纳河' AS 提示, updated FROM log WHERE id = 1", Input("hint", "提示")
    )
    assert (tmp_path / "run" / "source.jsonl").read_text() == '{"问题": "头疼", "提示": "塞纳河"}\n'
    assert row.inputs == {"hint": "塞纳河"}
    (row,) = ask("SELECT replace(query_only, 1, '只读') AS 问题 FROM pragma_query_only")
    assert row.query == "只读"


QUERIES = {
    "WITH x AS (SELECT 问题 AS q FROM log WHERE 问题 LIKE '100%' OR 问题 = 'a:b ;') "
    "SELECT q FROM x;-- x": "100%怎么办",
    "SELECT replace(问题, 'drop', '; DELETE') AS q, updated AS \"insert\" "
    "FROM log WHERE id = 1 -- UPDATE": "头疼",
}


@pytest.mark.parametrize(("query", "first"), QUERIES.items())
def test_the_query_is_sent_as_it_is(database: Path, ask: Ask, query: str, first: str) -> None:
    assert [row.query for row in ask(query, columns=Columns(query="q"))] == [first]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("DELETE FROM log", "this has DELETE"),
        ("SELECT 1; SELECT 2", "only one SELECT statement"),
        ("WITH x AS (DELETE FROM log RETURNING *) SELECT * FROM x", "this has DELETE"),
        ("SELECT * INTO copy FROM log", "this has INTO"),
        ("PRAGMA user_version = 5", "only one SELECT statement"),
    ],
)
def test_a_statement_that_writes_is_refused(
    database: Path, ask: Ask, query: str, reason: str
) -> None:
    message = error_of(lambda: ask(query))
    assert message.startswith(
        "data.sql.query: only one SELECT statement that changes nothing is allowed"
    )
    assert reason in message


def test_a_query_that_fails_says_why_and_not_where(
    database: Path, ask: Ask, tmp_path: Path
) -> None:
    assert "integer overflow" in error_of(
        lambda: ask("SELECT 问题, abs(-9223372036854775808 + (id < 2000)) FROM log")
    )
    assert not (tmp_path / "run" / "source.jsonl").exists()
    assert "data.sql: no such table: no_log; check LOG_DB and the" in error_of(
        lambda: ask("SELECT 问题 FROM no_log")
    )
    assert "no column `问题` (found: id" in error_of(lambda: ask("SELECT id FROM log"))
    assert "returns no rows" in error_of(lambda: ask("SELECT 问题 FROM log WHERE id = 0"))
    database.write_bytes(b"no database at all" * 100)
    assert "file is not a database; check LOG_DB" in error_of(
        lambda: next(query_database(data_of()))
    )


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "data.sql needs the environment variable LOG_DB"),
        ("sekret", "LOG_DB: holds no database address; write it as postgresql"),
        ("sekret://u:p@host/db", "LOG_DB: names no database that SQLAlchemy knows"),
        ("sqlite:////no/sekret.db", "LOG_DB: there is no such SQLite file"),
        (
            "mssql+pymssql://sekret:sekret@sekret/sekret",
            "LOG_DB: its driver is not installed; run pip install pymssql",
        ),
    ],
)
def test_a_wrong_address_is_not_shown(monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    monkeypatch.setenv("LOG_DB", url)
    assert said in error_of(lambda: next(query_database(data_of())))


def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ledger_database._LIBPQ, "connect_timeout", 2)  # the least that libpq knows
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv(
            "LOG_DB", f"postgresql+psycopg://sekret:sekret@127.0.0.1:{silent.getsockname()[1]}/db"
        )
        assert "timeout" in error_of(lambda: next(query_database(data_of())))


def test_the_first_row_needs_no_more_of_the_result(database: Path) -> None:
    next(query_database(data_of()))
    fails_at_row_2000 = "SELECT 问题, abs(-9223372036854775808 + (id < 2000)) FROM log"
    next(query_database(data_of(fails_at_row_2000)))
    with pytest.raises(WorkbookError, match="no column `缺`"):
        next(query_database(data_of(), (Input("gap", "缺", required=True),)))
    with pytest.raises(ConfigError, match="only one SELECT"):
        next(query_database(data_of("VACUUM")))
