"""The processes that hold claims, and which of them have ended.

A holder's name has four parts: the machine, the process id, when the process began, and a random
number. On the same machine the process table tells whether it lives; elsewhere its heartbeats do.
"""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import psutil
import sqlalchemy as sa

from qinglan.ledger.database import HOLDERS
from qinglan.runs.supervise import process_status

_LONGEST_LEASE_S = 60.0
"""A process of another machine that is not heard of for so long has ended."""
_LONGEST_GAP_S = 20.0
"""After so long without a look nothing is known: the database may have been away, and nobody could
be heard of."""


class Holders:
    """Tells which holders have ended, as seen by one client."""

    def __init__(self) -> None:
        self._host = _host()
        self._observed: dict[str, tuple[float, float, float]] = {}
        """The time that another client last wrote of itself; since when, and until when, this one
        has read just that."""

    def new_name(self) -> str:
        """The name of a client of this process."""
        pid = os.getpid()
        return f"{self._host}|{pid}|{_start_ticks(pid)}|{os.urandom(4).hex()}"

    def is_dead(self, db: sa.Connection, holder: str) -> bool:
        host, pid, started, _ = holder.split("|")
        if host == self._host:
            ticks = _start_ticks(int(pid))
            # Without them, where processes of other users are hidden, it may be the one.
            return ticks != started if ticks else not psutil.pid_exists(int(pid))
        seen_s = db.scalar(sa.select(HOLDERS.c.seen_s).where(HOLDERS.c.holder == holder))
        return seen_s is None or self._unchanged_s(holder, seen_s) > _LONGEST_LEASE_S

    def _unchanged_s(self, holder: str, seen_s: float) -> float:
        """Seconds for which this client has seen no heartbeat of another.

        They are by its own clock: those of two machines differ.
        """
        now_s = time.monotonic()
        seen_before_s, since_s, looked_s = self._observed.get(holder, (seen_s, now_s, now_s))
        if seen_before_s != seen_s or now_s - looked_s > _LONGEST_GAP_S:
            since_s = now_s
        self._observed[holder] = (seen_s, since_s, now_s)
        return now_s - since_s


def describe(holder: str) -> str:
    """The holder in a message, without what only tells two of them apart."""
    host, _, rest = holder.partition("|")
    if not rest:
        return "another process"
    return f"process {rest.split('|')[0]} on {host.split(' ')[0]}"


def _host() -> str:
    """This machine, as far as process ids go: cloned machines share a name, containers a
    machine."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def _start_ticks(pid: int) -> str:
    """The time when a process began, in ticks since the machine's start: a change of the clock does
    not move them.

    Empty where the system does not show them; `ended` of a process that nobody has waited for.
    """
    status = process_status(pid)
    if not status:
        return ""
    return "ended" if status[0] == "Z" else status[19]
