"""The models that answer: one small file that the site writes and the router reads.

It is replaced whole at every change.

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
ROUTES_FILE = "routes.json"
ModelRole = Literal["champion", "challenger"]
_LOG = logging.getLogger(__name__)


def router_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Backend(BaseModel, frozen=True, extra="forbid"):
    """A model's server."""

    url: str
    """Address up to and including `/v1`."""
    model: str
    version: str


class Routes(BaseModel, frozen=True, extra="forbid"):
    """The models in service; with none, every answer is the original question."""

    champion: Backend | None = None
    challenger: Backend | None = None
    share: float = 0.0
    """Share of the requests that go to the challenger, 0 to 1."""

    @property
    def summary(self) -> str:
        if self.champion is None:
            return "no model; every answer is the fallback"
        summary = f"version {self.champion.version}"
        if self.challenger:
            summary += f", version {self.challenger.version} gets {self.share:.0%}"
        return summary

    @property
    def versions(self) -> list[str]:
        """The versions that get requests."""
        return [backend.version for backend in (self.champion, self.challenger) if backend]

    def backend(self, role: ModelRole) -> Backend | None:
        return self.champion if role == "champion" else self.challenger

    def without_challenger(self) -> "Routes":
        return self.model_copy(update={"challenger": None, "share": 0.0})

    def write(self, path: Path) -> None:
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def read(cls, path: Path) -> "Routes":
        """The routes in a file; none where there is no file."""
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()


class RouteTable:
    """The routes file, read again whenever it changes.

    The table belongs to the event loop, which it never holds up for long.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._read = Routes()
        """The routes as the file has them."""
        self._next_check = float("-inf")
        self._stamp: tuple[int, int, int] | None = None
        """Time of change, inode and size of the file when it was read."""
        self._dropped = ""
        """Version of the challenger that gets nothing any more."""
        self.dropped_reason: str | None = None
        """Why the challenger in the file gets nothing any more, if so."""
        self.problem: str | None = None
        """The file's flaw, if it has one; the routes read last stay in force then."""

    @property
    def routes(self) -> Routes:
        """The routes in force."""
        now = self._clock()
        if now >= self._next_check:
            self._next_check = now + CHECK_EVERY_S
            self._read_if_changed()
        return self._read.without_challenger() if self._dropped else self._read

    def pick(self, row_id: str) -> tuple[ModelRole, Backend] | None:
        """The model that answers a question; None where none is in service."""
        routes = self.routes
        challenger = routes.challenger
        # The same questions go to one version of the challenger always, and others to the next.
        if challenger and hash_fraction(f"{challenger.version}\x1f{row_id}") < routes.share:
            return "challenger", challenger
        return ("champion", routes.champion) if routes.champion else None

    def drop_challenger(self, reason: str) -> None:
        """Give the challenger no more requests.

        It stays so until the file names another one, or `allow_challenger` is called.
        """
        challenger = self.routes.challenger
        if challenger:
            self._dropped = challenger.version
            self.dropped_reason = reason
            _LOG.warning("challenger %s gets no more requests: %s", challenger.version, reason)

    def allow_challenger(self) -> None:
        """Accept a challenger again.

        The canary of the dropped one is over, so one that the file names now is new.
        """
        self._dropped = ""
        self.dropped_reason = None

    def _read_if_changed(self) -> None:
        stamp = None
        with suppress(OSError):
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        if stamp == self._stamp:
            return
        try:
            routes = Routes.read(self._path)
        except (OSError, ValueError) as error:
            # The stamp stays as it was, so that the next check tries again.
            reason = " ".join(str(error).split())
            problem = f"{self._path}: can't be read, the routes before it stay: {reason}"
            if problem != self.problem:
                self.problem = problem
                _LOG.error(problem)
            return
        self._stamp = stamp
        self.problem = None
        if routes.challenger and routes.challenger.version != self._dropped:
            self.allow_challenger()
        if routes != self._read:
            self._read = routes
            _LOG.info("routes: %s", routes.summary)
