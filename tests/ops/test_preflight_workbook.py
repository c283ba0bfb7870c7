"""Preflight looks at the first rows of a workbook, whatever kind it is of."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from qinglan.config import Profile
from qinglan.ops.preflight import Check, inspect_profile

ProfileOf = Callable[..., Profile]


@pytest.fixture
def check(profile_of: ProfileOf) -> Callable[..., Check]:
    return lambda **data: next(c for c in inspect_profile(profile_of(data=data), "refresh") if c.name == "workbook")


def test_only_the_first_rows_are_read(check: Callable[..., Check], tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"问题": "头疼"}\n' * 1000 + "not JSON\n")
    assert check(workbook=str(path)).problem is None
    path.write_text('{"问题": "头疼"}\n' * 999 + "not JSON\n")
    assert "q.jsonl:1000: not valid JSON" in str(check(workbook=str(path)).problem)


def test_one_good_row_far_down_is_enough(check: Callable[..., Check], tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("问题\n" + "42\n" * 1500 + "？\n")
    problem = check(workbook=str(path)).problem
    assert problem == (
        f"{path}: no row can be used; empty_query: fill in the question or delete the row; not_text: write it as text; "
        "numbers, dates, errors and lists are not questions"
    )
    path.write_text(path.read_text() + "头疼\n")
    assert check(workbook=str(path)).problem is None


def test_a_drop_folder_and_what_is_skipped_in_it(check: Callable[..., Check], tmp_path: Path) -> None:
    assert "holds no .xlsx" in str(check(workbook=str(tmp_path)).problem)
    (tmp_path / "q.csv").write_text("问题\n头疼\n")
    (tmp_path / "README.md").write_text("x")
    found = check(workbook=str(tmp_path))
    assert (found.problem, found.note) == (None, "skipped, by their suffix: README.md")


def test_a_database(check: Callable[..., Check], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sql = {"url_env": "LOG_DB", "query": "SELECT 问题 FROM log"}
    found = check(sql=sql)
    assert (found.detail, found.problem) == (
        "the database that LOG_DB names",
        "data.sql needs the environment variable LOG_DB; set it and run again",
    )
    connection = sqlite3.connect(tmp_path / "log.db")
    monkeypatch.setenv("LOG_DB", f"sqlite:///{tmp_path / 'log.db'}")
    assert check(sql=sql).problem == "data.sql: no such table: log; check LOG_DB and the query"
    connection.execute("CREATE TABLE log (问题)")
    connection.execute("INSERT INTO log VALUES ('头疼')")
    connection.commit()
    connection.close()
    assert check(sql=sql).problem is None
