"""Faults of a night, one a night, and the state in which the night's run must end all the same."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx2
import psutil

from night_site.site import Site, until

CONCURRENCY = 2
"""Calls to the teacher at a time in the night's profile."""
UNDER_WAY = 2 * CONCURRENCY
"""Answers that a killed process may lose: calls without an answer, and answers whose transaction
has not been committed, as these no longer hold a slot."""
_BALLAST = "ballast"
_BLOCK_BYTES = 64 * 1024
_OUTAGE_S = 8.0
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def _do_nothing(_: Site) -> None:
    """The step of a night on which nothing goes wrong then."""


@dataclass(frozen=True)
class Fault:
    """One night's trouble."""

    name: str
    begin: Callable[[Site], None] = _do_nothing
    """Called before the schedule fires."""
    strike: Callable[[Site], None] = _do_nothing
    """Called while the refresh asks the teacher."""
    end: Callable[[Site], None] = _do_nothing
    """Called once the night's run is over."""
    states: tuple[str, ...] = ("COMPLETED",)
    """States in which the night's run may end."""
    told: bool = False
    """Automations have to do something about it."""
    asked_again: int = 0
    """Most answers that may be paid for twice."""


def _kill(site: Site, *words: str) -> None:
    processes = []
    for process in site.matching(*words):
        # A supervisor has the words of what it starts in its own command line.
        if "supervise.py" not in " ".join(process.cmdline()):
            processes.append(process)
    if not processes:
        raise LookupError(f"no process with {' '.join(words)} in its command line to kill")
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _kill_worker(site: Site) -> None:
    _kill(site, "-m prefect", "worker start", "--pool=qinglan ")


def _kill_flow(site: Site) -> None:
    processes = [process for process in site.family() if _is_flow(process)]
    if not processes:
        raise LookupError("no flow's process to kill")
    for process in processes:
        process.kill()


def _is_flow(process: psutil.Process) -> bool:
    """Is it the worker's child that runs a flow?

    What that child starts inherits its environment, so its parent's must be without the flow run.
    """
    with suppress(psutil.Error):
        parent = process.parent()
        if _FLOW_RUN not in process.environ() or parent is None:
            return False
        return _FLOW_RUN not in parent.environ()
    return False


def _kill_server(site: Site) -> None:
    _kill(site, "-m prefect server start")


def _cut_power(site: Site) -> None:
    site.kill()
    site.start()


def _sicken_teacher(site: Site) -> None:
    site.switch(fault_share=0.2)


def _heal_teacher(site: Site) -> None:
    site.switch(fault_share=0.0)


def _take_rag_down(site: Site) -> None:
    site.switch(rag_up=False)


def _bring_rag_up(site: Site) -> None:
    site.switch(rag_up=True)


def _interrupt_rag(site: Site) -> None:
    site.switch(rag_up=False)
    threading.Timer(_OUTAGE_S, lambda: site.switch(rag_up=True)).start()


def _fill_disk(site: Site) -> None:
    with (site.folder / _BALLAST).open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(b"\0" * _BLOCK_BYTES)


def _free_disk(site: Site) -> None:
    (site.folder / _BALLAST).unlink(missing_ok=True)


def _start_another(site: Site) -> None:
    """Press Run while the nightly refresh is running."""
    before = time.monotonic()
    deployment = site.deployment("refresh")["id"]
    flow_run = site.post(
        f"deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}}
    )
    until(
        lambda: site.get(f"flow_runs/{flow_run['id']}")["state"]["type"] != "SCHEDULED",
        120,
        "the second refresh",
    )
    assert time.monotonic() > before


QUIET = Fault("quiet")
FAULTS = (
    QUIET,
    Fault("a fifth of the teacher's answers fail", begin=_sicken_teacher, end=_heal_teacher),
    Fault("RAG away for 8 s", strike=_interrupt_rag),
    Fault("a second refresh started by hand", strike=_start_another),
    Fault("worker killed", strike=_kill_worker, told=True, asked_again=UNDER_WAY),
    Fault("flow's process killed", strike=_kill_flow, told=True, asked_again=UNDER_WAY),
    Fault("Prefect's server killed", strike=_kill_server),
    Fault(
        "disk full",
        strike=_fill_disk,
        end=_free_disk,
        states=("FAILED", "CRASHED", "COMPLETED"),
        told=True,
        asked_again=UNDER_WAY,
    ),
    Fault(
        "RAG down all night", begin=_take_rag_down, end=_bring_rag_up, states=("FAILED",), told=True
    ),
    Fault("power cut: everything killed, started again", strike=_cut_power, asked_again=UNDER_WAY),
)
"""The nights' faults in this order, over and over. Those that automations need not do anything
about follow the power cut, see `told`."""


def is_reported(site: Site, flow_run_name: str) -> bool:
    """Did the webhook hear of this run?"""
    with suppress(httpx2.HTTPError):
        return any(flow_run_name in str(message) for message in site.books()["notified"])
    return False
