"""The database that a new Prefect server begins with."""

from pathlib import Path

import pytest

from qinglan.tasks.prefect_server import begin_with_tables


@pytest.mark.parametrize(
    ("url", "there", "empty", "begins_with"),
    [
        ("sqlite+aiosqlite:///{}", None, "empty.db", b"tables"),
        ("sqlite+aiosqlite:///{}", b"flow runs", "empty.db", b"flow runs"),
        ("sqlite+aiosqlite:///{}", None, "absent.db", None),
        ("sqlite+aiosqlite:///:memory:", None, "empty.db", None),
        ("postgresql+asyncpg://prefect@db/prefect", None, "empty.db", None),
    ],
    ids=["new", "there already", "no file to begin with", "in memory", "on a server"],
)
def test_a_new_database_on_sqlite_begins_with_the_tables(
    tmp_path: Path, url: str, there: bytes | None, empty: str, begins_with: bytes | None
) -> None:
    database = tmp_path / "prefect.db"
    (tmp_path / "empty.db").write_bytes(b"tables")
    if there:
        database.write_bytes(there)
    begin_with_tables(url.format(database), tmp_path / empty)
    assert (database.read_bytes() if database.exists() else None) == begins_with
    assert {path.name for path in tmp_path.iterdir()} <= {"empty.db", "prefect.db"}
