"""The router as a process of its own: `python -m qinglan.serving.router --profile NAME --routes
FILE`.

The first line on standard output is the address. It serves OpenAI's chat completions, health, and
metrics for Prometheus, which never hold a text, and imports neither an engine nor Prefect nor
MLflow. A question is answered with HTTP 200 and a text where the recipe has a fallback for a model
that fails, else a failure is an HTTP 503 with the why.
"""

import argparse
import asyncio
import gc
import hmac
import json
import logging
import math
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import uvicorn
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from qinglan.clients.openai_protocol import ChatRequest, completion_body, error_body, model_list
from qinglan.config import Profile, Serve, load_profile, require_secret
from qinglan.data.sources.records import without_illegal
from qinglan.errors import ConfigError, QinglanError
from qinglan.recipes import Input, get_recipe, identifying
from qinglan.rows import Row, row_id
from qinglan.runs.schema_version import first_flaw
from qinglan.serving.canary_observer import CanaryObserver, canary_observer_of
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
from qinglan.serving.routes import Backend, ModelRole, RouteTable, router_url
from qinglan.serving.try_page import PAGE, PAGE_HEADERS, TryPage

BODY_WITHIN_S = 10.0
"""For a request's body to come in."""
CHAMPION = "champion"
"""Model name that always means the one in service."""
_LATENCY_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0)
_PREFIX = "qinglan_router"
_KEEP_ALIVE_S = 75
_LAST_ANSWERS_S = 2
"""After the deadline of the last request that came in."""
_LOG = logging.getLogger(__name__)


class RefusedError(HTTPException):
    """A request that can't be answered, with its HTTP status."""


class RouterRequest(ChatRequest):
    model: str = CHAMPION
    profile: str | None = None
    """What is known of the user (`extra_body` of the openai client)."""
    history: str | None = None
    """A summary of what was said before."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """What else the recipe needs, by `Input.name`."""

    def question(self, tenant: str, inputs: Sequence[Input]) -> Row:
        """The last user message with the recipe's inputs, as a row like those of the training,
        without its labels."""
        texts = {"query": self.last_user_text, "profile": self.profile, "history": self.history}
        asked = {name: without_illegal(text or "").strip() for name, text in texts.items()}
        if not asked["query"]:
            raise RefusedError(
                400, "messages: there is no user message with text; the last one is the question"
            )
        given = {
            name: text
            for name, value in self.inputs.items()
            if (text := without_illegal(value).strip())
        }
        known = {each.name for each in inputs}
        if unknown := [name for name in given if name not in known]:
            names = ", ".join(sorted(known)) or "none"
            raise RefusedError(400, f"inputs: there is no `{unknown[0]}` here, but {names}")
        if missing := [each for each in inputs if each.is_asked and each.name not in given]:
            raise RefusedError(
                400, f"inputs.{missing[0].name}: is missing or empty; it is part of what is asked"
            )
        identity = row_id(tenant, **asked, inputs=identifying(given, inputs))
        return Row(id=identity, tenant=tenant, **asked, inputs=given, source="router")


class TryRequest(RouterRequest):
    arm: str


Asked = TypeVar("Asked", bound=RouterRequest)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._answers = Counter(
            f"{_PREFIX}_answers",
            "Answered requests",
            ("role", "version", "source", "reason"),
            registry=self.registry,
        )
        self._latency = Histogram(
            f"{_PREFIX}_latency_seconds", "From a request's arrival to its answer", ("role", "source"),
            buckets=_LATENCY_BUCKETS_S, registry=self.registry,
        )  # fmt: skip
        self.refused = Counter(
            f"{_PREFIX}_refused",
            "Requests with an HTTP error for an answer",
            ("status",),
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def answered(self, served: ServedAnswer) -> None:
        self._answers.labels(served.role, served.version, served.source, served.reason).inc()
        self._latency.labels(served.role, served.source).observe(served.latency_ms / 1000)


@dataclass(eq=False)
class LogLines(Collector):
    outcomes: Mapping[str, int]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            f"{_PREFIX}_log_lines", "Lines for the request log", labels=["outcome"]
        )
        for outcome, lines in sorted(dict(self.outcomes).items()):
            family.add_metric([outcome], lines)
        yield family


def create_app(
    profile: Profile,
    routes: Path,
    observer: CanaryObserver | None = None,
    *,
    restarted: bool = False,
) -> Starlette:
    """The service for one tenant, with the models that the file `routes` names.

    If it is `restarted`, a request log's folder that can't be used any more costs lines, not
    answers.
    """
    service = _Service(profile, routes, observer, restarted)
    routes_to = [
        Route("/v1/chat/completions", service.complete, methods=["POST"]),
        Route("/v1/models", service.models),
        Route("/health", service.health),
        Route("/metrics", service.metrics),
    ]
    if profile.serve.try_page != "none":
        routes_to += [
            Route("/", service.try_page),
            Route("/try", service.try_settings),
            Route("/try", service.try_arm, methods=["POST"]),
        ]
    return Starlette(
        routes=routes_to,
        exception_handlers={RefusedError: service.refuse, ClientDisconnect: _hang_up},
        lifespan=service.lifespan,
    )


class _Service:
    _handler: RequestHandler
    _try: TryPage
    """These two from the lifespan's start."""

    def __init__(
        self, profile: Profile, routes: Path, observer: CanaryObserver | None, restarted: bool
    ) -> None:
        self._profile, self._config, self._observer = profile, profile.serve, observer
        self._recipe = get_recipe(profile.recipe)
        self._names = (profile.model_name, CHAMPION)
        self._keys = _keys_of(self._config)
        self._table, self._metrics = RouteTable(routes), Metrics()
        self._log: RequestLogWriter | None = None
        allowed = {self._config.consent_of(client) for client in self._keys or ("",)}
        if (folder := self._config.request_log.folder) and allowed != {"none"}:
            self._log = RequestLogWriter(Path(folder), profile, must_work=not restarted)
            self._metrics.registry.register(LogLines(self._log.outcomes))

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        models, lag = ModelClient(self._profile), EventLoopLag()
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

    async def complete(self, http: Request) -> Response:
        arrived = time.perf_counter()
        client = self._authorise(http)
        request = await self._read(http, RouterRequest)
        if request.model not in self._names:
            known = " and ".join(self._names)
            raise RefusedError(
                404, f"The model `{request.model}` does not exist; there are {known}"
            )
        question = request.question(self._profile.tenant.id, self._recipe.INPUTS)
        served = await self._handler.answer(question, arrived)
        keep = self._log is not None and self._log.may_keep(
            client, http.headers.get(CONSENT_HEADER)
        )
        asyncio.get_running_loop().call_soon(
            self._record, served, question, client if keep else None
        )
        return self._response(served, question, request)

    async def try_page(self, _http: Request) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def try_settings(self, http: Request) -> Response:
        self._authorise(http)
        return JSONResponse(await self._try.settings())

    async def try_arm(self, http: Request) -> Response:
        self._authorise(http)
        request = await self._read(http, TryRequest)
        if request.arm not in self._try.arms:
            raise RefusedError(
                400, f"arm: there is no `{request.arm}` here, but {', '.join(self._try.arms)}"
            )
        question = request.question(self._profile.tenant.id, self._recipe.INPUTS)
        return JSONResponse(
            await self._try.ask(request.arm, question, self._handler.unfit_reason(question))
        )

    async def models(self, http: Request) -> Response:
        self._authorise(http)
        return JSONResponse(model_list(self._names))

    async def health(self, _http: Request) -> Response:
        """Which models are in service; 200 as long as this process can answer at all, by its
        fallback if need be."""
        routes = self._table.routes
        health = {
            "status": "ok" if self._is_serving() else "degraded",
            "tenant": self._profile.tenant.id,
            "champion": self._state(routes.champion),
            "challenger": self._state(routes.challenger),
            "share": routes.share,
            "request_log": self._log and ("failing" if self._log.is_failing else "ok"),
        }
        if not self._keys:  # with a key set, a client without it gets no details
            health |= {
                "challenger_dropped": self._table.dropped_reason,
                "problem": self._table.problem,
            }
        return JSONResponse(health)

    async def metrics(self, http: Request) -> Response:
        self._authorise(http)
        return Response(
            generate_latest(self._metrics.registry),
            media_type="text/plain; version=0.0.4; charset=utf-8",
        )

    async def refuse(self, _http: Request, error: Exception) -> Response:
        status, said = (
            (error.status_code, error.detail)
            if isinstance(error, RefusedError)
            else (500, str(error))
        )
        self._metrics.refused.labels(str(status)).inc()
        # What is left of the request stays unread, so nothing more can come on this connection.
        closing = {"connection": "close"} if status in (401, 408, 413) else None
        return JSONResponse(error_body(status, said), status, closing)

    def _authorise(self, http: Request) -> str:
        """The client's name; empty where no key is needed, though not for another site's page in a
        browser."""
        if not self._keys:
            own = (None, "localhost", "127.0.0.1", "::1", self._config.host)
            if (
                http.url.hostname not in own
            ):  # another site's name may be given this machine's address
                raise RefusedError(
                    403, f"a router without keys is asked as localhost, not as {http.url.hostname}"
                )
            if (origin := http.headers.get("origin")) and origin.partition("://")[
                2
            ] != http.headers.get("host"):
                raise RefusedError(
                    403, "a page from elsewhere may ask nothing of a router without keys"
                )
            return ""
        kind, _, given = http.headers.get("authorization", "").partition(" ")
        # Each key is compared, so that the time does not say which one is nearest.
        names = [
            name
            for name, key in self._keys.items()
            if hmac.compare_digest(given.strip().encode(), key)
        ]
        if not names or kind.lower() != "bearer":
            raise RefusedError(401, "wrong key: send the header `authorization: Bearer KEY`")
        return names[0]

    async def _read(self, http: Request, kind: type[Asked]) -> Asked:
        limit, body = self._config.max_body_bytes, bytearray()
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                async for chunk in http.stream():
                    body += chunk
                    if len(body) > limit:
                        raise RefusedError(413, f"the body has more than {limit} bytes")
            return kind.model_validate_json(body)
        except TimeoutError:
            raise RefusedError(
                408, f"the body did not come in within {BODY_WITHIN_S:g} s"
            ) from None
        except ValidationError as error:
            raise RefusedError(400, first_flaw(error)) from None

    def _record(self, served: ServedAnswer, question: Row, log_for: str | None) -> None:
        self._metrics.answered(served)
        if log_for is not None and self._log:
            self._log.put(served, question, log_for)
        if self._observer:
            try:
                self._observer.on_served(served, question)
            except Exception as error:  # noqa: BLE001 (the observer's mistake must not affect the next request)
                _LOG.error(
                    "the canary's observer did not take an answer: %s", describe_without_text(error)
                )

    def _response(self, served: ServedAnswer, question: Row, request: RouterRequest) -> Response:
        details = {
            name: getattr(served, name) or None
            for name in ("source", "reason", "role", "version", "row_id")
        }
        headers = {
            f"x-qinglan-{name.replace('_', '-')}": value for name, value in details.items() if value
        }
        text = self._recipe.fallback(question) if served.answer is None else served.answer
        if text is None:
            # The recipe has no fallback: an unfit question is an error of the client, all else may
            # pass.
            status, problem = 503, "the model gave no usable answer in time"
            if served.reason in UNFIT:
                status, problem = 400, "the question is not fit for the model"
            return JSONResponse(
                error_body(status, f"{problem}: {served.reason}", served.reason), status, headers
            )
        stream = bool(request.stream)
        message = {"role": "assistant", "content": text} | ({} if stream else {"refusal": None})
        identity = f"{served.row_id}{time.time_ns():x}"
        body = completion_body(identity, int(served.at), request.model, message, is_chunk=stream)
        if not stream:
            return JSONResponse(body | {"usage": served.usage, "qinglan": details}, headers=headers)
        chunks = [body | {"qinglan": details}]  # the whole text is one
        if request.stream_options and request.stream_options.include_usage:
            chunks.append(body | {"choices": [], "usage": served.usage})
        events = [*(json.dumps(chunk, ensure_ascii=False) for chunk in chunks), "[DONE]"]
        return Response(
            "".join(f"data: {each}\n\n" for each in events), 200, headers, "text/event-stream"
        )

    def _add_gauges(self) -> None:
        def add(name: str, what: str, value: Callable[[], float]) -> None:
            Gauge(f"{_PREFIX}_{name}", what, registry=self._metrics.registry).set_function(value)

        table, handler = self._table, self._handler
        add("in_flight", "Requests that wait for a model", lambda: handler.in_flight)
        add("canary_share", "Of the requests, meant for the challenger", lambda: table.routes.share)
        add("serving", "1 while a model answers, 0 while none does", self._is_serving)
        for role in get_args(ModelRole):
            is_open = partial(lambda name: handler.is_open(getattr(table.routes, name)), role)
            add(f"{role}_circuit_open", f"1 while the {role} gets no requests", is_open)

    def _is_serving(self) -> bool:
        champion = self._table.routes.champion
        return champion is not None and not self._handler.is_open(champion)

    def _state(self, backend: Backend | None) -> dict[str, Any] | None:
        if backend is None:
            return None
        return {
            "version": backend.version,
            "circuit": "open" if self._handler.is_open(backend) else "closed",
        }


async def _hang_up(_http: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


def _keys_of(config: Serve) -> dict[str, bytes]:
    keys: dict[str, bytes] = {}
    for name, key in config.clients.items():
        used_by = f"serve.api_keys.{name}" if name in config.api_keys else "serve.api_key_env"
        secret = require_secret(key.key_env, used_by).encode()
        if same := [other for other, known in keys.items() if known == secret]:
            raise ConfigError(f"{used_by}: has the same key as {same[0]}; give each client its own")
        keys[name] = secret
    return keys


async def _observe(observer: CanaryObserver, table: RouteTable, models: ModelClient) -> None:
    try:
        await observer.run(table, models)
    except Exception as error:  # noqa: BLE001 (the router goes on without it)
        _LOG.error("the canary's observer stopped: %s", describe_without_text(error))


def main() -> int:
    """Serve until SIGTERM or SIGINT; requests that came in before are answered."""
    options = _parse()
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
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, lifespan="on", server_header=False,
        http=cast(type[asyncio.Protocol], partial(ClientConnection, Connections(profile.serve.max_connections))),
        backlog=backlog, timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(profile.serve.deadline_ms / 1000) + _LAST_ANSWERS_S,
    )  # fmt: skip
    # What is loaded by now stays: looking through it for garbage again and again would hold
    # requests up.
    gc.collect()
    gc.freeze()
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"{router_url(host, port)}\n")
    sys.stdout.flush()
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _parse() -> argparse.Namespace:
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


def _listen(host: str, port: int, backlog: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        # With the protocol's number asyncio switches Nagle's algorithm off, which costs 40 ms a
        # request.
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
