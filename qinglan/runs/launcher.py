"""Starts processes on this machine, each supervised and with a log.

`launch` runs a command to its end, such as a training: while it runs, new lines of its metrics file
(one JSON object each) are handed to the caller, who may stop it by raising. `ray_jobs` submits what
runs on a cluster.
"""

import fcntl
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qinglan.errors import ConfigError, EngineError
from qinglan.runs.supervise import descendants

SUPERVISOR = Path(__file__).with_name("supervise.py")
POLL_S = 0.5
_STACKS_WITHIN_S = 10.0
_OUTPUT_WITHIN_S = 60.0
_BLOCK_BYTES = 4096
_TAIL_BYTES = 16_384
_TAIL_LINES = 12
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (there it is)
_LEAKED = ("psm_*", "verl_weights_*")
"""Names of the shared memory that vLLM and verl make: their processes leave it there when they are
killed."""
_TORCHRUN_SUMMARY = "torch/distributed/elastic/multiprocessing/api.py"
"""Begins torchrun's own summary of a failure, which hides the last lines of what failed."""
ROW_CACHE = "row_cache"
"""A folder in a stage's for an engine's copies of the training rows, which would else be in the
user's own cache."""
READABLE_ENV = {"PYTHONUNBUFFERED": "1"}
"""Logs are read while the process runs."""
QUIET_ENV = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""No process that is started here sends telemetry."""

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """An argument list and what to add to the environment; neither ever holds a secret."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    """GPUs of one node that the process itself uses; those that it requests from Ray for its
    workers do not count."""


class AttemptFailedError(EngineError):
    """A command failed, for whatever reason, after `seconds`."""

    def __init__(self, message: str, seconds: float, said: str = "") -> None:
        super().__init__(message, said)
        self.seconds = seconds


class StalledError(AttemptFailedError):
    """A command makes no progress."""


class LineTail:
    """Yields the lines that were appended to a file since the last call.

    A half-written last line waits. A file that another one has replaced, as when a log is rewound
    to a checkpoint, is read from its start.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = size_of(path) if from_end else 0
        self._inode = path.stat().st_ino if path.exists() else None

    def new(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self._inode:
                self._inode = inode
                self._offset = 0
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line


class JsonlTail:
    """Yields the objects that were appended to a JSONL file since the last call.

    The name may be a pattern, such as `metrics.*.jsonl`, where every attempt has its own file: they
    are read in the order of their numbers. A line that is no JSON is skipped: a killed process left
    half of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tails: dict[Path, LineTail] = {}

    def new(self) -> Iterator[Metrics]:
        for path in self._files():
            tail_of_file = self._tails.setdefault(path, LineTail(path))
            for line in tail_of_file.new():
                with suppress(ValueError):
                    yield json.loads(line)

    def _files(self) -> list[Path]:
        files = self._path.parent.glob(self._path.name)
        # By length first: 10 comes after 9.
        return sorted(files, key=lambda path: (len(path.name), path.name))


class SupervisedProcess:
    """A command under `supervise.py`, in a session of its own and with a log.

    Its whole process group ends with it, on `ask_to_end`, and with this process, kill -9 included.
    Ctrl-C reaches this process only, which may still need the other one to finish cleanly.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        log: Path,
        *,
        pass_fds: Sequence[int] = (),
        announces: bool = False,
    ) -> None:
        """Start the command.

        Args:
            name: the process's name in messages.
            command: the command to start.
            log: the file to which its output is appended.
            pass_fds: open files, such as locks, that stay open until it has ended.
            announces: the first line of its standard output is an address; see `address`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.command = command
        self.log = log
        self.started_s = time.monotonic()
        self._log_start = size_of(log)
        with log.open("ab") as output:
            # The process keeps the lock, so that clean-up knows whose log is in use. Not every file
            # system has locks.
            with suppress(OSError):
                fcntl.flock(output, fcntl.LOCK_SH)
            self._process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *command.argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if announces else output,
                stderr=output,
                env={**os.environ, **QUIET_ENV, **READABLE_ENV, **command.env},
                start_new_session=True,
                pass_fds=pass_fds,
            )

    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Begin to end it, without waiting: `status` says when it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """End it and wait until its whole group has ended."""
        self.ask_to_end()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()

    def write_stacks(self) -> None:
        """Append the stacks of the Python threads of all its processes to the log.

        Those that py-spy may not see are left out.
        """
        py_spy = Path(sys.executable).with_name("py-spy")
        with self.log.open("ab") as output:
            for pid in descendants(self._process.pid):
                argv = [str(py_spy), "dump", "--pid", str(pid)]
                with suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(
                        argv, stdout=output, stderr=output, timeout=_STACKS_WITHIN_S, check=False
                    )

    def failure(self) -> AttemptFailedError:
        """An error that says how the process ended, with the end of its log."""
        last_lines = tail(self.log, start=self._log_start)
        status = self._process.wait()
        message = f"{self.name} ended with status {status}; full log: {self.log}"
        return AttemptFailedError(message, time.monotonic() - self.started_s, last_lines)

    def require_running(self) -> None:
        if self.status() is not None:
            raise self.failure()

    def address(self, within_s: float) -> str:
        """The address that it announced.

        It binds its own port, so no other process can take it in between.
        """
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + within_s
        line = b""
        while not line.endswith(b"\n"):
            remaining_s = max(0.0, deadline_s - time.monotonic())
            # Reading the line as such would wait beyond the deadline.
            ready, _, _ = select.select([self._process.stdout], [], [], remaining_s)
            if not ready:
                raise EngineError(
                    f"{self.name} did not listen within {within_s:.0f} s; full log: {self.log}"
                )
            block = os.read(self._process.stdout.fileno(), _BLOCK_BYTES)
            if not block:
                raise self.failure()
            line += block
        return line.decode().strip()


def launch(
    command: Command, *, name: str, log: Path, on_poll: Callable[[], None] | None = None
) -> None:
    """Run a command to its end; raises `AttemptFailedError` with the end of the log.

    An error of `on_poll` is raised after the process group has ended.
    """
    process = SupervisedProcess(name, command, log)
    # On the clock of the file system, unlike `process.started_s`.
    start_s = time.time()
    try:
        while process.status() is None:
            time.sleep(POLL_S)
            if on_poll:
                on_poll()
    except StalledError:
        process.write_stacks()
        raise
    finally:
        process.end()
        remove_leaked_memory(start_s)
    # Once more, for what a short command wrote since the last poll.
    if on_poll:
        on_poll()
    if process.status() != 0:
        raise process.failure()


def remove_leaked_memory(since_s: float, until_s: float = math.inf) -> None:
    """Remove shared memory of engines that no process has mapped any longer.

    Only what was made between the two times is removed.
    """
    leaked: list[Path] = []
    for pattern in _LEAKED:
        leaked += _SHARED_MEMORY.glob(pattern)
    if not leaked:
        return
    maps = _memory_maps()
    for path in leaked:
        with suppress(OSError):
            status = path.stat()
            is_ours = status.st_uid == os.getuid()
            is_of_this_time = since_s <= status.st_mtime < until_s
            if is_ours and is_of_this_time and str(path) not in maps:
                path.unlink()


def _memory_maps() -> str:
    """All files that this user's processes have mapped, as /proc lists them."""
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        # The process has ended, or is another user's.
        with suppress(OSError):
            maps += path.read_text(encoding="utf-8", errors="replace")
    return maps


def output_of(argv: list[str], what: str, by_hand: str, **options: Any) -> str:
    """The output of a short command.

    Raises `ConfigError` with its last line, and the command to try by hand.
    """
    try:
        process = subprocess.run(
            argv, capture_output=True, text=True, timeout=_OUTPUT_WITHIN_S, check=False, **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{what}: can't be run: {error}; try `{by_hand}` by hand") from error
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines() or [""]
        raise ConfigError(
            f"{what}: exits with {process.returncode}: {lines[-1]}; "
            f"try `{by_hand}` by hand, and correct it"
        )
    return str(process.stdout)


def size_of(path: Path) -> int:
    """Size in bytes, 0 where there is no such file."""
    return path.stat().st_size if path.exists() else 0


def tail(log: Path, start: int = 0) -> str:
    """The last 12 lines of a log, of those written from byte `start` on, indented."""
    with log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - _TAIL_BYTES))
        text = stream.read().decode(errors="replace")
    before_summary, _, _ = text.partition(_TORCHRUN_SUMMARY)
    last_lines = before_summary.splitlines()[-_TAIL_LINES:]
    return "\n".join(f"    {line}" for line in last_lines)
