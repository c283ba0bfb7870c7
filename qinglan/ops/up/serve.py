"""Starts the site, in an order that keeps both cores of a small machine busy."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple
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

_SHOWN_RUNS = 5
_ANSWERS_WITHIN_S = 180.0
"""A server that starts on a busy machine's SQLite has taken more than 30 s for its first write."""


class SimulatedService(NamedTuple):
    """An embedded service for users to try by hand; flows start their own, with the settings of
    each run."""

    title: str
    argv: list[str]
    port: int
    path: str
    """What is to be called there."""


def serve_site(
    profile: Profile, say: Say, *, prefect_port: int | None = None, mlflow_port: int | None = None
) -> None:
    """Keep everything running until Ctrl-C or SIGTERM; ports that are not given are 4200 and 5000,
    or the next free."""
    start, prefect_file, state = time.monotonic(), find_deployments(), profile.paths.state
    known = find_server(state)  # before we hold the lock, by which it tells whether one runs here
    with stop_signals(), suppress(KeyboardInterrupt), only_one(state, say) as lock:
        # First whether another one runs here; then mistakes in the settings, before anything is
        # started.
        webhook_address(profile)
        prefect_port = _configured_port(known, prefect_port)
        site = Site(state, profile.tracking_uri, _port(prefect_port, 4200, "prefect", say))
        if site.mlflow_server():
            site = replace(site, mlflow_port=_port(mlflow_port, 5000, "mlflow", say))
        logs = state.resolve() / "logs"
        server = PrefectServer(site.api_url, "this very `qinglan up`", auth_string=configured()[2])
        with (
            Processes(logs, say, holds=(lock,)) as processes,
            server.client(timeout_s=_ANSWERS_WITHIN_S) as api,
        ):
            try:
                _LocalSite(profile, site, processes, api, say).serve(prefect_file, start)
            except httpx2.HTTPError as error:
                raise EngineError(
                    f"Prefect's server at {site.api_url}: {first_line(error)}; logs: {logs}"
                ) from error


@dataclass
class _LocalSite:
    profile: Profile
    site: Site
    processes: Processes
    api: httpx2.Client
    say: Say
    _workers_since: datetime = field(default_factory=lambda: datetime.now(UTC))

    def serve(self, prefect_file: Path, start_s: float) -> None:
        """Never returns: Ctrl-C is an exception."""
        self.site.prepare()
        self.processes.start("prefect_server", self.site.prefect_server())
        if mlflow := self.site.mlflow_server():
            self.processes.start("mlflow_server", mlflow)
        simulated = simulated_services(self.profile)
        for simulator in simulated:
            argv = [sys.executable, "-m", *simulator.argv, f"--port={simulator.port}"]
            self.processes.start(
                f"embedded_{simulator.title.lower()}", Command(argv, withheld_secrets(self.profile))
            )
        self.processes.wait_for("Prefect's server", f"{self.site.api_url}/health")
        server_file = (
            self.site.state / SERVER_FILE
        )  # for `qinglan run` on this site, while the server runs
        server_file.write_text(self.site.api_url, encoding="utf-8")
        try:
            with self._workers():
                register(self.api, self.site.prefect_env, prefect_file, self.profile, self.say)
                if mlflow:
                    self.processes.wait_for("MLflow's server", f"{self.site.mlflow_url}/health")
                for simulator in simulated:
                    self.processes.wait_for(
                        simulator.title, f"http://{HOST}:{simulator.port}/health"
                    )
                for pool in WORK_POOLS:
                    self.processes.wait_until(
                        f"worker of {pool}", partial(self._worker_problem, pool)
                    )
                self._say_where(simulated, time.monotonic() - start_s)
                self.processes.keep_running(self._crash_interrupted)
        finally:
            server_file.unlink(missing_ok=True)

    @contextmanager
    def _workers(self) -> Iterator[None]:
        """They end before the server does, so that they can report it."""
        for pool in WORK_POOLS:
            make_pool(self.api, pool)  # so that deploying needn't wait for the pool's worker
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
        """None once this session's worker has reported; an earlier one's report stays for a
        while."""
        try:
            workers = call(self.api, "POST", f"work_pools/{pool}/workers/filter", {})
        except httpx2.HTTPError as error:
            return first_line(error)
        last = [datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers]
        return (
            None
            if any(time > self._workers_since for time in last)
            else "it has not reported to Prefect's server"
        )

    def _crash_interrupted(self, *processes: str) -> None:
        """Mark the runs of those among the processes that are workers, and that are not running."""
        pools = [WORKERS[name] for name in processes if name in WORKERS]
        found = crash_interrupted(self.api, pools) if pools else []
        for run in (each for each in found if each["state_type"] == "CANCELLING"):
            stop_cancelled(run, self.say)
        if not (crashed := [run for run in found if run["state_type"] != "CANCELLING"]):
            return
        retries = crash_retries_on(self.api)
        continues = (
            f"each goes on by itself, {retries} times at most; after that, " if retries else ""
        )
        by_hand = "Retry on its page, or `prefect flow-run retry ID`, continues one:"
        self.say(
            f"flow runs that were interrupted, now marked as crashed: {len(crashed)}; {continues}{by_hand}"
        )
        for run in crashed[:_SHOWN_RUNS]:
            self.say(f"  {run['name']}  {self.site.prefect_url}/runs/flow-run/{run['id']}")

    def _say_where(self, simulated: Sequence[SimulatedService], seconds: float) -> None:
        lines = [f"Prefect  {self.site.prefect_url}", f"MLflow   {self.site.mlflow_url}"]
        lines += [
            f"{simulator.title:<8} http://{HOST}:{simulator.port}{simulator.path}"
            for simulator in simulated
        ]
        if simulated:
            lines.append("         simulators, to try by hand; every run starts its own")
        lines.append(
            f"Logs     {self.processes.logs}\n\nReady after {seconds:.0f} s. Ctrl-C stops all of it."
        )
        self.say("\n" + "\n".join(lines))


def _configured_port(server: PrefectServer | None, asked: int | None) -> int | None:
    """The port that the user's settings expect a server of this machine on; `ConfigError` where
    they expect another."""
    if server is None or server.is_of_up:
        return asked
    port = urlsplit(server.api_url).port
    if not uses_proxy(server.api_url) and port and asked in (None, port):
        return port
    problem = f"{server.origin} is {server.api_url}, so this site has a Prefect server already"
    raise ConfigError(f"{problem}; deploy there with `qinglan deploy`, or unset it")


def _port(asked: int | None, usual: int, what: str, say: Say) -> int:
    if asked is not None:
        if problem := port_problem(HOST, asked):
            hint = f"is `qinglan up` running already? Else give another --{what}-port"
            raise ConfigError(f"{HOST}:{asked}: {problem}; {hint}")
        return asked
    if (port := port_from(usual)) != usual:
        say(f"{what}: port {usual} is taken, so {port}")
    return port


def simulated_services(profile: Profile) -> list[SimulatedService]:
    """Those that the profile calls `embedded`; raises `ConfigError` where the profile's sample
    can't be made."""
    found = []
    if is_any_model_embedded(profile):
        found.append(SimulatedService("Teacher", teacher_argv(profile), port_from(8101), "/v1"))
    if knowledge_base := embedded_knowledge_base(profile):
        found.append(
            SimulatedService("RAG", rag_argv(profile, knowledge_base), port_from(8201), "/retrieve")
        )
    return found
