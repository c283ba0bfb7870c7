"""Looks that go side by side, each with a time limit of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from qinglan.checks import Check, Planned

QUICK_S = 12.0
"""For what is asked once."""
SLOW_S = 24.0
"""For what asks several times, or starts processes."""
LONGEST_S = 27.0
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
        """What it found; that it found nothing in time is a problem."""
        probe, left_s = self._probe, self._began + self._probe.within_s - time.monotonic()
        try:
            return self._future.result(max(0.0, left_s))
        except TimeoutError:
            if self._future.done():  # its own, no matter of our limit
                raise
        late = (
            f"{probe.name} ({probe.detail}): nothing known after {probe.within_s:.0f} s; does it hang, or drop "
            "packets? Try it by hand from this machine"
        )
        return Timed([Check(probe.name, probe.detail, late)], probe.within_s)

    def _timed(self) -> Timed:
        return Timed(self._probe.make(), time.monotonic() - self._began)
