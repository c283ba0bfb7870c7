"""Waiting for what other processes and threads do: it ends as soon as it is so, and says why where it never is."""

import time
from collections.abc import Callable
from typing import Any

LONGEST_S = 600.0
"""No more than a limit, on a machine that is busy with something else; nothing takes as long as that."""
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
    """Look until it is so; the seconds it took.

    Args:
        what: is waited for, as it is told where it does not come.
        explain: tells more then, such as a log, of which the end is shown.
    """
    start = time.monotonic()
    while not done():
        if time.monotonic() - start > within_s:
            raise AssertionError(f"waited {within_s:.0f} s for {what}\n{str(explain())[-_EXPLANATION_CHARS:]}")
        time.sleep(look_every_s)
    return time.monotonic() - start
