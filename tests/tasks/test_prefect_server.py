"""Prefect's server: what a new one begins with."""

from pathlib import Path

import pytest

from qinglan.tasks.prefect_server import begin_with_tables


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.db"
    path.write_bytes(b"tables")
    return path


def test_a_new_database_begins_with_the_tables(tmp_path: Path, empty: Path) -> None:
    begin_with_tables(f"sqlite+aiosqlite:///{tmp_path}/prefect.db", empty)
    assert (tmp_path / "prefect.db").read_bytes() == b"tables"


def test_a_database_that_is_there_stays(tmp_path: Path, empty: Path) -> None:
    (tmp_path / "prefect.db").write_bytes(b"flow runs")
    begin_with_tables(f"sqlite+aiosqlite:///{tmp_path}/prefect.db", empty)
    assert (tmp_path / "prefect.db").read_bytes() == b"flow runs"


@pytest.mark.parametrize("url", ["sqlite+aiosqlite:///:memory:", "postgresql+asyncpg://prefect@db/prefect"])
def test_another_kind_of_database_is_left_to_prefect(tmp_path: Path, empty: Path, url: str) -> None:
    begin_with_tables(url, empty)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.db"]


def test_without_such_a_file_prefect_makes_the_tables(tmp_path: Path) -> None:
    begin_with_tables(f"sqlite+aiosqlite:///{tmp_path}/prefect.db", tmp_path / "absent.db")
    assert not (tmp_path / "prefect.db").exists()
