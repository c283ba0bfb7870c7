"""Waiting for other processes and threads, and finding such a process.

Waiting ends as soon as the event is there, and says why where it never comes.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from qinglan.runs.supervise import descendants

LONGEST_S = 600.0
"""No more than a limit, on a machine that is busy with something else; nothing takes as long as
that."""
_LOOK_EVERY_S = 0.2
_EXPLANATION_CHARS = 4000


def wait_until(
    what: str,
    done: Callable[[], Any],
    within_s: float = LONGEST_S,
    *,
    explain: Callable[[], object] = lambda: "",
    look_every_s: float = _LOOK_EVERY_S,
) -> float:
    """Look until it is done; the seconds it took.

    Args:
        what: the event, as an error names it.
        explain: gives more for the error, such as a log, of which the end is shown.
    """
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > within_s:
            raise AssertionError(
                f"waited {within_s:.0f} s for {what}\n{str(explain())[-_EXPLANATION_CHARS:]}"
            )
        time.sleep(look_every_s)
    return time.monotonic() - start


async def until(done: Callable[[], object]) -> None:
    """Let this loop's other tasks work until it is done."""
    async with asyncio.timeout(60):
        # There is no event to wait for: a test's clock may only move with the loop.
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0)


def processes_with(*words: str, started_by: int | None = None) -> list[psutil.Process]:
    """Processes whose command line has all the words.

    Supervisors are left out, as their lines repeat what they start.

    Args:
        started_by: the process that has started them, itself or through others; None means whoever
            it was.
    """
    processes = []
    for pid in psutil.pids() if started_by is None else descendants(started_by):
        # A process may end while the others are looked at.
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            line = " ".join(process.cmdline())
            if all(word in line for word in words) and "supervise.py" not in line:
                processes.append(process)
    return processes
