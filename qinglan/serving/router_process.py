"""The router's process, seen from the site: started first, and again if it ends or hangs."""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from qinglan.errors import EngineError
from qinglan.runs.command import Command
from qinglan.runs.launcher import tail
from qinglan.runs.processes import Processes, answers

NAME = "router"
START_WITHIN_S = 120.0
PROBE_EVERY_S, PROBES_MISSED = 5.0, 3
_AGAIN_AFTER_S = 1.0


@dataclass
class RouterProcess:
    """Knows where the router listens, and keeps it there."""

    processes: Processes
    options: Sequence[str]
    say: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic
    url: str | None = None
    """As it says itself; None until it listens."""
    probe: Callable[[str], bool] = answers
    """Does this address answer? It may take seconds."""
    _again_at: float | None = None
    _health: "Future[bool] | None" = None
    _next_probe: float = 0.0
    _missed: int = 0
    _launched_at: float = 0.0
    _has_answered: bool = False
    _probes: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "router-probe"))

    def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            EngineError: it ended; with the reason that it gives.
        """
        self._launch()
        deadline = self.clock() + START_WITHIN_S
        while self._listening() is None:
            if (status := self.processes.status(NAME)) is not None:
                raise EngineError(self._last_words(status))
            if self.clock() > deadline:
                raise EngineError(f"the router did not listen within {START_WITHIN_S:.0f} s; log: {self._log}")
            time.sleep(0.05)
        self.url = self._listening()

    def tick(self) -> None:
        """Start it again if it ended or hangs, on the port that its clients know."""
        if self._again_at is None:
            if (status := self.processes.status(NAME)) is not None:
                self.say(f"{self._last_words(status)}\nrouter: starting again")
                self.processes.stop(NAME)
                self._again_at = self.clock() + _AGAIN_AFTER_S
            else:
                self._attend()
        elif self.clock() >= self._again_at:
            self._again_at = self.clock() + _AGAIN_AFTER_S  # what kept it from starting, such as a full disk, may pass
            self._launch()
            self._again_at = None

    def _attend(self) -> None:
        """Ask whether it is well; if it is not, have it end."""
        now = self.clock()
        if self._health is None:
            if self.url and now >= self._next_probe:
                self._health = self._probes.submit(self.probe, f"{self.url}/health")
        elif self._health.done():
            health, self._health, self._next_probe = self._health, None, now + PROBE_EVERY_S
            is_well = health.result()  # raises what is wrong on our side, and so says nothing about the router
            self._has_answered = self._has_answered or is_well
            is_due = self._has_answered or now - self._launched_at > START_WITHIN_S
            self._missed = 0 if is_well or not is_due else self._missed + 1
            if self._missed >= PROBES_MISSED:
                self.say(f"router: does not answer {self.url}/health; ending it")
                self._launched_at, self._has_answered, self._missed = now, False, 0
                self.processes.ask_to_end(NAME)

    def _launch(self) -> None:
        self._health = None  # of the one before
        self._launched_at, self._has_answered, self._missed = self.clock(), False, 0
        again = [f"--port={self.url.rpartition(':')[2]}", "--again"] if self.url else []
        options = [option for option in self.options if not (again and option.startswith("--port="))]
        self.processes.start(NAME, Command([sys.executable, "-m", "qinglan.serving.router", *options, *again]))

    def _listening(self) -> str | None:
        """The address on a line of its own; warnings may come before it."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        return next((line.strip() for line in lines if line.startswith("http") and line.endswith("\n")), None)

    def _last_words(self, status: int) -> str:
        end = tail(self._log)
        last = end.splitlines()[-1].strip() if end else "no output"
        return f"router: ended with status {status}: {last.removeprefix('error: ')}; full log: {self._log}\n{end}"

    @property
    def _log(self) -> Path:
        return self.processes.log(NAME)
