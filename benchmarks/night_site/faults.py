"""What goes wrong at night, one thing a night, and in which state the night's run must end all the
same."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx2
import psutil

from night_site.site import Site, until

CONCURRENCY = 2
"""Of the profile's calls to the teacher."""
UNDER_WAY = 2 * CONCURRENCY
"""When a process is killed: calls without an answer, and answers whose transaction has not been
committed, as these no longer hold a slot."""
_BALLAST = "ballast"
_LEFT_BYTES = 64 * 1024
_OUTAGE_S = 8.0
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"


def _nothing(_: Site) -> None:
    """Goes wrong."""


@dataclass(frozen=True)
class Fault:
    """One night's trouble."""

    name: str
    begin: Callable[[Site], None] = _nothing
    """Before the schedule fires."""
    strike: Callable[[Site], None] = _nothing
    """While the refresh asks the teacher."""
    end: Callable[[Site], None] = _nothing
    """Once the night's run is over."""
    states: tuple[str, ...] = ("COMPLETED",)
    """In which the night's run may end."""
    told: bool = False
    """Automations have to do something about it."""
    asked_again: int = 0
    """So many may be paid for twice."""


def _kill(site: Site, *words: str) -> None:
    struck = [
        process
        for process in site.matching(*words)
        if "supervise.py" not in " ".join(process.cmdline())
    ]
    if not struck:
        raise LookupError(f"no process with {' '.join(words)} in its command line to kill")
    for process in struck:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _kill_worker(site: Site) -> None:
    _kill(site, "-m prefect", "worker start", "--pool=qinglan ")


def _kill_flow(site: Site) -> None:
    struck = [process for process in site.family() if _is_flow(process)]
    if not struck:
        raise LookupError("no flow's process to kill")
    for process in struck:
        process.kill()


def _is_flow(process: psutil.Process) -> bool:
    """The worker's child that runs a flow; what that starts inherits its environment."""
    with suppress(psutil.Error):
        parent = process.parent()
        return (
            _FLOW_RUN in process.environ()
            and parent is not None
            and _FLOW_RUN not in parent.environ()
        )
    return False


def _kill_server(site: Site) -> None:
    _kill(site, "-m qinglan.tasks.prefect_server")


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
            ballast.write(b"\0" * _LEFT_BYTES)


def _free_disk(site: Site) -> None:
    (site.folder / _BALLAST).unlink(missing_ok=True)


def _start_another(site: Site) -> None:
    """Somebody presses Run while the nightly refresh is running."""
    before = time.monotonic()
    deployment = site.deployment("refresh")["id"]
    made = site.post(f"deployments/{deployment}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    until(
        lambda: site.get(f"flow_runs/{made['id']}")["state"]["type"] != "SCHEDULED",
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
"""In this order, over and over. Those that automations need not do anything about follow the power
cut, see `told`."""


def told_of(site: Site, flow_run_name: str) -> bool:
    """Did the webhook hear of this run?"""
    with suppress(httpx2.HTTPError):
        return any(flow_run_name in str(message) for message in site.books()["notified"])
    return False
