"""Qinglan: from a workbook of questions to a small model that beats its teacher."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qinglan.evaluation.frames import run

__all__ = ["run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load `run` when it is first used."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported here, as pandas takes a second to load, and commands don't need it.
    from qinglan.evaluation.frames import run

    return run
