"""Disk space kept for the answers under way: a file beside the SQLite ledger, removed when the disk is full.

What was asked is paid for, and has to be written down even then. A database on a server has its own disk.
"""

import os
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa

from qinglan.errors import LedgerError

RESERVED_BYTES = 2 << 20
"""Some hundred answers."""
_SUFFIX = ".reserve"


def keep_reserve(url: sa.URL) -> None:
    """Make the file, unless there is no space for it."""
    if (path := _path(url)) is None or path.exists():
        return
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
    except FileExistsError:  # another process was quicker
        return
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def release_reserve(url: sa.URL) -> None:
    if path := _path(url):
        with suppress(OSError):
            path.unlink(missing_ok=True)


def is_full(error: LedgerError) -> bool:
    return "database or disk is full" in str(error)


def _path(url: sa.URL) -> Path | None:
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return None
    return Path(url.database + _SUFFIX)
