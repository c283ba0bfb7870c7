"""Starts the site, in an order that keeps both cores of a small machine busy."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2

from qinglan.config import Profile, uses_proxy, withheld_secrets
from qinglan.errors import ConfigError, EngineError, first_line
from qinglan.ops.prefect.api import call
from qinglan.ops.prefect.automations import webhook_address
from qinglan.ops.prefect.crash_recovery import (
    crash_interrupted,
    crash_retries_on,
    requeue_crashed,
    stop_cancelled,
)
from qinglan.ops.prefect.deploy import find_deployments, make_pool, register
from qinglan.ops.prefect.server import SERVER_FILE, PrefectServer, configured, find_server
from qinglan.ops.up.site import WORK_POOLS, WORKERS, Site, only_one
from qinglan.runs.launcher import Command
from qinglan.runs.processes import HOST, Processes, Say, port_from, port_problem, stop_signals
from qinglan.simulators.domains import embedded_knowledge_base
from qinglan.simulators.services import is_any_model_embedded, rag_argv, teacher_argv

_PREFECT_PORT = 4200
_MLFLOW_PORT = 5000
_SHOWN_RUNS = 5
_ANSWERS_WITHIN_S = 180.0
"""A server that starts on a busy machine's SQLite has taken more than 30 s for its first write."""


class SimulatedService(NamedTuple):
    """An embedded service for users to try by hand.

    Flows start their own, with the settings of each run.
    """

    title: str
    argv: list[str]
    port: int
    path: str
    """The part of the address that is to be called there."""


def serve_site(
    profile: Profile, say: Say, *, prefect_port: int | None = None, mlflow_port: int | None = None
) -> None:
    """Keep everything running until Ctrl-C or SIGTERM.

    Ports that are not given are 4200 and 5000, or the next free.
    """
    start_s = time.monotonic()
    prefect_file = find_deployments()
    state = profile.paths.state
    # Asked before the lock is held here, as the lock tells whether `qinglan up` runs.
    known_server = find_server(state)
    with stop_signals(), suppress(KeyboardInterrupt), only_one(state, say) as lock:
        # Users learn first whether another one runs here, then of mistakes in the settings, before
        # anything is started.
        webhook_address(profile)
        prefect_port = _configured_port(known_server, prefect_port)
        site = Site(state, profile.tracking_uri, _port(prefect_port, _PREFECT_PORT, "prefect", say))
        if site.mlflow_server():
            site = replace(site, mlflow_port=_port(mlflow_port, _MLFLOW_PORT, "mlflow", say))
        logs = state.resolve() / "logs"
        server = PrefectServer(site.api_url, "this very `qinglan up`", auth_string=configured()[2])
        with (
            Processes(logs, say, holds=(lock,)) as processes,
            server.client(timeout_s=_ANSWERS_WITHIN_S) as api,
        ):
            try:
                _LocalSite(profile, site, processes, api, say).serve(prefect_file, start_s)
            except httpx2.HTTPError as error:
                problem = f"{first_line(error)}; logs: {logs}"
                raise EngineError(f"Prefect's server at {site.api_url}: {problem}") from error


@dataclass
class _LocalSite:
    profile: Profile
    site: Site
    processes: Processes
    api: httpx2.Client
    say: Say
    _workers_since: datetime = field(default_factory=lambda: datetime.now(UTC))

    def serve(self, prefect_file: Path, start_s: float) -> None:
        """Start everything and keep it running; never returns, as Ctrl-C is an exception."""
        self.site.prepare()
        self.processes.start("prefect_server", self.site.prefect_server())
        mlflow_server = self.site.mlflow_server()
        if mlflow_server:
            self.processes.start("mlflow_server", mlflow_server)
        simulators = self._start_simulators()
        self.processes.wait_for("Prefect's server", f"{self.site.api_url}/health")
        with self._announced(), self._workers():
            register(self.api, self.site.prefect_env, prefect_file, self.profile, self.say)
            if mlflow_server:
                self.processes.wait_for("MLflow's server", f"{self.site.mlflow_url}/health")
            for simulator in simulators:
                health_url = f"http://{HOST}:{simulator.port}/health"
                self.processes.wait_for(simulator.title, health_url)
            for pool in WORK_POOLS:
                self.processes.wait_until(f"worker of {pool}", partial(self._worker_problem, pool))
            self._say_where(simulators, time.monotonic() - start_s)
            self.processes.keep_running(self._crash_interrupted)

    def _start_simulators(self) -> list[SimulatedService]:
        simulators = simulated_services(self.profile)
        for simulator in simulators:
            argv = [sys.executable, "-m", *simulator.argv, f"--port={simulator.port}"]
            command = Command(argv, withheld_secrets(self.profile))
            self.processes.start(f"embedded_{simulator.title.lower()}", command)
        return simulators

    @contextmanager
    def _announced(self) -> Iterator[None]:
        """Tell `qinglan run` on this site where the server is, while it runs."""
        server_file = self.site.state / SERVER_FILE
        server_file.write_text(self.site.api_url, encoding="utf-8")
        try:
            yield
        finally:
            server_file.unlink(missing_ok=True)

    @contextmanager
    def _workers(self) -> Iterator[None]:
        """Run the workers; they end before the server does, so that they can report it."""
        # Made here so that deploying needn't wait for the pool's worker.
        for pool in WORK_POOLS:
            make_pool(self.api, pool)
        self._crash_interrupted(*WORKERS)
        # The automation never learns of a run that crashed while no server ran, and late of one
        # that is marked now. As long as no worker runs, none can take such a run at the same
        # moment.
        for name in requeue_crashed(self.api, settled_for=timedelta(0)):
            self.say(f"{name} had crashed; it goes on")
        self._workers_since = datetime.now(UTC)
        for name in WORKERS:
            self.processes.start(name, self.site.worker(name))
        try:
            yield
        finally:
            self.say("stopping")
            self.processes.stop(*WORKERS)

    def _worker_problem(self, pool: str) -> str | None:
        """Why a pool's worker is not ready; None once this session's worker has reported.

        The report of an earlier session's stays for a while.
        """
        try:
            workers = call(self.api, "POST", f"work_pools/{pool}/workers/filter", {})
        except httpx2.HTTPError as error:
            return first_line(error)
        for worker in workers:
            if datetime.fromisoformat(worker["last_heartbeat_time"]) > self._workers_since:
                return None
        return "it has not reported to Prefect's server"

    def _crash_interrupted(self, *process_names: str) -> None:
        """Mark the runs of those among the processes that are workers, and that are not running."""
        pools = [WORKERS[name] for name in process_names if name in WORKERS]
        if not pools:
            return
        crashed_runs = []
        for run in crash_interrupted(self.api, pools):
            if run["state_type"] == "CANCELLING":
                stop_cancelled(run, self.say)
            else:
                crashed_runs.append(run)
        if crashed_runs:
            self._say_crashed(crashed_runs)

    def _say_crashed(self, runs: Sequence[dict[str, Any]]) -> None:
        retries = crash_retries_on(self.api)
        by_itself = ""
        if retries:
            by_itself = f"each goes on by itself, {retries} times at most; after that, "
        self.say(
            f"flow runs that were interrupted, now marked as crashed: {len(runs)}; {by_itself}"
            "Retry on its page, or `prefect flow-run retry ID`, continues one:"
        )
        for run in runs[:_SHOWN_RUNS]:
            self.say(f"  {run['name']}  {self.site.prefect_url}/runs/flow-run/{run['id']}")

    def _say_where(self, simulators: Sequence[SimulatedService], seconds: float) -> None:
        lines = [f"Prefect  {self.site.prefect_url}", f"MLflow   {self.site.mlflow_url}"]
        for simulator in simulators:
            lines.append(f"{simulator.title:<8} http://{HOST}:{simulator.port}{simulator.path}")
        if simulators:
            lines.append("         simulators, to try by hand; every run starts its own")
        lines += [
            f"Logs     {self.processes.logs}",
            "",
            f"Ready after {seconds:.0f} s. Ctrl-C stops all of it.",
        ]
        self.say("\n" + "\n".join(lines))


def _configured_port(server: PrefectServer | None, requested: int | None) -> int | None:
    """The port that the user's settings expect a server of this machine on.

    Raises ConfigError where they expect another server.
    """
    if server is None or server.is_of_up:
        return requested
    port = urlsplit(server.api_url).port
    is_of_this_machine = not uses_proxy(server.api_url)
    if is_of_this_machine and port and requested in (None, port):
        return port
    problem = f"{server.origin} is {server.api_url}, so this site has a Prefect server already"
    raise ConfigError(f"{problem}; deploy there with `qinglan deploy`, or unset it")


def _port(requested: int | None, usual: int, program: str, say: Say) -> int:
    """The requested port, or the first free one from the usual one on."""
    if requested is None:
        port = port_from(usual)
        if port != usual:
            say(f"{program}: port {usual} is taken, so {port}")
        return port
    problem = port_problem(HOST, requested)
    if problem:
        hint = f"is `qinglan up` running already? Else give another --{program}-port"
        raise ConfigError(f"{HOST}:{requested}: {problem}; {hint}")
    return requested


def simulated_services(profile: Profile) -> list[SimulatedService]:
    """The services that the profile calls `embedded`.

    Raises `ConfigError` where the profile's sample can't be made.
    """
    services = []
    if is_any_model_embedded(profile):
        services.append(SimulatedService("Teacher", teacher_argv(profile), port_from(8101), "/v1"))
    knowledge_base = embedded_knowledge_base(profile)
    if knowledge_base:
        argv = rag_argv(profile, knowledge_base)
        services.append(SimulatedService("RAG", argv, port_from(8201), "/retrieve"))
    return services
