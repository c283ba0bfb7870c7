"""Options, injected faults and serving, which the simulators' servers share.

Latency and faults are injected below the app, where a real network has them. Faults come in thirds:
429 with Retry-After, 500, and a connection that drops in the middle of the answer.
"""

import argparse
import asyncio
import socket
import sys
from random import Random
from typing import Literal, get_args

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from qinglan.clients.openai_protocol import error_body

Fault = Literal["rate_limit", "server_error", "drop"]

_BACKLOG = 512


class Faults:
    """ASGI middleware that delays every POST, and fails a seeded share of them."""

    def __init__(
        self, app: ASGIApp, latency_ms: float = 0.0, fault_rate: float = 0.0, seed: int = 0
    ) -> None:
        self._app = app
        self._latency_s = latency_ms / 1000
        self._fault_rate = fault_rate
        self._rng = Random(seed)

    def next_fault(self) -> Fault | None:
        """Draw what happens to the next POST; None where it is answered."""
        if self._rng.random() >= self._fault_rate:
            return None
        return self._rng.choice(get_args(Fault))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Other requests are health checks, which ask whether the server is up at all.
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        match self.next_fault():
            case None:
                await self._app(scope, receive, send)
            case "rate_limit":
                body = error_body(429, "rate limit reached; try again")
                refusal = JSONResponse(body, 429, {"retry-after": "1"})
                await refusal(scope, receive, send)
            case "server_error":
                failure = JSONResponse(error_body(500, "injected failure"), 500)
                await failure(scope, receive, send)
            case "drop":
                # An answer that begins and never ends makes uvicorn close the connection.
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The options that all simulators' servers take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--port", type=int, default=0, help="0 takes a free one; the first line says which"
    )
    parser.add_argument("--latency-ms", type=float, default=0.0, help="added to every POST")
    parser.add_argument(
        "--fault-rate", type=float, default=0.0, help="share of POSTs that fail, 0 to 1"
    )
    parser.add_argument(
        "--seed", type=int, default=7, help="of the faults and of the teacher's choices"
    )
    return parser


def serve(app: ASGIApp, options: argparse.Namespace) -> None:
    """Serve on loopback until stopped; the first line on standard output is the base URL."""
    app_with_faults = Faults(app, options.latency_ms, options.fault_rate, options.seed)
    # Bound here rather than by uvicorn, so that the port is known before the app serves.
    # Without the protocol's number asyncio leaves Nagle's algorithm on, at 40 ms a request.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", options.port))
    listener.listen(_BACKLOG)
    config = uvicorn.Config(
        app_with_faults, log_level="warning", access_log=False, timeout_graceful_shutdown=2
    )
    port = listener.getsockname()[1]
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=[listener])
