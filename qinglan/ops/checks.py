"""One thing that is looked at before money or time is spent, and what was seen."""

from collections.abc import Callable
from dataclasses import dataclass

from qinglan.errors import QinglanError

Look = Callable[[], str | None]
"""One look, which raises a problem or returns a note."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `problem` is None where it is fine, or can't be told: `note` then says more."""

    name: str
    detail: str
    problem: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Planned:
    """A check that is still to be made."""

    name: str
    detail: str
    make: Callable[[], Check]


def check(name: str, detail: str, look: Look) -> Check:
    """Look, and take what an error of ours says for a problem."""
    try:
        return Check(name, detail, note=look())
    except QinglanError as error:
        return Check(name, detail, str(error))


def planned(name: str, detail: str, look: Look) -> Planned:
    """The same, later."""
    return Planned(name, detail, lambda: check(name, detail, look))
