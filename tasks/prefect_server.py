"""Runs Prefect's server as `prefect server start` does, but starts faster: it does not load
Prefect's command line.

`python -m qinglan.tasks.prefect_server HOST PORT`; every setting comes from the environment.
"""

import gc
import shutil
import sqlite3
import sys
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

EMPTY_DATABASE = Path(sys.prefix) / "share" / "qinglan" / f"prefect-{version('prefect')}.db"
"""Made by `make setup`, if by anyone: a SQLite database with this Prefect's tables."""


def main(host: str, port: int) -> None:
    """Serve until SIGTERM."""
    gc.disable()  # loading makes no garbage, and looking for it would take a fifth of the time
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import (
        PREFECT_API_DATABASE_MIGRATE_ON_START,
        get_current_settings,
        temporary_settings,
    )

    settings = get_current_settings().server
    url = settings.database.connection_url
    migrated = url is not None and begin_with_tables(url.get_secret_value())
    with temporary_settings({PREFECT_API_DATABASE_MIGRATE_ON_START: False} if migrated else {}):
        app = create_app(final=True)
        gc.freeze()
        gc.enable()
        keep_alive_s, level = settings.api.keepalive_timeout, settings.logging_level.lower()
        uvicorn.run(app, host=host, port=port, timeout_keep_alive=keep_alive_s, log_level=level)


def begin_with_tables(url: str, empty: Path = EMPTY_DATABASE) -> bool:
    """Copy `empty` to where a new SQLite database is to be, as making the tables by all migrations
    takes 3 s.

    Tells whether the database has all tables that `empty` has, so that no migration need be looked
    for.
    """
    from sqlalchemy.engine import make_url

    database = make_url(url).database if url.startswith("sqlite") else None
    if database in (None, "", ":memory:") or not empty.is_file():
        return False
    if not Path(database).exists():
        partial = Path(f"{database}.partial")
        shutil.copyfile(empty, partial)
        partial.replace(database)
    newest = _migration_of(empty)
    return newest is not None and _migration_of(Path(database)) == newest


def _migration_of(database: Path) -> str | None:
    """The last migration that a database has seen; None where it can't be read."""
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return str(connection.execute("SELECT version_num FROM alembic_version").fetchone())
    except sqlite3.Error:
        return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
