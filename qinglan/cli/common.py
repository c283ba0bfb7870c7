"""Options that the commands share, how they print, and one line for what the system refuses."""

import errno
import gc
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qinglan.errors import ConfigError
from qinglan.text import one_line, without_controls

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_HINTS = {
    "free disk space, and try again": _NO_SPACE,
    "run this as its owner, change its owner or mode, or name another path": (
        errno.EACCES,
        errno.EPERM,
    ),
    "a folder is needed there; move the file away, or name another path": (
        errno.ENOTDIR,
        errno.EEXIST,
    ),
    "check the path, and what lies there": (
        errno.ENOENT,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
    ),
    "check the disk or share, or name another folder": (
        errno.EROFS,
        errno.EIO,
        errno.ESTALE,
        errno.ENOTCONN,
    ),
    "raise the limit (`ulimit -a`)": (errno.EMFILE, errno.ENFILE, errno.EFBIG),
}
"""The next step for the user, with the numbers of the errors that it is for."""

out = Console()
err = Console(stderr=True)
if not out.is_terminal:
    # rich assumes 80 columns and would cut the tables.
    out = Console(width=max(100, out.width))

ProfileOption = Annotated[str, typer.Option(help="Name of a file in configs/, or a path.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting by its dotted key."),
]


def say(text: str, console: Console = out, style: str | None = None) -> None:
    """Print plain text: markup and control characters are escaped."""
    plain = without_controls(text)
    console.print(plain, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Load modules in four fifths of the time: they make no garbage that is worth a scan."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A line for each fact with a value. A value is no markup."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in facts:
        if value:
            cell = Text(one_line(value)) if isinstance(value, str) else value
            table.add_row(Text(fact, "dim"), cell)
    return table


def figures_table(words: Iterable[str], figures: Iterable[str]) -> Table:
    """A table with a column for each heading: words fold, figures stand on the right."""
    table = Table(box=None, header_style="bold")
    for heading in words:
        table.add_column(heading, overflow="fold")
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def forced(force: bool, reason: str) -> str:
    """Why a version is used although the gate did not pass it; nothing where it was not forced.

    Raises ConfigError where only one of the two options is given.
    """
    if force and not reason.strip():
        raise ConfigError("--force: needs a --reason, which is kept with the version")
    if reason.strip() and not force:
        raise ConfigError("--reason: goes with --force")
    return reason.strip()


def explain_os_error(error: OSError) -> str | None:
    """One line on where it happened, what it is, and what to do.

    None where a traceback says more: the error names no file, or is none of the usual ones.
    """
    number = error.errno or 0
    path = error.filename
    if number in _NO_SPACE:
        # A copy names the file that it reads first; a write to an open file names none.
        path = error.filename2 or path or ""
    hint = next((hint for hint, numbers in _HINTS.items() if number in numbers), None)
    if hint is None or path is None or isinstance(path, int):
        return None
    place = f"{os.fsdecode(path)}: " if path else ""
    return f"{place}{os.strerror(number)}; {hint}"
