"""The router's HTTP side: OpenAI's chat completions, health and metrics.

A question is answered with HTTP 200 and a text, where the recipe has a fallback for a model that fails. Where it has
none, a failure is an HTTP 503 that says why. Other errors are for requests that hold no question.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qinglan.clients.openai_protocol import error_body, first_problem, model_list
from qinglan.config import Profile, require_secret
from qinglan.recipes import get_recipe
from qinglan.rows import Row
from qinglan.serving.canary_observer import CanaryObserver
from qinglan.serving.metrics import LogLines, Metrics
from qinglan.serving.model_client import ModelClient
from qinglan.serving.openai_api import (
    CHAMPION,
    RefusedError,
    RouterRequest,
    answer_body,
    details_of,
    to_json,
)
from qinglan.serving.request_handler import (
    UNFIT,
    EventLoopLag,
    RequestHandler,
    ServedAnswer,
    Source,
    describe_without_text,
)
from qinglan.serving.request_log import CONSENT_HEADER, RequestLogWriter
from qinglan.serving.routes import Backend, RouteTable

BODY_WITHIN_S = 10.0
"""For a request's body to come in."""
_LOG = logging.getLogger(__name__)


def create_app(
    profile: Profile, routes: Path, observer: CanaryObserver | None = None, *, restarted: bool = False
) -> Starlette:
    """The service for one tenant, with the models that the file `routes` names.

    If it is `restarted`, a request log's folder that can't be used any more costs lines, not answers.
    """
    service = _Service(profile, routes, observer, restarted)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", service.complete, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        exception_handlers={RefusedError: service.refuse},
        lifespan=service.lifespan,
    )


class _Service:
    _handler: RequestHandler
    """From the lifespan's start."""

    def __init__(self, profile: Profile, routes: Path, observer: CanaryObserver | None, restarted: bool) -> None:
        self._profile, self._config, self._observer = profile, profile.serve, observer
        self._recipe = get_recipe(profile.recipe)
        self._names = (profile.model_name, CHAMPION)
        variable = self._config.api_key_env
        self._key = require_secret(variable, "serve.api_key_env").encode() if variable else None
        self._table, self._metrics = RouteTable(routes), Metrics()
        self._log: RequestLogWriter | None = None
        if (folder := self._config.request_log.folder) and self._config.request_log.consent != "none":
            self._log = RequestLogWriter(Path(folder), profile, must_work=not restarted)
            self._metrics.registry.register(LogLines(self._log.outcomes))

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        models, lag = ModelClient(self._profile), EventLoopLag()
        self._handler = RequestHandler(self._config, self._table, models, lag.lag_s)
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
            await models.close()
            if self._log:
                await asyncio.to_thread(self._log.close)

    async def complete(self, http: Request) -> Response:
        arrived = time.perf_counter()
        self._authorise(http)
        try:
            request = RouterRequest.model_validate_json(await self._body(http))
        except ValidationError as error:
            raise RefusedError(400, first_problem(error)) from None
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        if request.model not in self._names:
            known = " and ".join(self._names)
            raise RefusedError(404, f"The model `{request.model}` does not exist; there are {known}")
        question = request.question(self._profile.tenant.id, self._recipe.INPUTS)
        try:
            served = await self._handler.answer(question, arrived)
            answer = self._response(served, question, request)
            keep = self._log is not None and self._log.may_keep(http.headers.get(CONSENT_HEADER))
        except Exception as error:  # noqa: BLE001 (the client needs an answer)
            _LOG.error("answered without the model: %s", describe_without_text(error))
            latency_ms = 1000 * (time.perf_counter() - arrived)
            source: Source = "none" if self._recipe.fallback(question) is None else "fallback"
            served = ServedAnswer(time.time(), "none", "", source, "internal_error", latency_ms, question.id)
            keep = False
            answer = self._response(served, question, request)
        asyncio.get_running_loop().call_soon(self._record, served, question, keep)
        return answer

    async def models(self, http: Request) -> Response:
        self._authorise(http)
        return Response(to_json(model_list(self._names)), media_type="application/json")

    async def health(self, _http: Request) -> Response:
        """Which models are in service; 200 as long as this process can answer at all, by its fallback if need be."""
        routes = self._table.routes
        health = {
            "status": "ok" if self._is_serving() else "degraded",
            "tenant": self._profile.tenant.id,
            "champion": self._state(routes.champion),
            "challenger": self._state(routes.challenger),
            "share": routes.share,
            "request_log": self._log and ("failing" if self._log.is_failing else "ok"),
        }
        if self._key is None:  # with a key set, a client without it gets no details
            health |= {"challenger_dropped": self._table.dropped_reason, "problem": self._table.problem}
        return JSONResponse(health)

    async def metrics(self, http: Request) -> Response:
        self._authorise(http)
        return Response(generate_latest(self._metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def refuse(self, _http: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, RefusedError) else 500
        self._metrics.refused.labels(str(status)).inc()
        # What is left of the request stays unread, so nothing more can come on this connection.
        closing = {"connection": "close"} if status in (401, 408, 413) else None
        return Response(to_json(error_body(status, str(error))), status, closing, "application/json")

    def _authorise(self, http: Request) -> None:
        if self._key is None:
            return
        kind, _, key = http.headers.get("authorization", "").partition(" ")
        if not hmac.compare_digest(key.strip().encode(), self._key) or kind.lower() != "bearer":
            raise RefusedError(401, "wrong key: send the header `authorization: Bearer KEY`")

    async def _body(self, http: Request) -> bytes:
        limit, chunks, size = self._config.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                async for chunk in http.stream():
                    size += len(chunk)
                    if size > limit:
                        raise RefusedError(413, f"the body has more than {limit} bytes")
                    chunks.append(chunk)
        except TimeoutError:
            raise RefusedError(408, f"the body did not come in within {BODY_WITHIN_S:g} s") from None
        return b"".join(chunks)

    def _record(self, served: ServedAnswer, question: Row, keep: bool) -> None:
        self._metrics.answered(served)
        if keep and self._log:
            self._log.put(served, question)
        if self._observer:
            try:
                self._observer.on_served(served, question)
            except Exception as error:  # noqa: BLE001 (the observer's mistake must not affect the next request)
                _LOG.error("the canary's observer did not take an answer: %s", describe_without_text(error))

    def _response(self, served: ServedAnswer, question: Row, request: RouterRequest) -> Response:
        details = details_of(served).items()
        headers = {f"x-qinglan-{name.replace('_', '-')}": value for name, value in details if value}
        text = self._recipe.fallback(question) if served.answer is None else served.answer
        if text is not None:
            media_type = "text/event-stream" if request.stream else "application/json"
            return Response(answer_body(served, text, request), headers=headers, media_type=media_type)
        # The recipe has no fallback: an unfit question is an error of the client, all else may pass.
        status, problem = 503, "the model gave no usable answer in time"
        if served.reason in UNFIT:
            status, problem = 400, "the question is not fit for the model"
        body = to_json(error_body(status, f"{problem}: {served.reason}", served.reason))
        return Response(body, status, headers, "application/json")

    def _add_gauges(self) -> None:
        table, handler, add = self._table, self._handler, self._metrics.add_gauge
        add("in_flight", "Requests that wait for a model", lambda: handler.in_flight)
        add("canary_share", "Of the requests, meant for the challenger", lambda: table.routes.share)
        add("serving", "1 while a model answers, 0 while none does", self._is_serving)
        add(
            "champion_circuit_open",
            "1 while the champion gets no requests",
            lambda: handler.is_open(table.routes.champion),
        )
        about = "1 while the challenger gets no requests"
        add("challenger_circuit_open", about, lambda: handler.is_open(table.routes.challenger))

    def _is_serving(self) -> bool:
        champion = self._table.routes.champion
        return champion is not None and not self._handler.is_open(champion)

    def _state(self, backend: Backend | None) -> dict[str, Any] | None:
        if backend is None:
            return None
        return {"version": backend.version, "circuit": "open" if self._handler.is_open(backend) else "closed"}


async def _observe(observer: CanaryObserver, table: RouteTable, models: ModelClient) -> None:
    try:
        await observer.run(table, models)
    except Exception as error:  # noqa: BLE001 (the router goes on without it)
        _LOG.error("the canary's observer stopped: %s", describe_without_text(error))
