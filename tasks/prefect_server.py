"""Runs Prefect's server as `prefect server start` does, but starts faster.

It does not load Prefect's command line, and a new database begins with its tables.

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
"""A SQLite database with this Prefect's tables, where `make setup` made one."""


def main(host: str, port: int) -> None:
    """Serve until SIGTERM."""
    # Loading makes no garbage, and looking for it would take a fifth of the time.
    gc.disable()
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import (
        PREFECT_API_DATABASE_MIGRATE_ON_START,
        get_current_settings,
        temporary_settings,
    )

    settings = get_current_settings().server
    url = settings.database.connection_url
    migrates = settings.database.migrate_on_start
    if url is not None and begin_with_tables(url.get_secret_value()):
        migrates = False
    with temporary_settings({PREFECT_API_DATABASE_MIGRATE_ON_START: migrates}):
        app = create_app(final=True)
        gc.freeze()
        gc.enable()
        uvicorn.run(
            app,
            host=host,
            port=port,
            timeout_keep_alive=settings.api.keepalive_timeout,
            log_level=settings.logging_level.lower(),
        )


def begin_with_tables(url: str, empty: Path = EMPTY_DATABASE) -> bool:
    """Copy `empty` to where a new SQLite database is to be.

    Making the tables by all of Prefect's migrations takes 3 s.

    Returns:
        Whether the database has all tables that `empty` has, so that no migration need be looked
        for.
    """
    database = _sqlite_file(url)
    if database is None or not empty.is_file():
        return False
    if not database.exists():
        # Renamed when it is complete: the process may be killed meanwhile.
        partial = Path(f"{database}.partial")
        shutil.copyfile(empty, partial)
        partial.replace(database)
    newest_migration = _migration_of(empty)
    return newest_migration is not None and _migration_of(database) == newest_migration


def _sqlite_file(url: str) -> Path | None:
    """The file of a SQLite database; None where it is in memory or on a server."""
    from sqlalchemy.engine import make_url

    if not url.startswith("sqlite"):
        return None
    name = make_url(url).database
    return None if name in (None, "", ":memory:") else Path(name)


def _migration_of(database: Path) -> str | None:
    """The last migration that a database has seen; None where it can't be read."""
    query = "SELECT version_num FROM alembic_version"
    try:
        with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
            return str(connection.execute(query).fetchone())
    except sqlite3.Error:
        return None


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
