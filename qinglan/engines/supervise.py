"""Run a command and end its whole process group when the caller goes away.

`python supervise.py COMMAND...` waits on the command and on its own stdin. End of file there means that the caller
closed it or died, kill -9 included; then the command's group gets SIGTERM and, after a grace period, SIGKILL. So a
killed flow leaves no training process behind that would write into the next attempt's files.

Imports nothing but the standard library: it is started by path, in whatever environment the engine uses.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 15.0


def main() -> int:
    """Exit with the command's status (128 + signal where it was killed)."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_caller, args=(child,), daemon=True).start()
    status = child.wait()
    _kill_group(child.pid, signal.SIGKILL)  # whatever the command left behind
    return status if status >= 0 else 128 - status


def _end_with_caller(child: "subprocess.Popen[bytes]") -> None:
    sys.stdin.buffer.read()
    _kill_group(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    _kill_group(child.pid, signal.SIGKILL)


def _kill_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main())
