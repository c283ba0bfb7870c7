"""Which model answers: one small file that the site writes and the router reads, replaced whole at
every change.

A request takes its backend once, so a change of routes affects only those that come after it.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from qinglan.rows import hash_fraction
from qinglan.runs.artifacts import write_json

CHECK_EVERY_S = 0.2
ModelRole = Literal["champion", "challenger"]
_LOG = logging.getLogger(__name__)


def router_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Backend(BaseModel, frozen=True, extra="forbid"):
    url: str
    """Up to and including `/v1`."""
    model: str
    version: str


class Routes(BaseModel, frozen=True, extra="forbid"):
    """The models in service; with none, every answer is the original question."""

    champion: Backend | None = None
    challenger: Backend | None = None
    share: float = 0.0
    """Of the requests that go to the challenger, 0 to 1."""

    @property
    def summary(self) -> str:
        if self.champion is None:
            return "no model; every answer is the fallback"
        canary = (
            f", version {self.challenger.version} gets {self.share:.0%}" if self.challenger else ""
        )
        return f"version {self.champion.version}{canary}"

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> "Routes":
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()


class RouteTable:
    """The routes file, read again whenever it changes. Belongs to the event loop, which it never
    holds up for long."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._read, self._next_check = Routes(), float("-inf")
        self._stamp: tuple[int, int, int] | None = None
        self._dropped = ""
        self.dropped_reason: str | None = None
        """Why the challenger in the file gets nothing any more, if so."""
        self.problem: str | None = None
        """What is wrong with the file; the routes read last stay in force."""

    @property
    def routes(self) -> Routes:
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + CHECK_EVERY_S
            self._read_if_changed()
        if not self._dropped:
            return self._read
        return self._read.model_copy(update={"challenger": None, "share": 0.0})

    def pick(self, row_id: str) -> tuple[ModelRole, Backend] | None:
        routes = self.routes
        # Always the same questions for one version of the challenger, and others for the next.
        if (
            routes.challenger
            and hash_fraction(f"{routes.challenger.version}\x1f{row_id}") < routes.share
        ):
            return "challenger", routes.challenger
        return ("champion", routes.champion) if routes.champion else None

    def drop_challenger(self, reason: str) -> None:
        """Give the challenger no more requests, until the file names another one, or
        `allow_challenger`."""
        if challenger := self.routes.challenger:
            self._dropped, self.dropped_reason = challenger.version, reason
            _LOG.warning("challenger %s gets no more requests: %s", challenger.version, reason)

    def allow_challenger(self) -> None:
        """Accept a challenger again: the canary of the dropped one is over, so one that the file
        names now is new."""
        self._dropped, self.dropped_reason = "", None

    def _read_if_changed(self) -> None:
        stamp = None
        with suppress(OSError):
            status = self._path.stat()
            stamp = status.st_mtime_ns, status.st_ino, status.st_size
        if stamp == self._stamp:
            return
        try:
            routes = Routes.read(self._path)
        except (OSError, ValueError) as error:
            problem = f"{self._path}: can't be read, the routes before it stay: {' '.join(str(error).split())}"
            if problem != self.problem:
                self.problem = problem
                _LOG.error(problem)
            return
        self._stamp, self.problem = stamp, None
        if routes.challenger and routes.challenger.version != self._dropped:
            self.allow_challenger()
        if routes != self._read:
            self._read = routes
            _LOG.info("routes: %s", routes.summary)
