"""The one place that starts training processes on this machine; `ray_jobs` submits them to a cluster.

A command runs under `supervise`, so that cancelling, failing or killing the flow ends the whole process group. Its
output goes to a log file; a failure is raised with the log's last lines and path. While it runs, new lines of its
metrics file (one JSON object each) are handed to the caller, who may stop it by raising.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qinglan.errors import EngineError
from qinglan.runs.command import QUIET_ENV, Command

SUPERVISOR = Path(__file__).with_name("supervise.py")
POLL_S = 0.5
TAIL_LINES = 12
READABLE_ENV = {"PYTHONUNBUFFERED": "1"}  # logs are read while the process runs

Metrics = dict[str, Any]


class AttemptFailedError(EngineError):
    """A training process failed, for whatever reason; `seconds` says after how long."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class LineTail:
    """Yields the lines that were appended to a file since the last look. A half-written last line waits.

    A file that another one has replaced, as when a log is rewound to a checkpoint, is read from its start.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = size_of(path) if from_end else 0
        self._inode = path.stat().st_ino if path.exists() else None

    def new(self) -> Iterator[bytes]:
        """New complete lines."""
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
    """Yields the objects that were appended to a JSONL file since the last look.

    The name may be a pattern, such as `metrics.*.jsonl`, where every attempt has its own file: they are read in the
    order of their numbers. A line that is no JSON is skipped: a killed process left half of it, and the next one wrote
    on from there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[Path, LineTail] = {}

    def new(self) -> Iterator[Metrics]:
        """New complete objects."""
        found = self._path.parent.glob(self._path.name)
        for path in sorted(found, key=lambda path: (len(path.name), path.name)):
            for line in self._files.setdefault(path, LineTail(path)).new():
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue
                yield entry


def launch(
    command: Command,
    *,
    name: str,
    log: Path,
    cwd: Path | None = None,
    on_poll: Callable[[], None] | None = None,
) -> float:
    """Run to the end and return the seconds it took.

    Raises:
        AttemptFailedError: a non-zero exit, with the end of the log.
        Exception: whatever `on_poll` raises, after the process group has ended.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log_start = size_of(log)
    environment = {**os.environ, **QUIET_ENV, **READABLE_ENV, **command.env}
    if environment.get("CUDA_VISIBLE_DEVICES") == "":  # would break Ray's logical GPU
        del environment["CUDA_VISIBLE_DEVICES"]
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, str(SUPERVISOR), *command.argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            if on_poll:
                on_poll()
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    if on_poll:
        on_poll()
    if process.returncode != 0:
        said = f"{name} ended with status {process.returncode}; full log: {log}\n{tail(log, start=log_start)}"
        raise AttemptFailedError(said, time.monotonic() - start)
    return time.monotonic() - start


def size_of(path: Path) -> int:
    """In bytes, 0 where there is no such file."""
    return path.stat().st_size if path.exists() else 0


def tail(log: Path, lines: int = TAIL_LINES, start: int = 0) -> str:
    """The last lines of a log, of those written from byte `start` on, indented."""
    with log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - 16_384))
        text = stream.read().decode(errors="replace")
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
