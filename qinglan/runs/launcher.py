"""Starts processes on this machine, each supervised and with a log; `ray_jobs` submits what runs on
a cluster.

`launch` runs a command to its end, such as a training: while it runs, new lines of its metrics file
(one JSON object each) are handed to the caller, who may stop it by raising.
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
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (there it is)
_LEAKED = ("psm_*", "verl_weights_*")
"""Names of the shared memory that vLLM and verl make: their processes leave it there when they are
killed."""
ROW_CACHE = "row_cache"
"""In a stage's folder: an engine's copies of the training rows, which would else be in the user's
own cache."""
READABLE_ENV = {"PYTHONUNBUFFERED": "1"}  # logs are read while the process runs
QUIET_ENV = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
QUIET_ENV |= {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1"}
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
    """Yields the lines that were appended to a file since the last call. A half-written last line
    waits.

    A file that another one has replaced, as when a log is rewound to a checkpoint, is read from its
    start.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = size_of(path) if from_end else 0
        self._inode = path.stat().st_ino if path.exists() else None

    def new(self) -> Iterator[bytes]:
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != self._inode:
                self._offset, self._inode = 0, status.st_ino
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
        self._files: dict[Path, LineTail] = {}

    def new(self) -> Iterator[Metrics]:
        found = self._path.parent.glob(self._path.name)
        for path in sorted(found, key=lambda path: (len(path.name), path.name)):
            for line in self._files.setdefault(path, LineTail(path)).new():
                with suppress(ValueError):
                    yield json.loads(line)


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
        """Start it; its output is appended to the log. Files of `pass_fds`, such as locks, are open
        until it has ended.

        With `announces` the first line of its standard output is an address; see `address`.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.command, self.log, self.started_s = name, command, log, time.monotonic()
        self._log_start = size_of(log)
        with log.open("ab") as output:
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(
                    output, fcntl.LOCK_SH
                )  # the process keeps it, so that clean-up knows whose log is in use
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
        """Append what the Python threads of all its processes are doing to the log, as far as
        py-spy may see it."""
        py_spy = Path(sys.executable).with_name("py-spy")
        with self.log.open("ab") as output:
            for pid in descendants(self._process.pid):
                argv = [str(py_spy), "dump", "--pid", str(pid)]
                with suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(
                        argv, stdout=output, stderr=output, timeout=_STACKS_WITHIN_S, check=False
                    )

    def failure(self) -> AttemptFailedError:
        """How it ended, with the end of its log."""
        end = tail(self.log, start=self._log_start)
        message = f"{self.name} ended with status {self._process.wait()}; full log: {self.log}"
        return AttemptFailedError(message, time.monotonic() - self.started_s, end)

    def require_running(self) -> None:
        if self.status() is not None:
            raise self.failure()

    def address(self, within_s: float) -> str:
        """The address that it announced: it binds its own port, so no other process can take it in
        between."""
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + within_s, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise EngineError(
                    f"{self.name} did not listen within {within_s:.0f} s; full log: {self.log}"
                )
            if not (block := os.read(self._process.stdout.fileno(), 4096)):
                raise self.failure()
            line += block
        return line.decode().strip()


def launch(
    command: Command, *, name: str, log: Path, on_poll: Callable[[], None] | None = None
) -> None:
    """Run a command to its end; raises `AttemptFailedError` with the end of the log.

    What `on_poll` raises is raised after the process group has ended.
    """
    process, start_s = SupervisedProcess(name, command, log), time.time()
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
    if on_poll:
        on_poll()
    if process.status() != 0:
        raise process.failure()


def remove_leaked_memory(since_s: float, until_s: float = math.inf) -> None:
    """Remove shared memory of engines that was made in this time and that no process has mapped any
    longer."""
    leaked = [path for name in _LEAKED for path in _SHARED_MEMORY.glob(name)]
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps") if leaked else ():
        with suppress(OSError):  # it has ended, or is another user's
            maps += path.read_text(encoding="utf-8", errors="replace")
    for path in leaked:
        with suppress(OSError):
            status = path.stat()
            if (
                status.st_uid == os.getuid()
                and since_s <= status.st_mtime < until_s
                and str(path) not in maps
            ):
                path.unlink()


def output_of(argv: list[str], what: str, by_hand: str, **options: Any) -> str:
    """What a short command prints; raises `ConfigError` with its last line, and the command to try
    by hand."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=60.0, check=False, **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{what}: can't be run: {error}; try `{by_hand}` by hand") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [""]
        raise ConfigError(
            f"{what}: exits with {done.returncode}: {said[-1]}; try `{by_hand}` by hand, and correct it"
        )
    return str(done.stdout)


def size_of(path: Path) -> int:
    """In bytes, 0 where there is no such file."""
    return path.stat().st_size if path.exists() else 0


def tail(log: Path, start: int = 0) -> str:
    """The last 12 lines of a log, of those written from byte `start` on, indented."""
    with log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - 16_384))
        text = stream.read().decode(errors="replace")
    text = text.partition("torch/distributed/elastic/multiprocessing/api.py")[
        0
    ]  # torchrun's own summary of a failure
    return "\n".join(f"    {line}" for line in text.splitlines()[-12:])
