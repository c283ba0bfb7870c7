"""Notes of what could not be done, while all the rest is."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from qinglan.data.sources.excel import CORRUPT
from qinglan.errors import QinglanError, first_line


@contextmanager
def noting(subject: object, notes: list[str]) -> Iterator[None]:
    """Note an error in the block by its subject, such as a file, and go on behind the block."""
    try:
        yield
    except (QinglanError, *CORRUPT, sqlite3.Error) as error:
        notes.append(f"{subject}: {first_line(error)}")
