"""One `qinglan up` at a time on a state folder."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

from qinglan.errors import ConfigError
from qinglan.ops.prefect.server import LOCK_FILE, announced_url
from qinglan.runs.processes import POLL_S, Say

_ENDING_WITHIN_S = 60.0
"""Longer than the supervisors' grace."""


@contextmanager
def only_one(state: Path, say: Say) -> Iterator[int]:
    """Hold the state folder's lock; gives its file descriptor, which every process of the site is to keep open.

    So the lock is free when the last of them has ended, also after kill -9: until then they still have the ports.

    Raises:
        ConfigError: another one runs here, or its processes don't end.
    """
    state.mkdir(parents=True, exist_ok=True)
    with (state / LOCK_FILE).open("a+", encoding="utf-8") as file:
        _lock(file, state, say)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def _lock(file: IO[str], state: Path, say: Say) -> None:
    start, said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited_s = time.monotonic() - start
        file.seek(0)
        holder = file.read().strip()
        # Checking the lock takes it for a moment as well.
        if holder.isdigit() and psutil.pid_exists(int(holder)) and waited_s > 2 * POLL_S:
            where = announced_url(state) or "about to start"
            raise ConfigError(
                f"{state}: `qinglan up` runs here already (process {holder}, {where.removesuffix('/api')}); "
                "use that one, or give another paths.state"
            )
        if waited_s > _ENDING_WITHIN_S:
            raise ConfigError(f"{state}: processes of an earlier `qinglan up` have not ended; look for `supervise.py`")
        if not said and waited_s > 2 * POLL_S:
            said = True
            say("waiting for the processes of an earlier `qinglan up` to end")
        time.sleep(POLL_S)
