"""The models' servers: started, warmed up, restarted, drained and ended, one step at a time.

No step waits.
"""

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
"""The GPUs that one model takes."""
CommandOf = Callable[[Path, Backend, int, Place], Command]


@dataclass
class _ModelServer:
    backend: Backend
    process: ServerProcess
    place: int | None
    """Number of its place; None where places are not counted, on the CPU."""
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
    """Time from the last request that could have come to the server's end.

    It is longer than any request may take.
    """
    clock: Callable[[], float] = time.monotonic
    _servers: dict[str, _ModelServer] = field(default_factory=dict)
    _failures: dict[str, RestartBackoff] = field(default_factory=dict)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "probe"))

    def step(self, wanted_models: Sequence[Released], routed: Sequence[str]) -> None:
        """One step towards the wanted models.

        Args:
            wanted_models: the most important first.
            routed: versions that get requests, so that they are not ended.
        """
        for version in list(self._servers):
            self._check(version)
        self._end_unwanted({model.version for model in wanted_models}, routed)
        for model in wanted_models:
            retry_at_s = self.failures_of(model.version).retry_at_s or 0.0
            if model.version not in self._servers and self.clock() >= retry_at_s:
                self._start(model, wanted_models, routed)
            server = self._servers.get(model.version)
            if server and server.process.phase == "starting":
                # The less important ones would only slow it down.
                return

    def ready(self, version: str) -> Backend | None:
        """The version's server, if it answers."""
        server = self._servers.get(version)
        if server and server.process.phase == "ready":
            return server.backend
        return None

    def failures_of(self, version: str) -> RestartBackoff:
        """The version's failures to start or to go on.

        They count since it was last healthy for a minute at a stretch.
        """
        return self._failures.get(version, RestartBackoff())

    def _start(
        self, model: Released, wanted_models: Sequence[Released], routed: Sequence[str]
    ) -> None:
        version = model.version
        gpus: Place = []
        place: int | None = None
        if self.places is not None:
            place = self._free_place(self.places, model, wanted_models, routed)
            if place is None:
                return
            gpus = self.places[place]
        if not model.folder.is_dir():
            self._failed(version, f"its folder {model.folder} does not exist")
            return
        port = free_port()
        backend = Backend(
            url=f"http://{HOST}:{port}/v1",
            # The name tells it from any other server that may have taken the port.
            model=f"version-{version}",
            version=version,
        )
        process = ServerProcess(
            processes=self.processes,
            name=f"model_{version}",
            command=self.command_of(model.folder, backend, port, gpus),
            probe=partial(self.probe, backend),
            pool=self.pool,
            start_within_s=START_WITHIN_S,
            clock=self.clock,
        )
        self._servers[version] = _ModelServer(backend, process, place, self.clock())
        self.say(f"version {version}: starting")

    def _free_place(
        self,
        places: list[Place],
        model: Released,
        wanted_models: Sequence[Released],
        routed: Sequence[str],
    ) -> int | None:
        """The number of a free place; where there is none, a less important server is ended."""
        used_places = {server.place for server in self._servers.values()}
        for place in range(len(places)):
            if place not in used_places:
                return place
        phases = [server.process.phase for server in self._servers.values()]
        if "ending" in phases:
            # A place will be free soon.
            return None
        ranks = {wanted_model.version: rank for rank, wanted_model in enumerate(wanted_models)}

        def rank_of(version: str) -> int:
            return ranks.get(version, len(ranks))

        less_important = [
            version
            for version in self._servers
            if version not in routed and rank_of(version) > rank_of(model.version)
        ]
        if less_important:
            least_important = max(less_important, key=rank_of)
            self._servers[least_important].process.ask_to_end()
        elif model.version not in self._failures:
            beside = ", ".join(sorted(self._servers))
            hint = "raise serve.models_per_gpu or trainer.gpus_per_node"
            self._failed(model.version, f"no GPU is free for it beside {beside}; {hint}")
        return None

    def _check(self, version: str) -> None:
        """Let a server make its step, and say what became of it."""
        server = self._servers[version]
        now_s = self.clock()
        phase_before = server.process.phase
        failure = server.process.step()
        if failure:
            self._failed(version, failure)
        phase = server.process.phase
        if phase == "ended":
            del self._servers[version]
            if phase_before == "ending":
                self.say(f"version {version}: stopped")
        elif phase == "ready" and phase_before == "starting":
            self.say(f"version {version}: ready after {now_s - server.started_s:.1f} s")
        elif phase == "ready" and now_s - server.process.since_s > HEALTHY_AFTER_S:
            self._failures.pop(version, None)

    def _failed(self, version: str, reason: str) -> None:
        backoff = self._failures.setdefault(version, RestartBackoff())
        wait_s = backoff.failed(self.clock(), reason)
        first_line, *more_lines = reason.split("\n", 1)
        lines = [f"version {version}: {first_line}; next try in {wait_s:.0f} s", *more_lines]
        self.say("\n".join(lines))

    def _end_unwanted(self, wanted_versions: set[str], routed: Sequence[str]) -> None:
        now_s = self.clock()
        for version, server in self._servers.items():
            if version in wanted_versions or version in routed:
                server.unwanted_since_s = None
            elif server.unwanted_since_s is None:
                server.unwanted_since_s = now_s
            elif (
                server.process.phase != "ending" and now_s - server.unwanted_since_s >= self.drain_s
            ):
                server.process.ask_to_end()
        for version in list(self._failures):
            if version not in wanted_versions and version not in self._servers:
                del self._failures[version]
