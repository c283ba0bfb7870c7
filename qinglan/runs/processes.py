"""Several background servers: started, waited for, restarted and ended.

Each is supervised and has a log. Also free ports, and signals that end the work.
"""

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
_HEALTH_WITHIN_S = 2.0
RESTARTS = BackOff(1.0, 60.0)
HEALTHY_AFTER_S = 60.0
"""A process that has run well for so long starts with the shortest wait again."""
_LOG_BYTES = 50_000_000
"""Largest size of a log that grows for months; the same amount before it is kept."""
_LOGS_EVERY_S = 60.0

P = ParamSpec("P")
T = TypeVar("T")
Say = Callable[[str], object]
Recover = Callable[[str], object]
"""Called with the name of a process before it is restarted; httpx2.HTTPError postpones the
restart."""


@dataclass
class RestartBackoff:
    """The wait until a process that failed is started again."""

    failures: int = 0
    retry_at_s: float | None = None
    """On the clock of the caller; None while no restart is due."""
    reason: str = ""
    """The last failure's, for who wants to keep it."""

    def failed(self, now_s: float, reason: str = "") -> float:
        """Count a failure; the seconds to wait."""
        self.failures += 1
        self.reason = reason
        wait_s = RESTARTS.pause_s(self.failures)
        self.retry_at_s = now_s + wait_s
        return wait_s


@dataclass
class Processes:
    """Background processes by name. All of them end with the `with` block."""

    logs: Path
    say: Say
    end_first: Sequence[str] = ()
    """Those that still need the others while they end."""
    holds: Sequence[int] = ()
    """Open files, such as locks, that stay open until the last process has ended."""
    _running: dict[str, SupervisedProcess] = field(default_factory=dict)
    _backoffs: dict[str, RestartBackoff] = field(default_factory=dict)
    _large_logs: set[str] = field(default_factory=set)
    """Processes whose log could not be made smaller, which is reported once."""
    _logs_checked_s: float = field(default_factory=time.monotonic)
    """When the logs' sizes were looked at last."""

    def __enter__(self) -> "Processes":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(*(name for name in self.end_first if name in self._running))
        self.stop(*self._running)

    def start(
        self, name: str, command: Command, *, announces: bool = False, append_log: bool = False
    ) -> None:
        """Start a supervised process; see `SupervisedProcess`.

        Without `append_log` an earlier log is removed.
        """
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
        processes = list(self._running.values())
        wait_until_ready(what, problem, processes, within_s=within_s, say=self.say)

    def keep_running(self, recover: Recover) -> NoReturn:
        """Restart processes that end, and keep the logs small, until an exception."""
        while True:
            for name in list(self._running):
                self._restart_if_ended(name, recover)
            self.limit_logs()
            time.sleep(POLL_S)

    def _restart_if_ended(self, name: str, recover: Recover) -> None:
        """Restart a process that has ended, once its wait is over.

        The first call after its end begins the wait, a later one restarts it.
        """
        process = self._running[name]
        now_s = time.monotonic()
        status = process.status()
        if status is None:
            return
        backoff = self._backoffs.setdefault(name, RestartBackoff())
        if backoff.retry_at_s is None:
            if now_s - process.started_s >= HEALTHY_AFTER_S:
                backoff.failures = 0
            wait_s = backoff.failed(now_s)
            self.say(
                f"{name} ended with status {status}; "
                f"starting it again in {wait_s:.0f} s; {process.log}"
            )
        elif now_s >= backoff.retry_at_s:
            self._restart(name, backoff, recover)

    def _restart(self, name: str, backoff: RestartBackoff, recover: Recover) -> None:
        process = self._running[name]
        now_s = time.monotonic()
        try:
            recover(name)
            # It has ended; this closes our ends of its pipes.
            process.end()
            self.start(name, process.command, append_log=True)
        except httpx2.HTTPError:
            # The server that it needs is being restarted itself.
            backoff.failed(now_s)
        except OSError as error:
            wait_s = backoff.failed(now_s)
            self.say(f"{name} can't be started: {error}; trying again in {wait_s:.0f} s")
        else:
            backoff.retry_at_s = None

    def limit_logs(self) -> None:
        """Keep the logs small: once a minute, however often it is called."""
        if time.monotonic() - self._logs_checked_s > _LOGS_EVERY_S:
            self._logs_checked_s = time.monotonic()
            for name in self._running:
                self._limit_log(name)

    def _limit_log(self, name: str) -> None:
        """Keep a log small, if that can be done; else say so once."""
        log = self.log(name)
        try:
            size = log.stat().st_size
            if size > _LOG_BYTES:
                _set_aside(log, size)
            self._large_logs.discard(name)
        except FileNotFoundError:
            # Somebody removed it.
            return
        except OSError as error:
            if name not in self._large_logs:
                self.say(f"{log}: can't be made smaller: {error.strerror}; {name} goes on")
            self._large_logs.add(name)


def _set_aside(log: Path, size: int) -> None:
    """Copy a log beside itself, and empty it: its process goes on appending to the same file."""
    # The rest of the disk is for results that were paid for.
    if shutil.disk_usage(log.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with written_whole(log.with_name(f"{log.name}.1")) as partial:
        shutil.copyfile(log, partial)
    os.truncate(log, 0)


def wait_until_ready(
    what: str,
    problem: Callable[[], str | None],
    processes: Sequence[SupervisedProcess],
    *,
    within_s: float = READY_WITHIN_S,
    say: Say = lambda _: None,
) -> None:
    """Wait until `problem` returns None.

    Raises `EngineError` where one of the processes ended, or it took too long.
    """
    start_s = time.monotonic()
    said_s = start_s
    while True:
        current_problem = problem()
        if not current_problem:
            break
        for process in processes:
            process.require_running()
        now_s = time.monotonic()
        if now_s - start_s > within_s:
            logs = "".join(f"; log: {process.log}" for process in processes)
            raise EngineError(
                f"{what} was not ready after {within_s:.0f} s: {current_problem}{logs}"
            )
        if now_s - said_s > _SAY_EVERY_S:
            said_s = now_s
            say(f"{what}: not ready after {now_s - start_s:.0f} s: {current_problem}")
        time.sleep(_READY_POLL_S)
    say(f"{what}: ready")


def health_problem(url: str) -> str | None:
    """The reason why a server does not answer 200; None where it does."""
    try:
        # Loading the certificates would take longer than the request, and no secret is sent.
        response = httpx2.get(url, timeout=_HEALTH_WITHIN_S, trust_env=False, verify=False)
    except httpx2.HTTPError as error:
        return f"{url} does not answer: {type(error).__name__}"
    if response.status_code != 200:
        return f"{url} answers HTTP {response.status_code}"
    return None


PORTS = range(20_000, 30_000)
"""Below the ports that Linux (32768), macOS and Windows (49152) choose by themselves, and below
Kubernetes' (30000)."""
_PORTS_TRIED = 100
_HIGHEST_PORT = 65_535
_handed_out: set[int] = set()


def free_port() -> int:
    """A port of loopback that nobody listened on just now.

    It was not given to this process before. Nor is it one that systems give to who asks for any: a
    process of Ray's might get that before a server, which loads first.
    """
    while True:
        port = random.choice(PORTS)
        if port not in _handed_out and not port_problem(HOST, port):
            _handed_out.add(port)
            return port


def port_from(first: int) -> int:
    """The first port of loopback from this one on that is free.

    Raises `ConfigError` where none of a hundred is.
    """
    for port in range(first, min(first + _PORTS_TRIED, _HIGHEST_PORT + 1)):
        if not port_problem(HOST, port):
            return port
    raise ConfigError(f"{HOST}: no free port from {first} to {first + _PORTS_TRIED - 1}")


def port_problem(host: str, port: int, *, reuse: bool = True) -> str | None:
    """The reason why no server may listen there; None where one may.

    Without `reuse` the server is one that binds the port without SO_REUSEADDR.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


@contextmanager
def stop_signals() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does.

    Ctrl-C ends it also where a shell had it ignored for a background job.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    earlier_handlers = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, earlier_handlers, strict=True):
            signal.signal(number, handler)


def in_event_loop(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make a plain function of a coroutine function, which Ctrl-C cancels as often as it comes.

    `asyncio.run` lets a second Ctrl-C raise anywhere in the loop, and with that a waiting task can
    lose what wakes it: the command would never end.
    """

    async def interruptible(*args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work(*args, **kwargs))
        # Only the main thread may set a handler. Who ignores Ctrl-C goes on ignoring it.
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
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
