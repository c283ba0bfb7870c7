"""Strikes at a command of a site at a random moment.

Each is a context: it strikes when it is entered, and heals when it is left.
"""

import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from random import Random

import psutil

from .proxy import Proxy
from .site import DISK_MB, Site

Strike = Callable[[Site, psutil.Popen, Random], AbstractContextManager[None]]
SERVICE_FAULTS = (
    "down",
    "hanging",
    "30% errors",
    "slow headers",
    "1 GB body",
    "cut body",
    "wrong shape",
    "blank",
)
_PROXY_MODES = {
    "down": "down",
    "hanging": "black hole",
    "slow headers": "slow headers",
    "cut body": "cut body",
}
"""The faults of the network; the others are the service's own."""
KILL = "kill -9"
STOP = "SIGSTOP"
DISK_FULL = "disk full"
SERVICE_FAULT_S = 12.0
STOPPED_S = 90.0
_ON_ITS_WAY_S = 0.3
"""Time in which an answer that a service sent before its fault has arrived."""
_LATE_S = 3.0
"""Time after its fault in which a service still answers requests that waited in the proxy, of
clients that have gone."""


@contextmanager
def kill(_site: Site, process: psutil.Popen, _rng: Random) -> Iterator[None]:
    """Kill -9 the flow's process, and only that."""
    process.kill()
    yield


@contextmanager
def fill_disk(site: Site, _process: psutil.Popen, _rng: Random) -> Iterator[None]:
    """Make the disk as small as what is on it, at once and until the command has ended."""
    # It can't be made smaller than its content: where more was written meanwhile, once more.
    while not _resize(site.folder, str(_used_bytes(site.folder))):
        pass
    yield
    assert _resize(site.folder, f"{DISK_MB}m")


def _used_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _resize(folder: Path, size: str) -> bool:
    argv = ["mount", "-o", f"remount,size={size}", str(folder)]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@contextmanager
def suspend(site: Site, process: psutil.Popen, _rng: Random) -> Iterator[None]:
    """SIGSTOP the command and all that it started, for a while."""
    family = [process, *process.children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.suspend()
    time.sleep(min(STOPPED_S, site.work.seconds))
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.resume()
    yield


@contextmanager
def shift_clock(site: Site, _process: psutil.Popen, rng: Random) -> Iterator[None]:
    """Shift the clock by an hour, forwards or backwards, until the command has ended."""
    _set_clock(site.folder, rng.choice((-3600, 3600)))
    yield
    _set_clock(site.folder, 0)


def prepare_clock(site: Site) -> None:
    """Have the site's processes read a clock that can be shifted.

    This machine's own clock stays as it is.
    """
    library = site.work.folder / "clock.so"
    if not library.exists():
        source = Path(__file__).with_name("clock.c")
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], check=True
        )
    _set_clock(site.folder, 0)
    site.env |= {"LD_PRELOAD": str(library), "FAULT_CLOCK": str(_clock_file(site.folder))}


def _set_clock(folder: Path, shift_s: int) -> None:
    _clock_file(folder).write_bytes(struct.pack("q", shift_s))


def _clock_file(folder: Path) -> Path:
    return folder / "clock"


def break_service(service: str, fault: str) -> Strike:
    """A fault of teacher, judge or RAG, for some seconds."""

    @contextmanager
    def strike(site: Site, _process: psutil.Popen, _rng: Random) -> Iterator[None]:
        # The service forgets its fault only after the proxy has healed, see `_LATE_S`.
        site.work.post("switch", faults={service: fault})
        time.sleep(_ON_ITS_WAY_S)
        proxy_mode = _PROXY_MODES.get(fault, "pass")
        with _proxy_for(site.work.proxies[service], proxy_mode, SERVICE_FAULT_S):
            healing = threading.Timer(
                SERVICE_FAULT_S + _LATE_S, lambda: site.work.post("switch", faults={})
            )
            healing.start()
            yield
            healing.join()

    return strike


def break_server(proxy: Proxy, mode: str, seconds: float) -> Strike:
    """A fault of a server behind a proxy."""

    @contextmanager
    def strike(_site: Site, _process: psutil.Popen, _rng: Random) -> Iterator[None]:
        with _proxy_for(proxy, mode, seconds):
            yield

    return strike


@contextmanager
def _proxy_for(proxy: Proxy, mode: str, seconds: float) -> Iterator[None]:
    """The proxy behaves like this for so long, whatever the command does meanwhile."""
    proxy.set(mode)
    healing = threading.Timer(seconds, lambda: proxy.set("pass"))
    healing.start()
    try:
        yield
    finally:
        healing.join()


PROCESS_FAULTS: dict[str, tuple[Strike, str]] = {
    KILL: (kill, "killed; the same command goes on and completes"),
    DISK_FULL: (fill_disk, "ends in one line; goes on once there is space"),
    STOP: (suspend, "goes on by itself"),
    "clock ±1 h": (shift_clock, "goes on by itself (the clock of its processes alone is shifted)"),
}
