"""The matrix: every component with each of its faults, the expected end, and the trial of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from random import Random

import psutil

from qinglan.ops.up.site import Site as Servers
from qinglan.runs.processes import Processes, free_port

from . import ledger, serving
from .proxy import HOST, Proxy
from .site import IN_FLIGHT, SERVICES, TRAINING, Site, TrialResult, Workplace
from .strikes import (
    DISK_FULL,
    KILL,
    PROCESS_FAULTS,
    SERVICE_FAULTS,
    Strike,
    break_server,
    break_service,
    prepare_clock,
)

DATA_STAGES = ("distill", "validate", "select", "dataset")
_ASKING = ("distill", "validate", "rl", "evaluate")
"""Stages that ask teacher or judge: in another one, a killed process has no answer in flight."""
_SERVERS = ("Prefect server", "MLflow server")
_SERVER_FAULTS = ("down", "restarted", "slow")


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    component: str
    fault: str
    expected: str
    trial: Callable[[Workplace, Random], TrialResult]


def matrix() -> Iterator[Line]:
    """All lines, in the table's order."""
    yield from _stage_lines()
    yield from _service_lines()
    for database, fault in ledger.FAULTS:
        trial = partial(ledger.trial, database=database, fault=fault)
        yield Line(f"ledger on {database}", fault, "every paid answer is in the ledger once", trial)
    for server in _SERVERS:
        for fault in _SERVER_FAULTS:
            expected = "waits, or ends in one line; the next run completes"
            yield Line(server, fault, expected, partial(of_server, server=server, fault=fault))
    for name, (expected, router_trial) in serving.ROUTER.items():
        yield Line("router", name, expected, router_trial)
    yield Line(
        "request log",
        "100,000 forged questions",
        "a run asks a limited number",
        serving.forged_questions,
    )
    yield Line("forget", "a search of every store", "nothing is found", serving.forget)


def _stage_lines() -> Iterator[Line]:
    """Faults of the process that runs a stage."""
    for stage in (*DATA_STAGES, *TRAINING):
        for fault, (strike, expected) in PROCESS_FAULTS.items():
            trial = partial(
                of_stage,
                stage=stage,
                strike=strike,
                # The clock must be the site's own before its first process starts.
                prepare=prepare_clock if fault.startswith("clock") else None,
                fills_disk=fault == DISK_FULL,
                in_flight=IN_FLIGHT if fault == KILL and stage in _ASKING else 0,
            )
            yield Line(stage, fault, expected, trial)


def _service_lines() -> Iterator[Line]:
    """Faults of a service, while the stage that needs it runs."""
    expected = "waits, or says what failed; the next run asks only for what is missing"
    for service in SERVICES:
        stage = "distill" if service == "teacher" else "validate"
        for fault in SERVICE_FAULTS:
            trial = partial(of_stage, stage=stage, strike=break_service(service, fault))
            yield Line(service, fault, expected, trial)


def random_quick_lines(rng: Random, count: int, *, own_disk: bool) -> Iterator[Line]:
    """Random lines of those that take some seconds on an idle machine, each kind in turn.

    A site's disk can only be filled where it has one of its own.
    """
    quick_lines = [line for line in matrix() if own_disk or line.fault != DISK_FULL]
    kinds = (
        DATA_STAGES,
        tuple(SERVICES),
        ("ledger on SQLite", "ledger on PostgreSQL"),
        ("router",),
    )
    for kind in islice(cycle(kinds), count):
        yield rng.choice([line for line in quick_lines if line.component in kind])


def of_stage(
    work: Workplace,
    rng: Random,
    *,
    stage: str,
    strike: Strike,
    prepare: Callable[[Site], None] | None = None,
    fills_disk: bool = False,
    in_flight: int = 0,
) -> TrialResult:
    """Strike while the stage is at work, heal, and give the command again until it ends well."""
    with work.site(stage if stage in TRAINING else "data") as site:
        if fills_disk and not site.own_disk:
            return TrialResult("not run: no disk of its own could be mounted", ended_well=False)
        if prepare:
            prepare(site)
        result = strike_and_finish(site, rng, stage, strike, in_flight)
        # Each command writes a report at its end, so that none can be done on a full disk.
        if fills_disk and result.what.startswith("done"):
            return replace(result, what="done, so the disk was not full", ended_well=False)
        return result


def strike_and_finish(
    site: Site, rng: Random, stage: str, strike: Strike, in_flight: int = 0
) -> TrialResult:
    """Run the command, strike at a random moment of a stage, and give it again until it is well."""
    process = site.start()
    site.wait_for_moment(stage, process, rng)
    with strike(site, process, rng):
        ends = [site.end_of(process)]
    site.finish(ends)
    return site.look(ends, in_flight)


def of_server(work: Workplace, rng: Random, *, server: str, fault: str) -> TrialResult:
    """A run that uses a server of its own, behind a proxy, while that is away or slow."""
    with work.site("data") as site, _server(site, server) as (restart, proxy):

        @contextmanager
        def restarted(_site: Site, _process: psutil.Popen, _rng: Random) -> Iterator[None]:
            restart()
            yield

        if fault == "restarted":
            return strike_and_finish(site, rng, "distill", restarted)
        # The command may wait as long as the server is away.
        site.within_s += work.seconds
        strike = break_server(proxy, fault, work.seconds)
        return strike_and_finish(site, rng, "distill", strike)


@contextmanager
def _server(site: Site, name: str) -> Iterator[tuple[Callable[[], None], Proxy]]:
    """Prefect's or MLflow's server, which the site's commands reach through a proxy.

    Yields what restarts the server, and the proxy.
    """
    folder = site.work.folder / "servers"
    port = free_port()
    servers = Servers(
        folder, f"sqlite:///{folder / 'mlflow.db'}", prefect_port=port, mlflow_port=port
    )
    servers.prepare()
    proxy = Proxy((HOST, port))
    if name.startswith("Prefect"):
        command = servers.prefect_server()
        health_url = f"{servers.api_url}/health"
        site.env["PREFECT_API_URL"] = f"http://{HOST}:{proxy.port}/api"
    else:
        command = servers.mlflow_server()
        health_url = f"{servers.mlflow_url}/health"
        site.settings["tracking.uri"] = f"http://{HOST}:{proxy.port}"
    assert command is not None
    with Processes(folder / "logs", lambda _: None) as processes:

        def start() -> None:
            processes.start("server", command)
            processes.wait_for(name, health_url)

        def restart() -> None:
            processes.stop("server")
            start()

        start()
        yield restart, proxy
    proxy.close()
