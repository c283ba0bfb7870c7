"""Several background processes at once, each under `supervise.py` and with a log of its own.

All of them end with this process, kill -9 included. For servers; what runs to an end is for the launcher.
"""

import errno
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import httpx2

from qinglan.errors import ConfigError, EngineError
from qinglan.runs.back_off import BackOff
from qinglan.runs.command import QUIET_ENV, Command
from qinglan.runs.launcher import READABLE_ENV, SUPERVISOR, tail

HOST = "127.0.0.1"
READY_WITHIN_S = 300.0
POLL_S = 0.5
_SAY_EVERY_S = 15.0
_BACK_OFF = BackOff(1.0, 60.0)
"""Before a process that ended is started again: doubled each time, until it has run for longer than the longest."""
_LOG_BYTES = 50_000_000
"""Of a log that goes on for months; one as large before it is kept."""
_LOGS_EVERY_S = 60.0

Say = Callable[[str], object]
Recover = Callable[[str], object]
"""What to do before the process of this name is started again; httpx2.HTTPError puts that off."""


@dataclass
class _Kept:
    """A process that shall run on."""

    command: Command
    started_s: float
    failures: int = 0
    due_s: float | None = None
    """When to start it again; None while it runs."""


@dataclass
class Processes:
    """What runs in the background, by name."""

    logs: Path
    say: Say
    end_first: Sequence[str] = ()
    """Those that still need the others while they end."""
    holds: Sequence[int] = ()
    """Open files, such as locks, that stay open until the last of them has ended."""
    _running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _uncut: set[str] = field(default_factory=set)
    """Those whose log could not be made smaller, which is said once."""

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*(name for name in self.end_first if name in self._running))
        self.stop(*self._running)

    def start(self, name: str, command: Command) -> None:
        """Start a supervised process with a log of its own; an earlier log is replaced."""
        self.log(name).unlink(missing_ok=True)
        self._start(name, command)

    def _start(self, name: str, command: Command) -> None:
        with self.log(name).open("ab+") as output:
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(output, fcntl.LOCK_SH)  # the process keeps it, so that clean-up knows whose log is in use
            self._running[name] = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *command.argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET_ENV, **READABLE_ENV, **command.env},
                start_new_session=True,
                pass_fds=self.holds,
            )
        self._kept[name] = _Kept(command, time.monotonic())

    def stop(self, *names: str) -> None:
        """End these, all at once, and wait until they are gone."""
        ending = [self._running[name] for name in names]
        for process in ending:
            _ask_to_end(process)
        for process in ending:
            process.wait()
        for name in names:
            del self._running[name], self._kept[name]

    def ask_to_end(self, name: str) -> None:
        """Begin to end one, without waiting: `status` says when it has."""
        _ask_to_end(self._running[name])

    def status(self, name: str) -> int | None:
        """Exit status; None while it runs."""
        return self._running[name].poll()

    def log(self, name: str) -> Path:
        """Where its output goes."""
        return self.logs / f"{name}.log"

    def wait_for(self, what: str, url: str) -> None:
        """Wait until `url` answers 200.

        Raises:
            EngineError: a process ended, or it took too long.
        """
        self.wait_until(what, url, lambda: answers(url))

    def wait_until(self, what: str, where: str, is_ready: Callable[[], bool]) -> None:
        """Wait until it is ready.

        Raises:
            EngineError: a process ended, or it took too long.
        """
        start = said = time.monotonic()
        while not is_ready():
            self.check()
            now = time.monotonic()
            if now - start > READY_WITHIN_S:
                raise EngineError(f"{what} did not answer at {where} within {READY_WITHIN_S:.0f} s; logs: {self.logs}")
            if now - said > _SAY_EVERY_S:
                said = now
                self.say(f"{what}: waiting for {where}, {now - start:.0f} s")
            time.sleep(POLL_S)
        self.say(f"{what}: ready")

    def keep(self, recover: Recover) -> NoReturn:
        """Start again what ends, and keep the logs small, until an exception."""
        logs_s = time.monotonic()
        while True:
            for name, kept in self._kept.items():
                self._keep_one(name, kept, recover)
            if time.monotonic() - logs_s > _LOGS_EVERY_S:
                logs_s = time.monotonic()
                for name in self._kept:
                    self._cut(name)
            time.sleep(POLL_S)

    def _keep_one(self, name: str, kept: _Kept, recover: Recover) -> None:
        now, status = time.monotonic(), self.status(name)
        if status is None:
            return
        if kept.due_s is None:
            kept.failures = kept.failures + 1 if now - kept.started_s < _BACK_OFF.longest_s else 1
            wait_s = _BACK_OFF.pause_s(kept.failures)
            kept.due_s = now + wait_s
            self.say(f"{name} ended with status {status}; starting it again in {wait_s:.0f} s; {self.log(name)}")
        if now < kept.due_s:
            return
        try:
            recover(name)
            _ask_to_end(self._running[name])  # it has ended; this closes our end of the pipe
            self._start(name, kept.command)
        except (httpx2.HTTPError, OSError) as error:
            kept.failures += 1
            wait_s = _BACK_OFF.pause_s(kept.failures)
            kept.due_s = now + wait_s
            if isinstance(error, OSError):  # else the server it needs is being started again itself
                self.say(f"{name} can't be started: {error}; trying again in {wait_s:.0f} s")
            return
        self._kept[name].failures = kept.failures

    def _cut(self, name: str) -> None:
        """Keep a log small, if that can be done: what runs depends on no log."""
        try:
            _cut(self.log(name))
            self._uncut.discard(name)
        except FileNotFoundError:  # somebody removed it
            return
        except OSError as error:
            if name not in self._uncut:
                self.say(f"{self.log(name)}: can't be made smaller: {error.strerror}; {name} goes on")
            self._uncut.add(name)

    def check(self, *names: str) -> None:
        """Are these, or all, still running?

        Raises:
            EngineError: one is not.
        """
        for name in names or self._running:
            if (status := self.status(name)) is not None:
                log = self.log(name)
                raise EngineError(f"{name} ended with status {status}; full log: {log}\n{tail(log)}")


def _cut(log: Path) -> None:
    """The process goes on appending to the same file, so it is emptied, not replaced."""
    size, aside = log.stat().st_size, log.with_suffix(".log.1")
    if size <= _LOG_BYTES:
        return
    if shutil.disk_usage(log.parent).free < size:  # the last of it is for what is paid for
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside))
    try:
        shutil.copyfile(log, aside)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    os.truncate(log, 0)


def _ask_to_end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()


def answers(url: str) -> bool:
    """Does this address answer 200?"""
    try:
        return httpx2.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


_handed_out = set[int]()


def free_port() -> int:
    """A port of loopback that nobody listened on just now, and that this process has not been told of before."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in _handed_out:
            _handed_out.add(port)
            return port


def port_from(first: int) -> int:
    """The first port of loopback from this one on that is free.

    Raises:
        ConfigError: none of a hundred is.
    """
    for port in range(first, min(first + 100, 65_536)):
        with suppress(ConfigError):
            require_free(HOST, port, "")
            return port
    raise ConfigError(f"{HOST}: no free port from {first} to {first + 99}")


def require_free(host: str, port: int, otherwise: str) -> None:
    """May a server listen there?

    Raises:
        ConfigError: no; `otherwise` says what to do.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{host}:{port}: {error.strerror}; {otherwise}") from error


@contextmanager
def stop_signals() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, and Ctrl-C also where a shell had it ignored for a background job."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
