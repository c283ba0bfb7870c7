"""Whether a file lock is held, asked without keeping it: who looks does not want to be taken for who works."""

import fcntl
from pathlib import Path

LOOK_S = 0.5
"""Longer than `is_held` keeps a lock: who wants it for work tries for so long before another one counts as at work."""


def is_held(file: Path, *, shared: bool = False) -> bool:
    """Does a process hold this file's lock (`flock`, as `filelock` takes it too)?

    A file that is not there is held by nobody. What can't be tried counts as held, be it another user's file that may
    not be opened or a file system without locks: who asks is about to remove or replace something, and then leaves it
    alone. While it is looked at, nobody can take it.

    Args:
        shared: also by those who share it. To try that takes the right to write, so a file that only another user may
            write counts as held too.
    """
    try:
        with file.open("r+b" if shared else "rb") as stream:
            fcntl.flock(stream, (fcntl.LOCK_EX if shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
