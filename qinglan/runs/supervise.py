"""Run a command, and end everything that it started when the caller ends.

`python supervise.py COMMAND...` waits on the command and on its own stdin. End of file there means
that the caller closed it or died, kill -9 included; then the command's group gets SIGTERM and,
after a grace period, all of its descendants get SIGKILL. So a killed flow leaves no training
process behind that would write into the next attempt's files. torchrun and Ray put their workers
into groups of their own, so on Linux this process adopts orphans and kills by descent; and where it
is killed itself, the kernel sends the command SIGTERM. It imports nothing but the standard library,
as it is started by path, in whatever environment the engine uses.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

GRACE_S = 15.0
_KILL_WITHIN_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    """The command's exit status (128 + signal where it was killed)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    child = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_begin,  # noqa: PLW1509 (no thread runs yet)
    )
    threading.Thread(target=_end_with_caller, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_all(child.pid)  # whatever the command left behind
    return status if status >= 0 else 128 - status


def _begin() -> None:
    """In the command's process. A shell has SIGINT ignored in background jobs, and what is ignored
    is inherited: a Prefect worker, which makes a SIGINT of a SIGTERM, would never end by itself."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_caller(child: "subprocess.Popen[bytes]") -> None:
    while os.read(
        sys.stdin.fileno(), 4096
    ):  # not sys.stdin.buffer: its lock would be held at interpreter exit
        pass
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    _kill_all(child.pid)


def _kill_all(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_WITHIN_S
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def process_status(pid: int | str) -> list[str]:
    """What /proc/PID/stat has behind the name: state, parent, …; nothing where the system shows no
    such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def descendants(root: int) -> list[int]:
    """Living children, grandchildren and so on, by /proc; none where there is no /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if (status := process_status(path.name)) and status[0] != "Z":
            parents[int(path.name)] = int(status[1])
    found: list[int] = []
    level = {root}
    while level := {pid for pid, parent in parents.items() if parent in level}:
        found += level
    return found


if __name__ == "__main__":
    sys.exit(main())
