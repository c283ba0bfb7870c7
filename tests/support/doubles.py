"""Test doubles: a clock, the end of a process, and a call that fails."""

from collections.abc import Callable
from typing import Any


class Clock:
    """Stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class KilledError(BaseException):
    """Stands for a signal that ends the process: no code that handles an Exception sees it."""


def raising(error: BaseException) -> Callable[..., Any]:
    """A function that raises this, whatever it is given."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
