"""Processes that serve, a model's or the router's: started, probed, ended where they stop
answering, restarted.

A model's server is ms-swift's, by `python -m`: under SIGTERM `swift deploy` itself leaves its
server behind.

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

PROBE_EVERY_S, PROBE_WITHIN_S, PROBES_MISSED = 5.0, 20.0, 3
_PROBE_WHILE_STARTING_EVERY_S = 0.2
ROUTER, ROUTER_START_WITHIN_S, _ROUTER_RETRY_S = "router", 120.0, 1.0
CPU_BATCH = 16
"""Requests that the transformers engine answers together; without a batch size, one at a time."""
_VLLM_MEMORY = 0.9
"""vLLM's own default share of a GPU."""

Phase = Literal["starting", "ready", "ending", "ended"]


class PortTakenError(EngineError):
    """Another server has the port."""


@dataclass
class ServerProcess:
    """One server's process, started by its creation, and what is known of its health. `step` never
    waits."""

    processes: Processes
    name: str
    command: Command
    probe: Callable[[], str | None]
    """Why it does not answer, None if it does; it may take long. `PortTakenError` gives the server
    up at once."""
    pool: ThreadPoolExecutor
    start_within_s: float
    clock: Callable[[], float] = time.monotonic
    announces: bool = False
    """Its address, as the first line of its standard output."""
    phase: Phase = "starting"
    since_s: float = 0.0
    """When it was started; once ready, when it became so, or missed a probe last."""
    _probing: "Future[str | None] | None" = None
    _next_probe_s: float = 0.0
    _missed: int = 0

    def __post_init__(self) -> None:
        # The log goes on: a message of an earlier crash names it.
        self.processes.start(self.name, self.command, announces=self.announces, append_log=True)
        self.since_s = self.clock()

    def step(self) -> str | None:
        """Check it once. Why it failed, at the moment that it does: it has ended then, or is being
        ended."""
        now = self.clock()
        if self.processes[self.name].status() is not None:
            failure = None if self.phase == "ending" else self.processes[self.name].failure()
            self.processes.stop(self.name)
            self.phase = "ended"
            return f"{failure}\n{failure.said}".rstrip() if failure else None
        if self.phase == "ending":
            return None
        if self._probing is None and now >= self._next_probe_s:
            self._probing = self.pool.submit(self.probe)
        elif self._probing and self._probing.done():
            probed, self._probing = self._probing, None
            self._next_probe_s = now + (
                PROBE_EVERY_S if self.phase == "ready" else _PROBE_WHILE_STARTING_EVERY_S
            )
            try:
                # It raises what is wrong on our side, such as too many open files: that is no
                # missed probe.
                problem = probed.result()
            except PortTakenError as error:
                return self._give_up(str(error))
            if problem is None:
                self._missed = 0
                if self.phase == "starting":
                    self.phase, self.since_s = "ready", now
            elif self.phase == "ready":
                self._missed, self.since_s = self._missed + 1, now
                if self._missed >= PROBES_MISSED:
                    return self._give_up(f"{self.name} no longer answers: {problem}")
        if self.phase == "starting" and now - self.since_s > self.start_within_s:
            return self._give_up(f"{self.name} did not answer within {self.start_within_s:.0f} s")
        return None

    def _give_up(self, failure: str) -> str:
        self.ask_to_end()
        return failure

    def ask_to_end(self) -> None:
        self.phase = "ending"
        self.processes[self.name].ask_to_end()


def serve_command(
    profile: Profile, folder: Path, backend: Backend, port: int, gpus: Sequence[str]
) -> Command:
    """ms-swift's OpenAI-compatible server for a merged model, on loopback; questions never reach
    its log.

    ms-swift silently takes the next free port where this one is busy: ask the server for its
    models' names.
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
        arguments |= {
            "vllm_tensor_parallel_size": profile.rl.tensor_model_parallel_size,
            "vllm_gpu_memory_utilization": round(_VLLM_MEMORY / profile.serve.models_per_gpu, 3),
        }
    else:
        arguments |= {"max_batch_size": CPU_BATCH, "attn_impl": "sdpa"}
    env = engine_env(profile, str(folder))
    if profile.trainer.device == "cpu":
        arguments["device_map"] = "cpu"
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
            "0"  # vLLM's engine and worker are one process, as on one GPU
        )
    argv = swift_argv(profile, "deploy", arguments | profile.serve.extra)
    return Command(argv, env | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else env)


def places_of(profile: Profile, environment: Mapping[str, str]) -> list[list[str]] | None:
    """The groups of GPUs that a model can have, a group as often as models share it; None on the
    CPU: no limit."""
    if profile.trainer.device == "cpu":
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        visible.split(",")
        if visible
        else [str(number) for number in range(profile.trainer.gpus_per_node)]
    )
    size = profile.rl.tensor_model_parallel_size
    groups = [gpus[first : first + size] for first in range(0, len(gpus) - size + 1, size)]
    return groups * profile.serve.models_per_gpu


def chat_probe(messages: list[Message]) -> Callable[[Backend], str | None]:
    """A probe that asks a model's server for one token, after making sure that it is the right
    server."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": 1, "temperature": 0}

    def probe(backend: Backend) -> str | None:
        try:
            with httpx2.Client(
                trust_env=False, verify=False, timeout=PROBE_WITHIN_S
            ) as client:  # on loopback
                names = [
                    each["id"]
                    for each in client.get(f"{backend.url}/models")
                    .raise_for_status()
                    .json()["data"]
                ]
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
    """The router's process: knows where it listens, and restarts it there if it ends or hangs."""

    processes: Processes
    command: Command
    say: Say
    clock: Callable[[], float] = time.monotonic
    probe: Callable[[str], str | None] = health_problem
    """Why this address does not answer, None if it does; it may take seconds."""
    url: str = ""
    _server: ServerProcess | None = None
    _retry_at_s: float = 0.0
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "router-probe"))

    def start(self) -> None:
        """Start it and wait until it listens; raises `EngineError` where it ends, with its
        reason."""
        self._launch(self.command.argv, announces=True)
        self.url = self.processes[ROUTER].address(ROUTER_START_WITHIN_S)

    def step(self) -> None:
        now = self.clock()
        if self._server is None:
            if now >= self._retry_at_s:
                self._retry_at_s = (
                    now + _ROUTER_RETRY_S
                )  # what keeps it from starting, such as a full disk, may pass
                argv = [word for word in self.command.argv if not word.startswith("--port=")]
                self._launch([*argv, f"--port={self.url.rpartition(':')[2]}", "--restarted"])
            return
        if failure := self._server.step():
            self.say(f"{failure}\n{ROUTER}: starting it again")
        if self._server.phase == "ended":
            self._server, self._retry_at_s = None, now + _ROUTER_RETRY_S

    def _launch(self, argv: list[str], *, announces: bool = False) -> None:
        command = replace(self.command, argv=argv)
        probe, within_s = (lambda: self.probe(f"{self.url}/health")), ROUTER_START_WITHIN_S
        self._server = ServerProcess(
            self.processes, ROUTER, command, probe, self._pool, within_s, self.clock, announces
        )
