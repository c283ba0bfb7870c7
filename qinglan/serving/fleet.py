"""The models' servers: started, warmed up, watched, started again, drained and ended, one step at a time.

`tick` never waits, so that one model's start or illness delays nothing that another one needs.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx2

from qinglan.errors import EngineError
from qinglan.recipes import Message
from qinglan.runs.back_off import BackOff
from qinglan.runs.command import Command
from qinglan.runs.launcher import tail
from qinglan.runs.processes import Processes, free_port
from qinglan.serving.backends import backend_at
from qinglan.serving.routes import Backend

START_WITHIN_S = 1800.0
PROBE_EVERY_S, PROBE_WITHIN_S, PROBES_MISSED = 5.0, 20.0, 3
_BACK_OFF = BackOff(1.0, 60.0)
_HEALTHY_AFTER_S = 60.0
"""Ready for so long without a missed probe, a server's next death is the first one again."""
_LOG_LINES = 4

Place = list[str]
Phase = Literal["starting", "ready", "ending"]


class Model(Protocol):
    """A released model, as far as it matters here."""

    @property
    def version(self) -> str:
        """Of the registered model."""

    @property
    def folder(self) -> Path:
        """The merged model."""


CommandOf = Callable[[Path, Backend, int, Place], Command]


class PortTakenError(EngineError):
    """Another server took the port."""


Probe = Callable[[Backend], str | None]
"""Why does this server not answer? None if it does; raises `PortTakenError`. It may take long."""


@dataclass
class _Server:
    backend: Backend
    folder: Path
    place: int | None
    since: float
    """Started; once ready, ready without a missed probe."""
    phase: Phase = "starting"
    probe: "Future[str | None] | None" = None
    next_probe: float = 0.0
    missed: int = 0
    unwanted_since: float | None = None


@dataclass
class _Trouble:
    deaths: int
    not_before: float
    why: str


@dataclass
class Fleet:
    """Keeps the servers of the wanted models up. `close` before its processes end."""

    processes: Processes
    command_of: CommandOf
    probe: Probe
    places: list[Place] | None
    """Of GPUs, one model each; None for as many models as may come."""
    say: Callable[[str], object]
    drain_s: float
    """From the last request that could have come to the server's end: longer than any may take."""
    clock: Callable[[], float] = time.monotonic
    _servers: dict[str, _Server] = field(default_factory=dict)
    _trouble: dict[str, _Trouble] = field(default_factory=dict)
    _probes: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, "probe"))

    def tick(self, wanted: Sequence[Model], routed: Sequence[str]) -> None:
        """One step towards it.

        Args:
            wanted: the most important first.
            routed: versions that may still be asked, which are not ended.
        """
        for version in list(self._servers):
            self._attend(version)
        self._end_unwanted({model.version for model in wanted}, routed)
        for model in wanted:
            if model.version not in self._servers and self._may_start(model.version):
                self._start(model, wanted, routed)
            if self._is_starting(model.version):
                return  # the others would only slow it down

    def ready(self, version: str) -> Backend | None:
        """Where this version answers, if it does."""
        server = self._servers.get(version)
        return server.backend if server and server.phase == "ready" else None

    def trouble(self, version: str) -> str | None:
        """Why it did not come up when it was tried last."""
        found = self._trouble.get(version)
        return found.why if found else None

    def deaths(self, version: str) -> int:
        """How often it failed to start or to go on, since it was well for a minute at a stretch."""
        found = self._trouble.get(version)
        return found.deaths if found else 0

    def close(self) -> None:
        """No more probes; the processes are their owner's to end."""
        self._probes.shutdown(wait=False, cancel_futures=True)

    def _is_starting(self, version: str) -> bool:
        return version in self._servers and self._servers[version].phase == "starting"

    def _may_start(self, version: str) -> bool:
        trouble = self._trouble.get(version)
        return trouble is None or self.clock() >= trouble.not_before

    def _start(self, model: Model, wanted: Sequence[Model], routed: Sequence[str]) -> None:
        place = self._place(model, wanted, routed)
        if place is None and self.places is not None:
            return
        if not model.folder.is_dir():
            self._failed(model.version, f"its folder {model.folder} is gone")
            return
        port = free_port()
        backend = backend_at(port, model.version)
        gpus = self.places[place] if self.places is not None and place is not None else []
        self.processes.start(_name(model.version), self.command_of(model.folder, backend, port, gpus))
        self._servers[model.version] = _Server(backend, model.folder, place, self.clock())
        self.say(f"version {model.version}: starting")

    def _place(self, model: Model, wanted: Sequence[Model], routed: Sequence[str]) -> int | None:
        """A free one; if there is none, the least important model that nobody asks makes room."""
        if self.places is None:
            return None
        taken = {server.place for server in self._servers.values()}
        for place in range(len(self.places)):
            if place not in taken:
                return place
        if any(server.phase == "ending" for server in self._servers.values()):
            return None  # it will be free soon
        rank = {other.version: number for number, other in enumerate(wanted)}
        lesser = [v for v in self._servers if v not in routed and rank.get(v, len(rank)) > rank[model.version]]
        if lesser:
            self._end(max(lesser, key=lambda version: rank.get(version, len(rank))))
        elif model.version not in self._trouble:
            self._failed(
                model.version,
                f"no GPU is free for it beside {', '.join(sorted(self._servers))}; raise serve.models_per_gpu or "
                "trainer.gpus_per_node",
            )
        return None

    def _attend(self, version: str) -> None:
        server, now = self._servers[version], self.clock()
        status = self.processes.status(_name(version))
        if status is not None:
            self._gone(version, server, status)
            return
        if server.phase == "ending":
            return
        if server.probe is None and now >= server.next_probe:
            server.probe = self._probes.submit(self.probe, server.backend)
        elif server.probe and server.probe.done():
            probe, server.probe = server.probe, None
            server.next_probe = now + (PROBE_EVERY_S if server.phase == "ready" else 0.2)
            try:
                # It raises what is wrong on our side, such as too many open files: that is no missed probe.
                self._probed(version, server, probe.result())
            except PortTakenError as error:
                self._failed(version, str(error))
                self._end(version)
        if server.phase == "starting" and now - server.since > START_WITHIN_S:
            self._failed(version, f"it did not answer within {START_WITHIN_S:.0f} s")
            self._end(version)

    def _gone(self, version: str, server: _Server, status: int) -> None:
        name = _name(version)
        self.processes.stop(name)
        del self._servers[version]
        if server.phase == "ending":
            self.say(f"version {version}: stopped")
            return
        log = self.processes.log(name)
        self._failed(version, f"its server ended with status {status}; full log: {log}\n{tail(log, _LOG_LINES)}")

    def _probed(self, version: str, server: _Server, problem: str | None) -> None:
        if problem is None:
            server.missed = 0
            if server.phase == "starting":
                self.say(f"version {version}: ready after {self.clock() - server.since:.1f} s")
                server.phase, server.since = "ready", self.clock()
            elif self.clock() - server.since > _HEALTHY_AFTER_S:
                self._trouble.pop(version, None)
            return
        if server.phase == "starting":
            return
        server.missed, server.since = server.missed + 1, self.clock()
        if server.missed >= PROBES_MISSED:
            self._failed(version, f"it no longer answers ({problem})")
            self._end(version)

    def _failed(self, version: str, why: str) -> None:
        deaths = self._trouble[version].deaths + 1 if version in self._trouble else 1
        wait_s = _BACK_OFF.pause_s(deaths)
        self._trouble[version] = _Trouble(deaths, self.clock() + wait_s, why)
        first, *rest = why.split("\n", 1)
        self.say("\n".join([f"version {version}: {first}; next try in {wait_s:.0f} s", *rest]))

    def _end_unwanted(self, wanted: set[str], routed: Sequence[str]) -> None:
        for version, server in self._servers.items():
            if version in wanted or version in routed:
                server.unwanted_since = None
            elif server.unwanted_since is None:
                server.unwanted_since = self.clock()
            elif server.phase != "ending" and self.clock() - server.unwanted_since >= self.drain_s:
                self._end(version)
        for version in [v for v in self._trouble if v not in wanted and v not in self._servers]:
            del self._trouble[version]

    def _end(self, version: str) -> None:
        self._servers[version].phase = "ending"
        self.processes.ask_to_end(_name(version))


def _name(version: str) -> str:
    return f"model_{version}"


def probe_with(messages: list[Message], max_tokens: int) -> Probe:
    """A real question to the server, after making sure that it is the right one."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}

    def probe(backend: Backend) -> str | None:
        try:
            with httpx2.Client(trust_env=False, timeout=PROBE_WITHIN_S) as client:
                listed = client.get(f"{backend.url}/models").raise_for_status().json()
                names = [model["id"] for model in listed["data"]]
                if backend.model not in names:
                    raise PortTakenError(f"another server is at {backend.url}: it has {names}")
                answer = client.post(f"{backend.url}/chat/completions", json=body | {"model": backend.model})
                text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return None if isinstance(text, str) else "its answer holds no text"

    return probe
