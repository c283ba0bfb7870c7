"""Processes that serve, a model's or the router's.

They are started, probed, ended where they stop answering, and restarted. A model's server is
ms-swift's, by `python -m`: under SIGTERM `swift deploy` itself leaves its server behind.

Nothing here waits but `RouterProcess.start`, so that one server's failure delays nothing that
another one needs.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx2

from qinglan.config import Profile
from qinglan.errors import EngineError
from qinglan.recipes import Message
from qinglan.runs.launcher import Command
from qinglan.runs.processes import HOST, Processes, Say, health_problem
from qinglan.serving.routes import Backend
from qinglan.training.engines.swift import engine_env, model_arguments, swift_argv

PROBE_EVERY_S = 5.0
PROBE_WITHIN_S = 20.0
PROBES_MISSED = 3
_PROBE_WHILE_STARTING_EVERY_S = 0.2
ROUTER = "router"
ROUTER_START_WITHIN_S = 120.0
_ROUTER_RETRY_S = 1.0
CPU_BATCH = 16
"""Requests that the transformers engine answers together; without a batch size, one at a time."""
_VLLM_MEMORY = 0.9
"""vLLM's own default share of a GPU."""

Phase = Literal["starting", "ready", "ending", "ended"]


class PortTakenError(EngineError):
    """Another server has the port."""


@dataclass
class ServerProcess:
    """One server's process, started by its creation, and its health. `step` never waits."""

    processes: Processes
    name: str
    command: Command
    probe: Callable[[], str | None]
    """Says why it does not answer, None if it does; it may take long.

    `PortTakenError` gives the server up at once.
    """
    pool: ThreadPoolExecutor
    start_within_s: float
    clock: Callable[[], float] = time.monotonic
    announces: bool = False
    """True where the first line of its standard output is its address."""
    phase: Phase = "starting"
    since_s: float = 0.0
    """Time of its start; once it is ready, when it became so, or missed a probe last."""
    _probing: "Future[str | None] | None" = None
    _next_probe_s: float = 0.0
    _missed_probes: int = 0

    def __post_init__(self) -> None:
        # The log of an earlier process goes on, as a message of its crash names it.
        self.processes.start(self.name, self.command, announces=self.announces, append_log=True)
        self.since_s = self.clock()

    def step(self) -> str | None:
        """Check it once.

        Returns:
            Why it failed, at the moment that it does: it has ended then, or is being ended.
        """
        now_s = self.clock()
        if self.processes[self.name].status() is not None:
            return self._note_end()
        if self.phase == "ending":
            return None
        failure = self._take_probe(now_s)
        is_late = self.phase == "starting" and now_s - self.since_s > self.start_within_s
        if failure is None and is_late:
            failure = f"{self.name} did not answer within {self.start_within_s:.0f} s"
        if failure is not None:
            self.ask_to_end()
        return failure

    def ask_to_end(self) -> None:
        self.phase = "ending"
        self.processes[self.name].ask_to_end()

    def _note_end(self) -> str | None:
        """Why the process ended; None where it was asked to."""
        failure = None
        if self.phase != "ending":
            error = self.processes[self.name].failure()
            failure = f"{error}\n{error.said}".rstrip()
        self.processes.stop(self.name)
        self.phase = "ended"
        return failure

    def _take_probe(self, now_s: float) -> str | None:
        """Begin a probe that is due, or take the result of one; returns why it is to be ended."""
        if self._probing is None:
            if now_s >= self._next_probe_s:
                self._probing = self.pool.submit(self.probe)
            return None
        if not self._probing.done():
            return None
        probe = self._probing
        self._probing = None
        every_s = PROBE_EVERY_S if self.phase == "ready" else _PROBE_WHILE_STARTING_EVERY_S
        self._next_probe_s = now_s + every_s
        try:
            # It raises what is wrong on our side, such as too many open files: that is no missed
            # probe.
            problem = probe.result()
        except PortTakenError as error:
            return str(error)
        if problem is None:
            self._missed_probes = 0
            if self.phase == "starting":
                self.phase = "ready"
                self.since_s = now_s
        elif self.phase == "ready":
            self._missed_probes += 1
            self.since_s = now_s
            if self._missed_probes >= PROBES_MISSED:
                return f"{self.name} no longer answers: {problem}"
        return None


def serve_command(
    profile: Profile, folder: Path, backend: Backend, port: int, gpus: Sequence[str]
) -> Command:
    """ms-swift's OpenAI-compatible server for a merged model, on loopback.

    Questions never reach its log. ms-swift silently takes the next free port where this one is
    busy, so ask the server for its models' names.
    """
    arguments: dict[str, Any] = {
        **model_arguments(profile, str(folder)),
        "infer_backend": profile.answer_engine,
        "host": HOST,
        "port": port,
        "served_model_name": backend.model,
        "temperature": 0,
        "max_new_tokens": profile.student.max_new_tokens,
        "verbose": False,
        "log_interval": -1,
        "log_level": "warning",
    }
    if profile.answer_engine == "vllm":
        memory = round(_VLLM_MEMORY / profile.serve.models_per_gpu, 3)
        arguments["vllm_tensor_parallel_size"] = profile.rl.tensor_model_parallel_size
        arguments["vllm_gpu_memory_utilization"] = memory
    else:
        arguments["max_batch_size"] = CPU_BATCH
        arguments["attn_impl"] = "sdpa"
    env = engine_env(profile, str(folder))
    if profile.trainer.device == "cpu":
        arguments["device_map"] = "cpu"
        # vLLM's engine and worker are one process then, as on one GPU.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if gpus:
        env = env | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return Command(swift_argv(profile, "deploy", arguments | profile.serve.extra), env)


def places_of(profile: Profile, environment: Mapping[str, str]) -> list[list[str]] | None:
    """The groups of GPUs that a model can have; None on the CPU, where there is no limit.

    A group is there as often as models share it.
    """
    if profile.trainer.device == "cpu":
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible:
        gpus = visible.split(",")
    else:
        gpus = [str(number) for number in range(profile.trainer.gpus_per_node)]
    size = profile.rl.tensor_model_parallel_size
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    return groups * profile.serve.models_per_gpu


def chat_probe(messages: list[Message]) -> Callable[[Backend], str | None]:
    """A probe that asks a model's server for one token.

    It makes sure first that it is the right server, and raises `PortTakenError` if not.
    """
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "temperature": 0}

    def probe(backend: Backend) -> str | None:
        try:
            # Servers are on loopback: there is no proxy and no certificate.
            with httpx2.Client(trust_env=False, verify=False, timeout=PROBE_WITHIN_S) as client:
                models = client.get(f"{backend.url}/models").raise_for_status().json()["data"]
                names = [model["id"] for model in models]
                if backend.model not in names:
                    raise PortTakenError(f"another server is at {backend.url}: it has {names}")
                answer = client.post(
                    f"{backend.url}/chat/completions", json=body | {"model": backend.model}
                )
                text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
        return None if isinstance(text, str) else "its answer holds no text"

    return probe


@dataclass
class RouterProcess:
    """The router's process, which is started again at its address if it ends or hangs."""

    processes: Processes
    command: Command
    say: Say
    clock: Callable[[], float] = time.monotonic
    probe: Callable[[str], str | None] = health_problem
    """Says why an address does not answer, None if it does; it may take seconds."""
    url: str = ""
    _server: ServerProcess | None = None
    _retry_at_s: float = 0.0
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "router-probe"))

    def start(self) -> None:
        """Start it and wait until it listens.

        Raises:
            EngineError: it ends, with its reason.
        """
        self._launch(self.command.argv, announces=True)
        self.url = self.processes[ROUTER].address(ROUTER_START_WITHIN_S)

    def step(self) -> None:
        now_s = self.clock()
        if self._server is None:
            if now_s >= self._retry_at_s:
                # The launch may raise what will pass, such as a full disk, so the next time comes
                # first.
                self._retry_at_s = now_s + _ROUTER_RETRY_S
                self._relaunch()
            return
        failure = self._server.step()
        if failure:
            self.say(f"{failure}\n{ROUTER}: starting it again")
        if self._server.phase == "ended":
            self._server = None
            self._retry_at_s = now_s + _ROUTER_RETRY_S

    def _relaunch(self) -> None:
        argv = [word for word in self.command.argv if not word.startswith("--port=")]
        _, _, port = self.url.rpartition(":")
        self._launch([*argv, f"--port={port}", "--restarted"])

    def _launch(self, argv: list[str], *, announces: bool = False) -> None:
        self._server = ServerProcess(
            processes=self.processes,
            name=ROUTER,
            command=replace(self.command, argv=argv),
            probe=lambda: self.probe(f"{self.url}/health"),
            pool=self._pool,
            start_within_s=ROUTER_START_WITHIN_S,
            clock=self.clock,
            announces=announces,
        )
