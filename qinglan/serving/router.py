"""The router as a process of its own.

`python -m qinglan.serving.router --profile NAME --routes FILE` writes its address as the first line
of standard output. It serves OpenAI's chat completions, health, and metrics for Prometheus, which
never hold a text, and imports neither an engine nor Prefect nor MLflow. A question is answered with
HTTP 200 and a text where the recipe has a fallback for a model that fails; otherwise a failure is
an HTTP 503 with its reason.
"""

import argparse
import asyncio
import gc
import json
import logging
import math
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, cast, get_args

import uvicorn
from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from qinglan.clients.openai_protocol import completion_body, error_body, model_list
from qinglan.config import Profile, Serve, load_profile
from qinglan.errors import ConfigError, QinglanError
from qinglan.recipes import get_recipe
from qinglan.rows import Row
from qinglan.runs.schema_version import first_flaw
from qinglan.serving.canary_observer import CanaryObserver, canary_observer_of
from qinglan.serving.client_keys import ClientKeys
from qinglan.serving.connections import ClientConnection, Connections, backlog_for
from qinglan.serving.request_handler import (
    UNFIT,
    EventLoopLag,
    ModelClient,
    RequestHandler,
    ServedAnswer,
    describe_without_text,
)
from qinglan.serving.request_log import CONSENT_HEADER, RequestLogWriter
from qinglan.serving.router_metrics import RouterMetrics
from qinglan.serving.router_requests import CHAMPION, RefusedError, RouterRequest, TryRequest
from qinglan.serving.routes import Backend, ModelRole, RouteTable, router_url
from qinglan.serving.try_page import PAGE, PAGE_HEADERS, TryPage

BODY_WITHIN_S = 10.0
"""Time in which a request's body must come in."""
_KEEP_ALIVE_S = 75
_LAST_ANSWERS_S = 2
"""Time beyond the deadline of the last request that came in, for the router to end."""
# What is left of a request with one of these answers stays unread, so nothing more can come on its
# connection.
_CLOSING_STATUSES = (401, 408, 413)
_LOG = logging.getLogger(__name__)

RequestBody = TypeVar("RequestBody", bound=RouterRequest)


def create_app(
    profile: Profile,
    routes: Path,
    observer: CanaryObserver | None = None,
    *,
    restarted: bool = False,
) -> Starlette:
    """The service for one tenant, with the models that the file `routes` names.

    Where it is `restarted`, a request log's folder that can't be used any more costs lines, not
    answers.
    """
    service = _Service(profile, routes, observer, restarted)
    http_routes = [
        Route("/v1/chat/completions", service.complete, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    if profile.serve.try_page != "none":
        http_routes += [
            Route("/", service.try_page),
            Route("/try", service.try_settings),
            Route("/try", service.try_arm, methods=["POST"]),
        ]
    return Starlette(
        routes=http_routes,
        exception_handlers={RefusedError: service.refuse, ClientDisconnect: _answer_nobody},
        lifespan=service.lifespan,
    )


class _Service:
    """The handlers of the HTTP routes, with what they share."""

    _handler: RequestHandler
    _try: TryPage
    """Both are there from the start of the lifespan, as they belong to its event loop."""

    def __init__(
        self, profile: Profile, routes: Path, observer: CanaryObserver | None, restarted: bool
    ) -> None:
        self._profile = profile
        self._config = profile.serve
        self._observer = observer
        self._recipe = get_recipe(profile.recipe)
        self._model_names = (profile.model_name, CHAMPION)
        self._keys = ClientKeys(self._config)
        self._table = RouteTable(routes)
        self._metrics = RouterMetrics()
        self._log: RequestLogWriter | None = None
        folder = self._config.request_log.folder
        consents = {self._config.consent_of(client) for client in self._keys.clients}
        if folder and consents != {"none"}:
            self._log = RequestLogWriter(Path(folder), profile, must_work=not restarted)
            self._metrics.add_log_lines(self._log.outcomes)

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        models = ModelClient(self._profile)
        lag = EventLoopLag()
        self._handler = RequestHandler(self._config, self._table, models, lag.lag_s)
        self._try = TryPage(self._profile, self._table, models)
        self._add_gauges()
        tasks = [asyncio.create_task(lag.run())]
        if self._observer:
            tasks.append(asyncio.create_task(_observe(self._observer, self._table, models)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._try.close()
            await models.close()
            if self._log:
                await asyncio.to_thread(self._log.close)

    async def complete(self, request: Request) -> Response:
        arrived_s = time.perf_counter()
        client = self._keys.authorise(request)
        body = await _read_body(request, RouterRequest, self._config.max_body_bytes)
        if body.model not in self._model_names:
            names = " and ".join(self._model_names)
            raise RefusedError(404, f"The model `{body.model}` does not exist; there are {names}")
        question = body.question(self._profile.tenant.id, self._recipe.INPUTS)
        served = await self._handler.answer(question, arrived_s)
        consent = request.headers.get(CONSENT_HEADER)
        # Counting and logging come after the answer was handed on, so that it does not wait.
        asyncio.get_running_loop().call_soon(self._record, served, question, client, consent)
        return self._response(served, question, body)

    async def try_page(self, _request: Request) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def try_settings(self, request: Request) -> Response:
        self._keys.authorise(request)
        return JSONResponse(await self._try.settings())

    async def try_arm(self, request: Request) -> Response:
        self._keys.authorise(request)
        body = await _read_body(request, TryRequest, self._config.max_body_bytes)
        arms = self._try.arms
        if body.arm not in arms:
            raise RefusedError(400, f"arm: there is no `{body.arm}` here, but {', '.join(arms)}")
        question = body.question(self._profile.tenant.id, self._recipe.INPUTS)
        unfit_reason = self._handler.unfit_reason(question)
        return JSONResponse(await self._try.ask(body.arm, question, unfit_reason))

    async def models(self, request: Request) -> Response:
        self._keys.authorise(request)
        return JSONResponse(model_list(self._model_names))

    async def health(self, _request: Request) -> Response:
        """The models in service.

        The status is 200 as long as this process can answer at all, by its fallback if need be.
        """
        routes = self._table.routes
        health = {
            "status": "ok" if self._is_serving() else "degraded",
            "tenant": self._profile.tenant.id,
            "champion": self._backend_state(routes.champion),
            "challenger": self._backend_state(routes.challenger),
            "share": routes.share,
            "request_log": self._log_state(),
        }
        # Health is shown to everybody: where keys are needed, it holds no details.
        if not self._keys.are_needed:
            health["challenger_dropped"] = self._table.dropped_reason
            health["problem"] = self._table.problem
        return JSONResponse(health)

    async def metrics(self, request: Request) -> Response:
        self._keys.authorise(request)
        return Response(
            generate_latest(self._metrics.registry),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def refuse(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        status = error.status_code
        self._metrics.count_refusal(status)
        headers = {"connection": "close"} if status in _CLOSING_STATUSES else None
        return JSONResponse(error_body(status, error.detail), status, headers)

    def _record(
        self, served: ServedAnswer, question: Row, client: str, consent: str | None
    ) -> None:
        """Count an answer, log it where the client consents, and show it to the observer."""
        self._metrics.count_answer(served)
        if self._log and self._log.may_keep(client, consent):
            self._log.put(served, question, client)
        if self._observer:
            try:
                self._observer.on_served(served, question)
            except Exception as error:  # noqa: BLE001 (its mistake must cost no answer)
                _LOG.error(
                    "the canary's observer did not take an answer: %s", describe_without_text(error)
                )

    def _response(self, served: ServedAnswer, question: Row, request: RouterRequest) -> Response:
        details = _details(served)
        headers: dict[str, str] = {}
        for name, value in details.items():
            if value:
                headers[f"x-qinglan-{name.replace('_', '-')}"] = value
        text = served.answer
        if text is None:
            text = self._recipe.fallback(question)
        if text is None:
            return _failure(served.reason, headers)
        if request.stream:
            content = _event_stream(served, request, text, details)
            return Response(content, 200, headers, "text/event-stream")
        message = {"role": "assistant", "content": text, "refusal": None}
        body = completion_body(_answer_id(served), int(served.at), request.model, message)
        body["usage"] = served.usage
        body["qinglan"] = details
        return JSONResponse(body, headers=headers)

    def _add_gauges(self) -> None:
        table = self._table
        handler = self._handler
        add = self._metrics.add_gauge
        add("in_flight", "Requests that wait for a model", lambda: handler.in_flight)
        add("canary_share", "Of the requests, meant for the challenger", lambda: table.routes.share)
        add("serving", "1 while a model answers, 0 while none does", self._is_serving)
        for role in get_args(ModelRole):
            description = f"1 while the {role} gets no requests"
            add(f"{role}_circuit_open", description, partial(self._is_circuit_open, role))

    def _is_circuit_open(self, role: ModelRole) -> bool:
        return self._handler.is_open(self._table.routes.backend(role))

    def _is_serving(self) -> bool:
        champion = self._table.routes.champion
        return champion is not None and not self._handler.is_open(champion)

    def _backend_state(self, backend: Backend | None) -> dict[str, str] | None:
        if backend is None:
            return None
        circuit = "open" if self._handler.is_open(backend) else "closed"
        return {"version": backend.version, "circuit": circuit}

    def _log_state(self) -> str | None:
        if self._log is None:
            return None
        return "failing" if self._log.is_failing else "ok"


async def _read_body(request: Request, model: type[RequestBody], most_bytes: int) -> RequestBody:
    """The request's JSON body.

    Raises:
        RefusedError: it is too large, too slow, or not such a request.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise RefusedError(413, f"the body has more than {most_bytes} bytes")
        return model.model_validate_json(body)
    except TimeoutError:
        raise RefusedError(408, f"the body did not come in within {BODY_WITHIN_S:g} s") from None
    except ValidationError as error:
        raise RefusedError(400, first_flaw(error)) from None


def _details(served: ServedAnswer) -> dict[str, str | None]:
    """The origin of an answer, for its headers and its body."""
    return {
        "source": served.source,
        "reason": served.reason or None,
        "role": served.role,
        "version": served.version or None,
        "row_id": served.row_id,
    }


def _answer_id(served: ServedAnswer) -> str:
    return f"{served.row_id}{time.time_ns():x}"


def _failure(reason: str, headers: dict[str, str]) -> Response:
    """The answer where the model gave none and the recipe has no fallback."""
    if reason in UNFIT:
        status = 400
        problem = "the question is not fit for the model"
    else:
        # It may pass, so the client may try again.
        status = 503
        problem = "the model gave no usable answer in time"
    return JSONResponse(error_body(status, f"{problem}: {reason}", reason), status, headers)


def _event_stream(
    served: ServedAnswer, request: RouterRequest, text: str, details: dict[str, str | None]
) -> str:
    """An answer as the events of a stream, the whole text as one of them."""
    message = {"role": "assistant", "content": text}
    chunk = completion_body(
        _answer_id(served), int(served.at), request.model, message, is_chunk=True
    )
    chunks = [chunk | {"qinglan": details}]
    if request.stream_options and request.stream_options.include_usage:
        chunks.append(chunk | {"choices": [], "usage": served.usage})
    events = [json.dumps(chunk, ensure_ascii=False) for chunk in chunks]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    # The client has hung up; starlette takes an answer all the same.
    return Response(status_code=400)


async def _observe(observer: CanaryObserver, table: RouteTable, models: ModelClient) -> None:
    try:
        await observer.run(table, models)
    except Exception as error:  # noqa: BLE001 (the router goes on without it)
        _LOG.error("the canary's observer stopped: %s", describe_without_text(error))


def main() -> int:
    """Serve until SIGTERM or SIGINT; requests that came in before are answered."""
    options = _parse_options()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        profile = load_profile(options.profile, options.set)
        observer = canary_observer_of(profile, options.watch) if options.watch else None
        app = create_app(profile, options.routes, observer, restarted=options.restarted)
        backlog = backlog_for(profile.serve)
        port = profile.serve.port if options.port is None else options.port
        listener = _listen(profile.serve.host, port, backlog)
    except QinglanError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    server = uvicorn.Server(_server_config(app, profile.serve, backlog))
    # What is loaded by now stays. Without this, each full garbage collection would look through all
    # of it, and hold requests up for some 100 ms.
    gc.collect()
    gc.freeze()
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"{router_url(host, port)}\n")
    sys.stdout.flush()
    server.run(sockets=[listener])
    return 0


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Question in, answer out: the champion behind OpenAI's protocol."
    )
    parser.add_argument("--profile", required=True, help="name or path")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
    )
    parser.add_argument(
        "--routes", required=True, type=Path, help="file that names the models in service"
    )
    parser.add_argument("--port", type=int, help="instead of serve.port; 0 takes a free one")
    parser.add_argument(
        "--watch", type=Path, metavar="FOLDER", help="watch canaries, and keep how they stand here"
    )
    parser.add_argument(
        "--restarted", action="store_true", help="go on where the request log's folder is gone"
    )
    return parser.parse_args()


def _server_config(app: Starlette, serve: Serve, backlog: int) -> uvicorn.Config:
    # uvicorn only ever calls the protocol's class, so a function with its first argument will do.
    protocol = cast(
        type[asyncio.Protocol], partial(ClientConnection, Connections(serve.max_connections))
    )
    return uvicorn.Config(
        app,
        http=protocol,
        lifespan="on",
        backlog=backlog,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(serve.deadline_ms / 1000) + _LAST_ANSWERS_S,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
    )


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens already, so that its address can be announced before the start.

    Raises:
        ConfigError: the address can't be used.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        # With the protocol's number, asyncio switches Nagle's algorithm off, which costs 40 ms a
        # request; `socket.create_server` leaves it out.
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError as error:
        where = f"serve.host {host}, port {port}"
        raise ConfigError(
            f"{where}: {error.strerror}; choose another with --port or serve.port"
        ) from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
