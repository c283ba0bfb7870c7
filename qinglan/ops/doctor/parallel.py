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


def start_check(planned: PlannedCheck) -> Callable[[], tuple[list[Check], float]]:
    """Start a check; what is returned waits for its results and its seconds. A failure becomes a problem, too."""
    began, name, limit_s = time.monotonic(), f"{planned.name} ({planned.detail})", TIME_LIMITS_S[planned.time_limit]
    future = run_in_thread(lambda: (planned.run(), time.monotonic() - began))

    def wait() -> tuple[list[Check], float]:
        try:
            return future.result(max(0.0, began + limit_s - time.monotonic()))
        except Exception as error:  # noqa: BLE001 (a proxy that httpx2 refuses, a bug: the other checks go on)
            why = f"no result after {limit_s:.0f} s; does it hang, or drop packets? Try it by hand from here"
            if future.done():
                first = (str(error).splitlines() or [""])[0]
                why = f"{type(error).__name__}: {first}; a setting that a library refuses, or a bug: please report it"
        return [Check(planned.name, planned.detail, f"{name}: {why}")], time.monotonic() - began

    return wait
