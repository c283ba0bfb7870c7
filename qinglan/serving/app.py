"""The router's HTTP side: OpenAI's chat completions in front, health and metrics beside them.

Whoever asks a question gets HTTP 200 and a text, where the recipe has a fallback for a model that fails. Where it has
none, a failure is an HTTP 503 that says why. Other errors are for requests that hold no question.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from qinglan.config import Profile, require_secret
from qinglan.recipes import get_recipe
from qinglan.rows import Row
from qinglan.serving import wire
from qinglan.serving.event_loop_lag import EventLoopLag
from qinglan.serving.metrics import Metrics
from qinglan.serving.models import Models
from qinglan.serving.records import Observer, Served, Source
from qinglan.serving.request_log import CONSENT_HEADER, RequestLog
from qinglan.serving.rewriter import UNFIT, Rewriter
from qinglan.serving.route_table import RouteTable
from qinglan.serving.routes import Backend
from qinglan.serving.trace import where

BODY_WITHIN_S = 10.0
"""For a request's body to come in."""
_LOG = logging.getLogger(__name__)


def create_app(
    profile: Profile, routes: Path, observers: Sequence[Observer] = (), *, restarted: bool = False
) -> Starlette:
    """The service for one tenant, with the models that the file `routes` names.

    Args:
        restarted: it served before, so a request log's folder that can't be used any more costs lines, not answers.

    Raises:
        ConfigError: the key's environment variable is not set, or the request log's folder can't be used.
    """
    service = _Service(profile, routes, observers, restarted)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", service.complete, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
        ],
        exception_handlers={wire.RefusedError: service.refuse},
        lifespan=service.lifespan,
    )


class _Service:
    def __init__(self, profile: Profile, routes: Path, observers: Sequence[Observer], restarted: bool) -> None:
        self._profile, self._config, self._observers = profile, profile.serve, observers
        self._recipe = get_recipe(profile.recipe)
        self._names = (profile.model_name, wire.CHAMPION)
        variable = self._config.api_key_env
        self._key = require_secret(variable, "serve.api_key_env").encode() if variable else None
        self._table, self._metrics = RouteTable(routes), Metrics()
        self._log: RequestLog | None = None
        if (folder := self._config.request_log.folder) and self._config.request_log.consent != "none":
            self._log = RequestLog(Path(folder), profile, must_work=not restarted)
            self._metrics.watch_log(self._log.outcomes)
        self._rewriter: Rewriter | None = None

    @asynccontextmanager
    async def lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """What lives as long as the event loop: connections, the log's thread, the observers."""
        models, pulse = Models(self._profile), EventLoopLag()
        self._rewriter = Rewriter(self._config, self._table, models, pulse.lag_s)
        self._watch(self._rewriter)
        tasks = [asyncio.create_task(_run(observer, self._table, models)) for observer in self._observers]
        tasks.append(asyncio.create_task(pulse.run()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await models.close()
            if self._log:
                await asyncio.to_thread(self._log.close)

    async def complete(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        arrived = time.perf_counter()
        self._authorise(request)
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        asked = wire.read_request(body)
        if asked.model not in self._names:
            raise wire.RefusedError(
                404, f"The model `{asked.model}` does not exist; there are {' and '.join(self._names)}"
            )
        question = asked.question(self._profile.tenant.id, self._recipe.INPUTS)
        try:
            served = await self._ready.answer(question, arrived)
            answer = self._response(served, question, asked)
            keep = self._log is not None and self._log.may_keep(request.headers.get(CONSENT_HEADER))
        except Exception as error:  # noqa: BLE001 (whoever asked needs an answer)
            _LOG.error("answered without the model: %s", where(error))
            served, keep = self._unanswered(question, arrived), False
            answer = self._response(served, question, asked)
        asyncio.get_running_loop().call_soon(self._tell, served, question, keep)
        return answer

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._authorise(request)
        return Response(wire.model_list(list(self._names)), media_type="application/json")

    async def health(self, _request: Request) -> Response:
        """Who is in service; 200 as long as this process can answer at all, by its fallback if need be."""
        routes = self._table.routes
        told = {
            "status": "ok" if self._is_serving(routes.champion) else "degraded",
            "tenant": self._profile.tenant.id,
            "champion": self._state(routes.champion),
            "challenger": self._state(routes.challenger),
            "share": routes.share,
            "request_log": self._log and ("failing" if self._log.is_failing else "ok"),
        }
        if self._key is None:  # with a key, those who have none are told no details
            told |= {"challenger_dropped": self._table.dropped_reason, "problem": self._table.problem}
        return JSONResponse(told)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        self._authorise(request)
        return Response(self._metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def refuse(self, _request: Request, error: Exception) -> Response:
        """An error as OpenAI shapes it."""
        status = error.status if isinstance(error, wire.RefusedError) else 500
        self._metrics.refused(status)
        # What is left of the request stays unread, so nothing more can come on this connection.
        headers = {"connection": "close"} if status in (401, 408, 413) else None
        return Response(wire.error_body(status, str(error)), status, headers, "application/json")

    @property
    def _ready(self) -> Rewriter:
        if self._rewriter is None:
            raise RuntimeError("the app answers only between its lifespan's start and end")
        return self._rewriter

    def _authorise(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if not hmac.compare_digest(key.strip().encode(), self._key) or kind.lower() != "bearer":
            raise wire.RefusedError(401, "wrong key: send the header `authorization: Bearer KEY`")

    async def _body(self, request: Request) -> bytes:
        limit, chunks, size = self._config.max_body_bytes, [], 0
        try:
            async with asyncio.timeout(BODY_WITHIN_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        raise wire.RefusedError(413, f"the body has more than {limit} bytes")
                    chunks.append(chunk)
        except TimeoutError:
            raise wire.RefusedError(408, f"the body did not come in within {BODY_WITHIN_S:g} s") from None
        return b"".join(chunks)

    def _tell(self, served: Served, question: Row, keep: bool) -> None:
        """Everyone who wants to know, once the answer is on its way."""
        self._metrics.answered(served)
        if keep and self._log:
            self._log.put(served, question)
        for observer in self._observers:
            try:
                observer.on_served(served, question)
            except Exception as error:  # noqa: BLE001 (an observer's mistake is not the next request's)
                _LOG.error("%s did not take an answer: %s", type(observer).__name__, where(error))

    def _response(self, served: Served, question: Row, asked: wire.ChatRequest) -> Response:
        text = self._recipe.fallback(question) if served.answer is None else served.answer
        if text is None:
            return _missing(served)
        if asked.stream:
            events = wire.event_stream(served, text, asked.model)
            return Response(events, headers=wire.headers(served), media_type="text/event-stream")
        answer = wire.completion(served, text, asked.model)
        return Response(answer, headers=wire.headers(served), media_type="application/json")

    def _unanswered(self, question: Row, arrived: float) -> Served:
        latency_ms = 1000 * (time.perf_counter() - arrived)
        source: Source = "none" if self._recipe.fallback(question) is None else "fallback"
        return Served(time.time(), "none", "", source, "internal_error", latency_ms, question.id)

    def _watch(self, rewriter: Rewriter) -> None:
        def is_open(backend: Backend | None) -> float:
            return float(backend is not None and rewriter.is_open(backend))

        table, watch = self._table, self._metrics.watch
        watch("in_flight", "Requests that wait for a model", lambda: rewriter.in_flight)
        watch("canary_share", "Of the requests, meant for the challenger", lambda: table.routes.share)
        watch("serving", "1 while a model answers, 0 while none does",
              lambda: self._is_serving(table.routes.champion))  # fmt: skip
        watch("champion_circuit_open", "1 while the champion is left alone", lambda: is_open(table.routes.champion))
        watch(
            "challenger_circuit_open", "1 while the challenger is left alone", lambda: is_open(table.routes.challenger)
        )

    def _is_serving(self, champion: Backend | None) -> bool:
        return champion is not None and not self._ready.is_open(champion)

    def _state(self, backend: Backend | None) -> dict[str, Any] | None:
        if backend is None:
            return None
        return {"version": backend.version, "circuit": "open" if self._ready.is_open(backend) else "closed"}


async def _run(observer: Observer, table: RouteTable, models: Models) -> None:
    try:
        await observer.run(table, models)
    except Exception as error:  # noqa: BLE001 (answers go on without it)
        _LOG.error("%s stopped: %s", type(observer).__name__, where(error))


def _missing(served: Served) -> Response:
    """For recipes without a fallback: an unfit question is the caller's matter, all else passes."""
    status = 400 if served.reason in UNFIT else 503
    message = "the question is not fit for the model" if status == 400 else "the model gave no usable answer in time"
    body = wire.error_body(status, f"{message}: {served.reason}", served.reason)
    return Response(body, status, wire.headers(served), "application/json")
