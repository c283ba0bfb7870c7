"""Gets a question answered before the deadline, by a model or with the reason why by none.

The models' servers are asked with the same prompts as in training, greedily, over connections that
stay open.
"""

import asyncio
import json
import logging
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import aiohttp

from qinglan.clients.limits import CircuitBreaker
from qinglan.config import Profile, Serve
from qinglan.errors import ModelError, TeacherError
from qinglan.recipes import get_recipe
from qinglan.rows import Row, normalise
from qinglan.serving.routes import Backend, RouteTable

CIRCUIT_FAILURES = 5
CIRCUIT_OPEN_FOR_S = 1.0
LAG_EVERY_S = 0.02
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}
UNFIT = ("query_too_long", "context_too_long", "empty_query")
"""Reasons that lie in the question."""
_RESERVE_S = 0.02
"""Time before the deadline that is left for what there is to do once a model is given up; a tenth
of the deadline at most."""
_MOST_CIRCUITS = 16
_KEEP_ALIVE_S = 3.0
"""Time that a connection to a model may lie idle.

It is less than the 5 s after which uvicorn, and with it vLLM and ms-swift, closes one.
"""
# Statuses below 500 that are the fault of the server or of its settings, not of the question.
_SERVER_FAULTS = (401, 403, 404, 408, 429)
_LOG = logging.getLogger(__name__)

ServedRole = Literal["champion", "challenger", "none"]
Source = Literal["model", "fallback", "none"]
"""Origin of the answer's text: the model, in its place the recipe's fallback, or none where the
recipe has none."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    at: float
    role: ServedRole
    """The model that the request was meant for, even if it failed; `none` where there was none to
    ask."""
    version: str
    source: Source
    reason: str
    """Why the answer was not the model's; empty where it was."""
    latency_ms: float
    row_id: str
    answer: str | None = None
    """The model's text, if that was the answer."""
    usage: dict[str, int] | None = None
    """The tokens of the prompt and of the answer, as the model's server counts them; None where it
    does not."""


class ModelAnswer(NamedTuple):
    text: str
    usage: dict[str, int] | None


class ModelClient:
    """Asks the models' servers; it belongs to one event loop."""

    def __init__(self, profile: Profile) -> None:
        self.recipe = get_recipe(profile.recipe)
        self._tenant = profile.tenant
        self._max_chars = profile.serve.max_answer_chars
        self._max_tokens = profile.student.max_new_tokens
        # Whoever asks has limited the requests before they get here, and limits their time.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.close = self._session.close

    async def answer(self, backend: Backend, question: Row, within_s: float) -> ModelAnswer:
        """The model's answer, fit to be used.

        Raises:
            ModelError: there is none; it is transient where the server is at fault.
        """
        try:
            async with asyncio.timeout(within_s):
                answer = await self._ask(backend, question)
        except TimeoutError:
            raise ModelError(
                f"{backend.url}: no answer in time", "model_timeout", transient=True
            ) from None
        return ModelAnswer(self._parse(answer.text), answer.usage)

    async def _ask(self, backend: Backend, question: Row) -> ModelAnswer:
        body = {
            "model": backend.model,
            "messages": self.recipe.student_messages(question, self._tenant),
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        data = json.dumps(body, ensure_ascii=False).encode()
        try:
            status, content = await self._post_twice(backend, data)
        except (aiohttp.ClientError, OSError) as error:
            raise ModelError(
                f"{backend.url}: {error}", "model_unreachable", transient=True
            ) from error
        if status != 200:
            is_at_fault = status >= 500 or status in _SERVER_FAULTS
            raise ModelError(
                f"{backend.url}: HTTP status {status}", "model_error", transient=is_at_fault
            )
        return _read(content, backend)

    async def _post_twice(self, backend: Backend, data: bytes) -> tuple[int, bytes]:
        """Post once more where a connection that was kept turns out to be closed by a restart."""
        try:
            return await self._post(backend, data)
        except aiohttp.ClientConnectorError:
            # No connection could be opened: the server is not there.
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._post(backend, data)

    async def _post(self, backend: Backend, data: bytes) -> tuple[int, bytes]:
        url = f"{backend.url}/chat/completions"
        headers = {"content-type": "application/json"}
        async with self._session.post(
            url, data=data, headers=headers, allow_redirects=False
        ) as response:
            return response.status, await response.read()

    def _parse(self, text: str) -> str:
        """The answer in a model's text; raises `ModelError` where it can't be used."""
        try:
            answer = self.recipe.parse_answer(text)
        except TeacherError as error:
            raise ModelError(str(error), error.reason) from error
        try:
            # JSON can hold half of a character, UTF-8 can't.
            answer.encode()
        except UnicodeEncodeError as error:
            raise ModelError("the answer is no valid Unicode", "invalid_text") from error
        self.recipe.grader.require_servable(answer, self._max_chars)
        return answer


def _read(content: bytes, backend: Backend) -> ModelAnswer:
    """Read a chat completion; raises `ModelError` where it is none, or was cut."""
    try:
        body: Any = json.loads(content)
        choice = body["choices"][0]
        text = choice["message"]["content"]
        finish_reason = choice.get("finish_reason")
        counts = body.get("usage") or {}
        usage = None
        if counts.keys() >= USAGE:
            usage = {name: int(counts[name]) for name in USAGE}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{backend.url}: the answer is no chat completion", "model_error", transient=True
        ) from error
    if finish_reason == "length":
        raise ModelError("the answer was cut at student.max_new_tokens", "truncated")
    return ModelAnswer(text if isinstance(text, str) else "", usage)


class EventLoopLag:
    """Measures how far the event loop is behind.

    A request may have waited that long before this process saw it. If that did not count, a process
    that gets too little of the CPU would give each request its whole deadline, and fall behind.
    """

    _due_s = float("inf")

    async def run(self) -> None:
        while True:
            self._due_s = time.perf_counter() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)

    def lag_s(self) -> float:
        return max(0.0, time.perf_counter() - self._due_s)


class RequestHandler:
    """Answers questions, with a circuit breaker for each model's server."""

    def __init__(
        self, config: Serve, table: RouteTable, models: ModelClient, lag_s: Callable[[], float]
    ) -> None:
        self._config = config
        self._table = table
        self._models = models
        self._lag_s = lag_s
        deadline_s = config.deadline_ms / 1000
        self._allowed_s = deadline_s - min(_RESERVE_S, deadline_s / 10)
        self._circuits: dict[Backend, CircuitBreaker] = {}
        self.in_flight = 0

    async def answer(self, question: Row, arrived_s: float) -> ServedAnswer:
        """The answer before the deadline; a model's failure becomes a reason.

        Args:
            arrived_s: when the request came, by `time.perf_counter`.
        """
        give_up_s = arrived_s - self._lag_s() + self._allowed_s
        role: ServedRole = "none"
        version = ""
        answer: ModelAnswer | None = None
        reason = ""
        try:
            if self.in_flight >= self._config.max_in_flight or give_up_s <= time.perf_counter():
                raise ModelError("too many are asked", "overloaded")
            unfit_reason = self.unfit_reason(question)
            if unfit_reason:
                raise ModelError("no model may be asked this", unfit_reason)
            route = self._table.pick(question.id)
            if route is None:
                raise ModelError("no model is in service", "no_model")
            role, backend = route
            version = backend.version
            answer = await self._ask(backend, question, give_up_s)
        except ModelError as error:
            reason = error.reason
        except Exception as error:  # noqa: BLE001 (the client needs an answer)
            _LOG.error("answered without the model: %s", describe_without_text(error))
            reason = "internal_error"
        source: Source
        if answer is not None:
            source = "model"
        elif self._models.recipe.fallback(question) is not None:
            source = "fallback"
        else:
            source = "none"
        latency_ms = 1000 * (time.perf_counter() - arrived_s)
        return ServedAnswer(
            at=time.time(),
            role=role,
            version=version,
            source=source,
            reason=reason,
            latency_ms=latency_ms,
            row_id=question.id,
            answer=answer.text if answer else None,
            usage=answer.usage if answer else None,
        )

    def is_open(self, backend: Backend | None) -> bool:
        """Tell whether a model gets no requests because it failed too often."""
        return backend in self._circuits and self._circuits[backend].is_open

    def unfit_reason(self, question: Row) -> str:
        """One of `UNFIT`; empty where the question may be put to a model."""
        if len(question.query) > self._config.max_query_chars:
            return "query_too_long"
        context = (question.profile, question.history, *question.inputs.values())
        if sum(map(len, context)) > self._config.max_context_chars:
            return "context_too_long"
        return "" if normalise(question.query) else "empty_query"

    async def _ask(self, backend: Backend, question: Row, give_up_s: float) -> ModelAnswer:
        circuit = self._circuit(backend)
        if circuit.wait_s():
            raise ModelError(f"{backend.url}: failed too often of late", "circuit_open")
        left_s = give_up_s - time.perf_counter()
        circuit.sent(left_s)
        self.in_flight += 1
        try:
            answer = await self._models.answer(backend, question, left_s)
        except ModelError as error:
            if error.transient:
                circuit.failed()
            else:
                # Its server works; what its model wrote can't be used.
                circuit.answered()
            raise
        finally:
            self.in_flight -= 1
        circuit.answered()
        return answer

    def _circuit(self, backend: Backend) -> CircuitBreaker:
        if backend not in self._circuits:
            # Models come and go for months; the oldest circuit belongs to one that has gone.
            while len(self._circuits) >= _MOST_CIRCUITS:
                oldest = next(iter(self._circuits))
                del self._circuits[oldest]
            self._circuits[backend] = CircuitBreaker(CIRCUIT_FAILURES, CIRCUIT_OPEN_FOR_S)
        return self._circuits[backend]


def describe_without_text(error: BaseException) -> str:
    """The error's kind and the lines of code that it came through.

    Its message is left out, as it may hold what a user asked.
    """
    lines = "".join(traceback.format_tb(error.__traceback__))
    return f"{type(error).__name__}\n{lines}".rstrip()
