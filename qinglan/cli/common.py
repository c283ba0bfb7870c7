"""What the commands share: their options, and how they print."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qinglan.errors import ConfigError
from qinglan.text import one_line, without_controls

_TABLE_WIDTH = 100

out, err = Console(), Console(stderr=True)
if not out.is_terminal:  # rich assumes 80 columns and would cut the tables
    out = Console(width=max(_TABLE_WIDTH, out.width))

ProfileOption = Annotated[str, typer.Option(help="Name of a file in configs/, or a path.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting by its dotted key.")
]


def say(text: str, console: Console = out, style: str | None = None) -> None:
    """A line as it is: what comes from outside is no markup, and no command to the terminal."""
    console.print(without_controls(text), style=style, markup=False, highlight=False, soft_wrap=True)


def facts_table(facts: Iterable[tuple[str, str | Text]]) -> Table:
    """A line for each fact with a value. A value is no markup."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for fact, value in facts:
        if value:
            table.add_row(Text(fact, "dim"), Text(one_line(value)) if isinstance(value, str) else value)
    return table


def forced(force: bool, reason: str) -> str:
    """Why a version is used although the gate did not pass it; nothing where it was not forced."""
    if force and not reason.strip():
        raise ConfigError("--force: needs a --reason, which is kept with the version")
    return reason.strip() if force else ""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While modules load: that makes no garbage, and scanning for it would take a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
