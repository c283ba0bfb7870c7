"""Several background processes at once, each under `supervise.py` and with a log of its own.

All of them end with this process, kill -9 included. For servers; what runs to an end is for the launcher.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from qinglan.engines.command import QUIET_ENV, Command
from qinglan.engines.launcher import READABLE_ENV, SUPERVISOR, tail
from qinglan.errors import ConfigError, EngineError

HOST = "127.0.0.1"
READY_WITHIN_S = 300.0
POLL_S = 0.5
_SAY_EVERY_S = 15.0

Say = Callable[[str], object]


@dataclass
class Processes:
    """What runs in the background, by name."""

    logs: Path
    say: Say
    end_first: Sequence[str] = ()
    """Those that still need the others while they end."""
    _running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*(name for name in self.end_first if name in self._running))
        self.stop(*self._running)

    def start(self, name: str, command: Command) -> None:
        """Start a supervised process with a log of its own; an earlier log is replaced."""
        with self.log(name).open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(SUPERVISOR), *command.argv],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET_ENV, **READABLE_ENV, **command.env},
                start_new_session=True,
            )
        self._running[name] = process

    def stop(self, *names: str) -> None:
        """End these, all at once, and wait until they are gone."""
        ending = [self._running[name] for name in names]
        for process in ending:
            _ask_to_end(process)
        for process in ending:
            process.wait()
        for name in names:
            del self._running[name]

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
        start = said = time.monotonic()
        while not answers(url):
            self.check()
            now = time.monotonic()
            if now - start > READY_WITHIN_S:
                raise EngineError(f"{what} did not answer at {url} within {READY_WITHIN_S:.0f} s; logs: {self.logs}")
            if now - said > _SAY_EVERY_S:
                said = now
                self.say(f"{what}: waiting for {url}, {now - start:.0f} s")
            time.sleep(POLL_S)
        self.say(f"{what}: ready")

    def watch(self) -> None:
        """Return never; raise when a process has ended."""
        while True:
            self.check()
            time.sleep(POLL_S)

    def check(self, *names: str) -> None:
        """Are these, or all, still running?

        Raises:
            EngineError: one is not.
        """
        for name in names or self._running:
            if (status := self.status(name)) is not None:
                log = self.log(name)
                raise EngineError(f"{name} ended with status {status}; full log: {log}\n{tail(log)}")


def _ask_to_end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    process.stdin.close()


def answers(url: str) -> bool:
    """Does this address answer 200?"""
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    """A port of loopback that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


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
