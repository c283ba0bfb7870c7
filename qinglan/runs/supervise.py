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
_KILL_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


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
    # The command may have left something behind.
    _kill_all(child.pid)
    return status if status >= 0 else 128 - status


def _begin() -> None:
    """Prepare the command's process, in it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # A shell has SIGINT ignored in background jobs, and what is ignored is inherited: a Prefect
    # worker, which makes a SIGINT of a SIGTERM, would never end by itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_caller(child: "subprocess.Popen[bytes]") -> None:
    _wait_for_end_of_stdin()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    _kill_all(child.pid)


def _wait_for_end_of_stdin() -> None:
    # Not sys.stdin.buffer: its lock would be held at interpreter exit.
    while os.read(sys.stdin.fileno(), 4096):
        pass


def _kill_all(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline_s = time.monotonic() + _KILL_WITHIN_S
    while True:
        # Asked for again each time: a process that is killed may have started another one.
        pids = descendants(os.getpid())
        if not pids or time.monotonic() >= deadline_s:
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_POLL_S)


def process_status(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, …

    Nothing where the system shows no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The name, in parentheses, may hold spaces and parentheses itself.
    return fields.rpartition(")")[2].split()


def descendants(root: int) -> list[int]:
    """Living children, grandchildren and so on, by /proc; none where there is no /proc."""
    parents = _parents_of_living()
    all_descendants: list[int] = []
    generation = {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        all_descendants += generation
    return all_descendants


def _parents_of_living() -> dict[int, int]:
    """Every process that is no zombie → its parent."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        status = process_status(path.name)
        if status and status[0] != "Z":
            parents[int(path.name)] = int(status[1])
    return parents


if __name__ == "__main__":
    sys.exit(main())
