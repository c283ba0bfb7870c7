"""Qinglan: from a workbook of questions to a small model that beats its teacher."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qinglan.evaluation.frames import run

__all__ = ["run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`run`, loaded when it is asked for: pandas takes a second, and commands don't need it."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qinglan.evaluation.frames import run

    return run
