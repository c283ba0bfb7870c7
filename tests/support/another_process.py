"""Another process that holds a run, a tenant's refresh or a GPU until it is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from qinglan.config import Profile

_HOLD = """
import sys
from qinglan.config import Profile
from qinglan.runs.locks import device_lock, refresh_lock
from qinglan.runs.run import open_run
profile = Profile.model_validate_json(sys.argv[2])
opening = {
    "refresh": lambda: refresh_lock(profile),
    "device": lambda: device_lock(profile, print),
    "pipeline": lambda: open_run(profile, "pipeline"),
}
with opening[sys.argv[1]]() as lock_or_run:
    print(getattr(lock_or_run, "id", "held"), flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(what: str, profile: Profile) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The process, and the id of the run that it holds, if any; dead after the block."""
    argv = [sys.executable, "-c", _HOLD, what, profile.model_dump_json()]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        run_id = process.stdout.readline().strip()
        assert run_id, "the process did not start"
        yield process, run_id
        process.kill()
