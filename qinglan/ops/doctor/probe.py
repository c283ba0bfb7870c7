"""Looks that go side by side, each with a time limit of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from qinglan.ops.checks import Check, Planned

QUICK_S = 12.0
"""For what is asked once."""
SLOW_S = 22.0
"""For what asks several times, or starts processes."""
LONGEST_S = 25.0
"""For what starts them elsewhere and cleans up after them."""
T = TypeVar("T")


@dataclass(frozen=True)
class Probe:
    """What is looked at, and for how long at most."""

    group: str
    name: str
    detail: str
    make: Callable[[], list[Check]]
    within_s: float = QUICK_S

    @classmethod
    def of(cls, group: str, planned: Planned, within_s: float = QUICK_S) -> "Probe":
        """A planned check as one of doctor's."""
        return cls(group, planned.name, planned.detail, lambda: [planned.make()], within_s)


@dataclass(frozen=True)
class Timed:
    """What a probe found, and how long it took."""

    checks: list[Check]
    seconds: float


def begin(make: Callable[[], T]) -> "Future[T]":
    """Work in a thread that nobody has to wait for, not even the interpreter's end."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 (whoever waits for the result gets it)
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


class Running:
    """A probe under way."""

    def __init__(self, probe: Probe) -> None:
        self._probe, self._began = probe, time.monotonic()
        self._future = begin(self._timed)

    def result(self) -> Timed:
        """What it found; that it found nothing in time, or failed, is a problem and hides no other."""
        left_s = self._began + self._probe.within_s - time.monotonic()
        try:
            return self._future.result(max(0.0, left_s))
        except Exception as error:  # noqa: BLE001 (a proxy that httpx2 refuses, a bug: the others are still told)
            if self._future.done():
                said = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                return self._failed(f"{said}; a setting that a library refuses, or a bug: please report it")
        return self._failed(
            f"nothing known after {self._probe.within_s:.0f} s; does it hang, or drop packets? Try it by hand from here"
        )

    def _failed(self, why: str) -> Timed:
        name, detail = self._probe.name, self._probe.detail
        return Timed([Check(name, detail, f"{name} ({detail}): {why}")], time.monotonic() - self._began)

    def _timed(self) -> Timed:
        return Timed(self._probe.make(), time.monotonic() - self._began)
