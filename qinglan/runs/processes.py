"""Several background servers, each supervised and with a log: started, waited for, restarted and
ended."""

import asyncio
import errno
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import httpx2

from qinglan.errors import ConfigError, EngineError
from qinglan.runs.artifacts import written_whole
from qinglan.runs.back_off import BackOff
from qinglan.runs.launcher import Command, SupervisedProcess

HOST = "127.0.0.1"
READY_WITHIN_S = 300.0
POLL_S = 0.5
_READY_POLL_S = 0.1
_SAY_EVERY_S = 15.0
RESTARTS = BackOff(1.0, 60.0)
HEALTHY_AFTER_S = 60.0
"""A process that has run well for so long starts with the shortest wait again."""
_LOG_BYTES = 50_000_000
"""Of a log that grows for months; the same amount before it is kept."""
_LOGS_EVERY_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")
Say = Callable[[str], object]
Recover = Callable[[str], object]
"""What to do before the process of this name is restarted; httpx2.HTTPError postpones the
restart."""


@dataclass
class RestartBackoff:
    """How long to wait before a process that failed is started again."""

    failures: int = 0
    retry_at_s: float | None = None
    """On the clock of the caller; None while no restart is due."""
    reason: str = ""
    """Of the last failure, for who wants to keep it."""

    def failed(self, now_s: float, reason: str = "") -> float:
        """Count a failure; the seconds to wait."""
        self.failures, self.reason = self.failures + 1, reason
        wait_s = RESTARTS.pause_s(self.failures)
        self.retry_at_s = now_s + wait_s
        return wait_s


@dataclass
class Processes:
    """What runs in the background, by name. All of it ends with the `with` block."""

    logs: Path
    say: Say
    end_first: Sequence[str] = ()
    """Those that still need the others while they end."""
    holds: Sequence[int] = ()
    """Open files, such as locks, that stay open until the last process has ended."""
    _running: dict[str, SupervisedProcess] = field(default_factory=dict)
    _backoffs: dict[str, RestartBackoff] = field(default_factory=dict)
    _large_logs: set[str] = field(default_factory=set)
    """Those that could not be made smaller, which is reported once."""
    _logs_s: float = field(default_factory=time.monotonic)
    """When their sizes were looked at last."""

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*(name for name in self.end_first if name in self._running))
        self.stop(*self._running)

    def start(
        self, name: str, command: Command, *, announces: bool = False, append_log: bool = False
    ) -> None:
        """Start a supervised process; without `append_log` an earlier log is removed. See
        `SupervisedProcess`."""
        log = self.log(name)
        if not append_log:
            log.unlink(missing_ok=True)
        self._running[name] = SupervisedProcess(
            name, command, log, pass_fds=self.holds, announces=announces
        )

    def stop(self, *names: str) -> None:
        """End these, all at once, and wait until they have ended."""
        for name in names:
            self._running[name].ask_to_end()
        for name in names:
            self._running[name].end()
            del self._running[name]

    def __getitem__(self, name: str) -> SupervisedProcess:
        return self._running[name]

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def wait_for(self, what: str, url: str) -> None:
        """Wait until `url` answers 200."""
        self.wait_until(what, lambda: health_problem(url))

    def wait_until(
        self, what: str, problem: Callable[[], str | None], within_s: float = READY_WITHIN_S
    ) -> None:
        wait_until_ready(
            what, problem, list(self._running.values()), within_s=within_s, say=self.say
        )

    def keep_running(self, recover: Recover) -> NoReturn:
        """Restart what ends, and keep the logs small, until an exception."""
        while True:
            for name in list(self._running):
                self._restart_if_ended(name, recover)
            self.limit_logs()
            time.sleep(POLL_S)

    def limit_logs(self) -> None:
        """Keep the logs small: once a minute, however often it is called."""
        if time.monotonic() - self._logs_s > _LOGS_EVERY_S:
            self._logs_s = time.monotonic()
            for name in self._running:
                self._limit_log(name)

    def _restart_if_ended(self, name: str, recover: Recover) -> None:
        now, process = time.monotonic(), self._running[name]
        if (status := process.status()) is None:
            return
        backoff = self._backoffs.setdefault(name, RestartBackoff())
        if backoff.retry_at_s is None:
            if now - process.started_s >= HEALTHY_AFTER_S:
                backoff.failures = 0
            wait_s = backoff.failed(now)
            self.say(
                f"{name} ended with status {status}; starting it again in {wait_s:.0f} s; {process.log}"
            )
            return
        if now < backoff.retry_at_s:
            return
        try:
            recover(name)
            process.end()  # it has ended; this closes our ends of its pipes
            self.start(name, process.command, append_log=True)
        except (httpx2.HTTPError, OSError) as error:
            wait_s = backoff.failed(now)
            if isinstance(error, OSError):  # else the server it needs is being restarted itself
                self.say(f"{name} can't be started: {error}; trying again in {wait_s:.0f} s")
            return
        backoff.retry_at_s = None

    def _limit_log(self, name: str) -> None:
        """Keep a log small, if that can be done. The process appends to the same file, so that is
        emptied."""
        log, aside = self.log(name), self.logs / f"{name}.log.1"
        try:
            if (size := log.stat().st_size) > _LOG_BYTES:
                if (
                    shutil.disk_usage(log.parent).free < size
                ):  # the rest of the disk is for results that were paid for
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                with written_whole(aside) as partial:
                    shutil.copyfile(log, partial)
                os.truncate(log, 0)
            self._large_logs.discard(name)
        except FileNotFoundError:  # somebody removed it
            return
        except OSError as error:
            if name not in self._large_logs:
                self.say(f"{log}: can't be made smaller: {error.strerror}; {name} goes on")
            self._large_logs.add(name)


def wait_until_ready(
    what: str,
    problem: Callable[[], str | None],
    processes: Sequence[SupervisedProcess],
    *,
    within_s: float = READY_WITHIN_S,
    say: Say = lambda _: None,
) -> None:
    """Wait until `problem` says none; raises `EngineError` where one of the processes ended, or it
    took too long."""
    start = said = time.monotonic()
    while found := problem():
        for process in processes:
            process.require_running()
        now = time.monotonic()
        if now - start > within_s:
            logs = "".join(f"; log: {process.log}" for process in processes)
            raise EngineError(f"{what} was not ready after {within_s:.0f} s: {found}{logs}")
        if now - said > _SAY_EVERY_S:
            said = now
            say(f"{what}: not ready after {now - start:.0f} s: {found}")
        time.sleep(_READY_POLL_S)
    say(f"{what}: ready")


def health_problem(url: str) -> str | None:
    try:  # loading the certificates would take longer than the request, and no secret is sent
        status = httpx2.get(url, timeout=2.0, trust_env=False, verify=False).status_code
    except httpx2.HTTPError as error:
        return f"{url} does not answer: {type(error).__name__}"
    return None if status == 200 else f"{url} answers HTTP {status}"


PORTS = range(20_000, 30_000)
"""Below where Linux (32768), macOS and Windows (49152) begin to choose by themselves, and
Kubernetes (30000)."""
_handed_out = set[int]()


def free_port() -> int:
    """A port of loopback that nobody listened on just now, and that was not given to this process
    before.

    Not one that systems give to who asks for any: a process of Ray's might get it before a server,
    which loads first.
    """
    while True:
        port = random.choice(PORTS)
        if port not in _handed_out and not port_problem(HOST, port):
            _handed_out.add(port)
            return port


def port_from(first: int) -> int:
    """The first port of loopback from this one on that is free; `ConfigError` where none of a
    hundred is."""
    for port in range(first, min(first + 100, 65_536)):
        if not port_problem(HOST, port):
            return port
    raise ConfigError(f"{HOST}: no free port from {first} to {first + 99}")


def port_problem(host: str, port: int, *, reuse: bool = True) -> str | None:
    """Why no server may listen there; without `reuse`, none that binds it without SO_REUSEADDR."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


@contextmanager
def stop_signals() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does, and Ctrl-C also where a shell had it ignored for a
    background job."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def in_event_loop(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a plain function of a coroutine function, which Ctrl-C cancels as often as it comes.

    `asyncio.run` lets a second Ctrl-C raise anywhere in the loop, and with that a waiting task can
    lose what wakes it: the command would never end.
    """

    async def interruptible(*args: P.args, **kwargs: P.kwargs) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work(*args, **kwargs))
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
        ):
            loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    @wraps(work)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(interruptible(*args, **kwargs))

    return plain
