"""The result of a cleaner, and the replacement of the file that it cleaned."""

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qinglan.runs.artifacts import written_whole


@dataclass(frozen=True)
class Removal:
    """The count of what was removed from a file or, in a dry run, would be."""

    kind: str
    """What is counted, in the plural: `rows`, `entries`, `lines`, `texts` or `values`."""
    count: int
    rows: int | None = 0
    """Rows that the file has lost; None for a database, which no manifest describes."""


NOTHING = Removal("", 0)


def rewrite(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file by what `write` puts into the path that it is given."""
    with written_whole(path) as partial:
        write(partial)
        partial.chmod(stat.S_IMODE(path.stat().st_mode))


def rewrite_text(path: Path, text: str) -> None:
    """Replace a file's text; bytes that are no UTF-8 stay as they were read."""
    rewrite(path, lambda partial: partial.write_text(text, "utf-8", "surrogateescape"))


def text_of(content: bytes) -> str:
    """A file's text; bytes that are no UTF-8 are kept for `rewrite_text`."""
    return content.decode(errors="surrogateescape")
