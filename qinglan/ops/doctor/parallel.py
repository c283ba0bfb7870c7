"""Runs checks side by side, each with a time limit of its own."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from qinglan.ops.checks import TIME_LIMITS_S, Check, PlannedCheck

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> "Future[T]":
    """In a daemon thread: one that hangs holds up nothing, not even the interpreter's end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised where the result is taken)
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class RunningCheck:
    """A check that was started."""

    def __init__(self, planned: PlannedCheck) -> None:
        self._planned, self._began = planned, time.monotonic()
        self._within_s = TIME_LIMITS_S[planned.time_limit]

        def run() -> tuple[list[Check], float]:
            return planned.run(), time.monotonic() - self._began

        self._future = run_in_thread(run)

    def result(self) -> tuple[list[Check], float]:
        """The results, and how many seconds they took. A check that fails or takes too long becomes a problem."""
        left_s = self._began + self._within_s - time.monotonic()
        why = f"no result after {self._within_s:.0f} s; does it hang, or drop packets? Try it by hand from here"
        try:
            return self._future.result(max(0.0, left_s))
        except Exception as error:  # noqa: BLE001 (a proxy that httpx2 refuses, a bug: the other checks go on)
            if self._future.done():
                first = (str(error).splitlines() or [""])[0]
                why = f"{type(error).__name__}: {first}; a setting that a library refuses, or a bug: please report it"
        name, detail = self._planned.name, self._planned.detail
        return [Check(name, detail, f"{name} ({detail}): {why}")], time.monotonic() - self._began
