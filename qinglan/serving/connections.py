"""Keeps clients that send nothing from taking the router's connections away from those that do.

uvicorn closes a connection that lies idle after an answer, and knows no other time limit; its
`limit_concurrency` answers 503 to everybody while slow clients hold that many connections. Here a
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
"""Time from the connection, or from the first byte of a further request, to the end of its head."""
_OTHER_FILES = 64
"""Files that the process opens beside its clients' and its models' connections."""
_LEAST_BACKLOG = 64
_MOST_BACKLOG = 2048
_LOG = logging.getLogger(__name__)


@dataclass
class Connections:
    """The connections of one router that wait for their clients."""

    limit: int
    waiting: dict["ClientConnection", None] = field(default_factory=dict)
    """An ordered set: the connection that has waited longest comes first."""
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
        # uvicorn's own set is corrected at once, as `connection_lost` is called only later and the
        # next client is counted before.
        connection.connections.discard(connection)
        connection.transport.abort()


class ClientConnection(H11Protocol):
    """uvicorn's protocol of one connection, which notes when it begins to wait for its client."""

    _head_due_s: float | None = None
    """Time of the event loop at which the head of a request must be complete."""

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
        # The client does not read its answer.
        super().pause_writing()
        self._limits.waiting.setdefault(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._note_progress()

    def _note_progress(self) -> None:
        """Note whether the connection waits for its client, and until when a head must come in."""
        has_head = self.cycle is not None and not self.cycle.response_complete
        has_whole_request = has_head and not self.cycle.more_body
        if has_whole_request:
            self._limits.waiting.pop(self, None)
        elif not self.transport.is_closing():
            self._limits.waiting.setdefault(self)
        if has_head:
            # The router itself limits the time for a body.
            self._head_due_s = None
        elif self.timeout_keep_alive_task is None:
            # uvicorn's timer, which runs from an answer to the next byte, is free: it serves for
            # the head as well.
            if self._head_due_s is None:
                self._head_due_s = self.loop.time() + HEAD_WITHIN_S
            self.timeout_keep_alive_task = self.loop.call_at(
                self._head_due_s, self.timeout_keep_alive_handler
            )


def backlog_for(serve: Serve) -> int:
    """The number of connections that may wait to be accepted.

    It raises the limit of open files of this process to what the router needs with that many.

    Raises:
        ConfigError: the process may not open as many files.
    """
    needed_files = serve.max_connections + serve.max_in_flight + _OTHER_FILES
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed_files = sys.maxsize if hard_limit == resource.RLIM_INFINITY else hard_limit
    # The system may accept all that wait at once, and each connection takes a file.
    backlog = min(_MOST_BACKLOG, allowed_files - needed_files)
    if backlog < _LEAST_BACKLOG:
        least = needed_files + _LEAST_BACKLOG
        raise ConfigError(
            f"serve.max_connections {serve.max_connections}: needs {least} open files, and this "
            f"process may have {allowed_files}; lower it or serve.max_in_flight, or raise the "
            "limit (`ulimit -n`)"
        )
    is_limited = soft_limit != resource.RLIM_INFINITY
    if is_limited and soft_limit < needed_files + backlog:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed_files + backlog, hard_limit))
    return backlog
