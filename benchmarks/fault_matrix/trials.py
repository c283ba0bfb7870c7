"""The matrix: every component with each of its faults, what is expected, and how one trial of it is
made."""

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
from .site import IN_FLIGHT, SERVICES, TRAINING, Seen, Site, Workplace
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
_SERVER_FAULTS = ("down", "restarted", "slow")


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    component: str
    fault: str
    expected: str
    trial: Callable[[Workplace, Random], Seen]


def matrix() -> Iterator[Line]:
    for stage in (*DATA_STAGES, *TRAINING):
        for fault, (strike, expected) in PROCESS_FAULTS.items():
            prepare = prepare_clock if fault.startswith("clock") else None
            in_flight = IN_FLIGHT if fault == KILL and stage in _ASKING else 0
            trial = partial(
                of_stage,
                stage=stage,
                strike=strike,
                prepare=prepare,
                fills_disk=fault == DISK_FULL,
                in_flight=in_flight,
            )
            yield Line(stage, fault, expected, trial)
    for service in SERVICES:
        for fault in SERVICE_FAULTS:
            expected = "waits, or says what failed; the next run asks only for what is missing"
            stage = "distill" if service == "teacher" else "validate"
            trial = partial(of_stage, stage=stage, strike=break_service(service, fault))
            yield Line(service, fault, expected, trial)
    for database, fault in ledger.FAULTS:
        yield Line(
            f"ledger on {database}",
            fault,
            "every paid answer is in the ledger once",
            partial(ledger.trial, database=database, fault=fault),
        )
    for server in ("Prefect server", "MLflow server"):
        for fault in _SERVER_FAULTS:
            expected = "waits, or ends in one line; the next run completes"
            yield Line(server, fault, expected, partial(of_server, server=server, fault=fault))
    for name, (expected, trial) in serving.ROUTER.items():
        yield Line("router", name, expected, trial)
    yield Line(
        "request log",
        "100,000 forged questions",
        "a run asks a limited number",
        serving.forged_questions,
    )
    yield Line("forget", "a search of every store", "nothing is found", serving.forget)


def random_quick_lines(rng: Random, count: int, *, own_disk: bool) -> Iterator[Line]:
    """Of those that take some seconds on an idle machine, each kind in turn.

    Without a disk of its own, a site's can't be filled.
    """
    quick = [line for line in matrix() if own_disk or line.fault != DISK_FULL]
    kinds = (
        DATA_STAGES,
        tuple(SERVICES),
        ("ledger on SQLite", "ledger on PostgreSQL"),
        ("router",),
    )
    for kind in islice(cycle(kinds), count):
        yield rng.choice([line for line in quick if line.component in kind])


def of_stage(
    work: Workplace,
    rng: Random,
    *,
    stage: str,
    strike: Strike,
    prepare: Callable[[Site], None] | None = None,
    fills_disk: bool = False,
    in_flight: int = 0,
) -> Seen:
    """Strike while the stage is at work, heal, and give the command again until it ends well."""
    with work.site(stage if stage in TRAINING else "data") as site:
        if fills_disk and not site.own_disk:
            return Seen("not run: no disk of its own could be mounted", ended_well=False)
        if prepare:
            prepare(site)
        seen = struck(site, rng, stage, strike, in_flight)
        if fills_disk and seen.what.startswith("done"):  # each command writes a report at its end
            return replace(seen, what="done, so the disk was not full", ended_well=False)
        return seen


def struck(site: Site, rng: Random, stage: str, strike: Strike, in_flight: int = 0) -> Seen:
    process = site.start()
    site.wait_for_moment(stage, process, rng)
    with strike(site, process, rng):
        ends = [site.end_of(process)]
    site.finish(ends)
    return site.look(ends, in_flight)


def of_server(work: Workplace, rng: Random, *, server: str, fault: str) -> Seen:
    """A run that uses a server of its own, behind a proxy, while that is away or slow."""
    with work.site("data") as site, _server(site, server) as (restart, proxy):

        @contextmanager
        def restarted(_site: Site, _process: psutil.Popen, _rng: Random) -> Iterator[None]:
            restart()
            yield

        if fault == "restarted":
            return struck(site, rng, "distill", restarted)
        site.within_s += work.seconds
        return struck(site, rng, "distill", break_server(proxy, fault, work.seconds))


@contextmanager
def _server(site: Site, name: str) -> Iterator[tuple[Callable[[], None], Proxy]]:
    """Prefect's or MLflow's, which the site's commands reach through a proxy, and what restarts
    it."""
    folder, port = site.work.folder / "servers", free_port()
    servers = Servers(
        folder, f"sqlite:///{folder / 'mlflow.db'}", prefect_port=port, mlflow_port=port
    )
    servers.prepare()
    proxy = Proxy((HOST, port))
    is_prefect = name.startswith("Prefect")
    command = servers.prefect_server() if is_prefect else servers.mlflow_server()
    assert command is not None
    if is_prefect:
        site.env |= {"PREFECT_API_URL": f"http://{HOST}:{proxy.port}/api"}
    else:
        site.settings |= {"tracking.uri": f"http://{HOST}:{proxy.port}"}
    with Processes(folder / "logs", lambda _: None) as processes:

        def start() -> None:
            processes.start("server", command)
            processes.wait_for(
                name, f"{servers.api_url if is_prefect else servers.mlflow_url}/health"
            )

        def restart() -> None:
            processes.stop("server")
            start()

        start()
        yield restart, proxy
    proxy.close()
