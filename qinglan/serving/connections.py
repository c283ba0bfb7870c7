"""Keeps clients that send nothing from taking the router's connections away from those that do.

uvicorn closes a connection that lies idle after an answer, and knows no other time limit. Here a
request's head must come in within `HEAD_WITHIN_S`, and of more connections than are allowed the one
is closed that has waited longest for its client: for a request, for the rest of one, or for the
client to read its answer.
"""

import asyncio
import logging
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from qinglan.config import Serve
from qinglan.errors import ConfigError

HEAD_WITHIN_S = 10.0
"""From the connection, or from the first byte of a further request, to the end of its head."""
_OTHER_FILES = 64
_BACKLOGS = 64, 2048
"""Connections that the system keeps until they are accepted, all at once: at least, and at most."""
_LOG = logging.getLogger(__name__)


@dataclass
class Connections:
    """Those of one router that wait for their clients, in the order in which they began to."""

    limit: int
    waiting: dict["ClientConnection", None] = field(default_factory=dict)
    is_limit_reported: bool = False

    def close_longest_waiting(self) -> None:
        if not self.is_limit_reported:
            self.is_limit_reported = True
            _LOG.warning(
                "serve.max_connections: %d are open; from now on those that wait longest give way",
                self.limit,
            )
        connection = next(iter(self.waiting))
        del self.waiting[connection]
        connection.connections.discard(connection)
        connection.transport.abort()


class ClientConnection(H11Protocol):
    _head_due_s: float | None = None

    def __init__(self, limits: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note_progress()
        if len(self.connections) > self._limits.limit:
            self._limits.close_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_progress()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_progress()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limits.waiting.setdefault(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_progress()

    def _note_progress(self) -> None:
        is_asked = self.cycle is not None and not self.cycle.response_complete
        if is_asked and not self.cycle.more_body:
            self._limits.waiting.pop(self, None)
        elif not self.transport.is_closing():
            self._limits.waiting.setdefault(self)
        if is_asked:  # the router has a time limit for the body
            self._head_due_s = None
        elif (
            self.timeout_keep_alive_task is None
        ):  # uvicorn's timer runs from an answer to the next byte
            self._head_due_s = self._head_due_s or self.loop.time() + HEAD_WITHIN_S
            self.timeout_keep_alive_task = self.loop.call_at(
                self._head_due_s, self.timeout_keep_alive_handler
            )


def backlog_for(serve: Serve) -> int:
    """How many connections may wait to be accepted, once this process may open all the files that
    it needs then."""
    needed = serve.max_connections + serve.max_in_flight + _OTHER_FILES
    fewest, most = _BACKLOGS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    backlog = min(most, allowed - needed)
    if backlog < fewest:
        problem = f"needs {needed + fewest} open files, and this process may have {allowed}"
        hint = "lower it or serve.max_in_flight, or raise the limit (`ulimit -n`)"
        raise ConfigError(f"serve.max_connections {serve.max_connections}: {problem}; {hint}")
    if soft != resource.RLIM_INFINITY and soft < needed + backlog:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed + backlog, hard))
    return backlog
