"""The models' servers: started, warmed up, restarted, drained and ended, one step at a time; no
step waits."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from qinglan.registry import Released
from qinglan.runs.launcher import Command
from qinglan.runs.processes import HEALTHY_AFTER_S, HOST, Processes, RestartBackoff, Say, free_port
from qinglan.serving.routes import Backend
from qinglan.serving.server_process import ServerProcess

START_WITHIN_S = 1800.0

Place = list[str]
CommandOf = Callable[[Path, Backend, int, Place], Command]


@dataclass
class _ModelServer:
    backend: Backend
    process: ServerProcess
    place: int | None
    started_s: float
    unwanted_since_s: float | None = None


@dataclass
class Fleet:
    """Keeps the servers of the wanted models up. Shut its pool down before its processes end."""

    processes: Processes
    command_of: CommandOf
    probe: Callable[[Backend], str | None]
    places: list[Place] | None
    say: Say
    drain_s: float
    """From the last request that could have come to the server's end: longer than any may take."""
    clock: Callable[[], float] = time.monotonic
    _servers: dict[str, _ModelServer] = field(default_factory=dict)
    _failures: dict[str, RestartBackoff] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "probe"))

    def step(self, wanted: Sequence[Released], routed: Sequence[str]) -> None:
        """One step towards the wanted models, the most important first; `routed` versions are not
        ended."""
        for version in list(self._servers):
            self._check(version)
        self._end_unwanted({model.version for model in wanted}, routed)
        for model in wanted:
            retry_at_s = self.failures_of(model.version).retry_at_s or 0.0
            if model.version not in self._servers and self.clock() >= retry_at_s:
                self._start(model, wanted, routed)
            server = self._servers.get(model.version)
            if server and server.process.phase == "starting":
                return  # the others would only slow it down

    def ready(self, version: str) -> Backend | None:
        server = self._servers.get(version)
        return server.backend if server and server.process.phase == "ready" else None

    def failures_of(self, version: str) -> RestartBackoff:
        """How often it failed to start or to go on, since it was healthy for a minute at a stretch,
        and why last."""
        return self._failures.get(version, RestartBackoff())

    def _start(self, model: Released, wanted: Sequence[Released], routed: Sequence[str]) -> None:
        place = self._place(model, wanted, routed)
        if place is None and self.places is not None:
            return
        if not model.folder.is_dir():
            self._failed(model.version, f"its folder {model.folder} does not exist")
            return
        port = free_port()
        # The name tells it from any other server that may have taken the port.
        backend = Backend(
            url=f"http://{HOST}:{port}/v1", model=f"version-{model.version}", version=model.version
        )
        gpus = self.places[place] if self.places is not None and place is not None else []
        command, probe = (
            self.command_of(model.folder, backend, port, gpus),
            partial(self.probe, backend),
        )
        log_name = f"model_{model.version}"
        process = ServerProcess(
            self.processes, log_name, command, probe, self.pool, START_WITHIN_S, self.clock
        )
        self._servers[model.version] = _ModelServer(backend, process, place, self.clock())
        self.say(f"version {model.version}: starting")

    def _place(
        self, model: Released, wanted: Sequence[Released], routed: Sequence[str]
    ) -> int | None:
        if self.places is None:
            return None
        taken = {server.place for server in self._servers.values()}
        if free := [place for place in range(len(self.places)) if place not in taken]:
            return free[0]
        if any(server.process.phase == "ending" for server in self._servers.values()):
            return None  # it will be free soon
        rank = {other.version: number for number, other in enumerate(wanted)}
        lesser = [
            v
            for v in self._servers
            if v not in routed and rank.get(v, len(rank)) > rank[model.version]
        ]
        if lesser:
            self._servers[
                max(lesser, key=lambda version: rank.get(version, len(rank)))
            ].process.ask_to_end()
        elif model.version not in self._failures:
            beside = ", ".join(sorted(self._servers))
            hint = "raise serve.models_per_gpu or trainer.gpus_per_node"
            self._failed(model.version, f"no GPU is free for it beside {beside}; {hint}")
        return None

    def _check(self, version: str) -> None:
        server, now = self._servers[version], self.clock()
        before = server.process.phase
        if failure := server.process.step():
            self._failed(version, failure)
        phase = server.process.phase
        if phase == "ended":
            del self._servers[version]
            if before == "ending":
                self.say(f"version {version}: stopped")
        elif phase == "ready" and before == "starting":
            self.say(f"version {version}: ready after {now - server.started_s:.1f} s")
        elif phase == "ready" and now - server.process.since_s > HEALTHY_AFTER_S:
            self._failures.pop(version, None)

    def _failed(self, version: str, reason: str) -> None:
        wait_s = self._failures.setdefault(version, RestartBackoff()).failed(self.clock(), reason)
        first, *rest = reason.split("\n", 1)
        self.say("\n".join([f"version {version}: {first}; next try in {wait_s:.0f} s", *rest]))

    def _end_unwanted(self, wanted: set[str], routed: Sequence[str]) -> None:
        now = self.clock()
        for version, server in self._servers.items():
            if version in wanted or version in routed:
                server.unwanted_since_s = None
            elif server.unwanted_since_s is None:
                server.unwanted_since_s = now
            elif server.process.phase != "ending" and now - server.unwanted_since_s >= self.drain_s:
                server.process.ask_to_end()
        for version in [v for v in self._failures if v not in wanted and v not in self._servers]:
            del self._failures[version]
