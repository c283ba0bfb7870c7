"""From a question to an answer before the deadline: the model's, else the reason why there is none.

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
from qinglan.evaluation.red_team import is_degenerate
from qinglan.grading.leftovers import is_boilerplate
from qinglan.recipes import get_recipe
from qinglan.rows import Row, normalise
from qinglan.serving.routes import Backend, RouteTable

CIRCUIT_FAILURES, CIRCUIT_OPEN_FOR_S = 5, 1.0
LAG_EVERY_S = 0.02
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens"}
UNFIT = ("query_too_long", "context_too_long", "empty_query")
"""Reasons that lie in the question."""
_RESERVE_S = 0.02
"""Of the deadline, a tenth at most: for what is left to do once a model is given up."""
_MOST_CIRCUITS = 16
_KEEP_ALIVE_S = 3.0
"""Less than the 5 s after which uvicorn, and with it vLLM and ms-swift, closes a connection that
lies idle."""
_MOST_REWRITE_CHARS = 200
_LOG = logging.getLogger(__name__)

ServedRole = Literal["champion", "challenger", "none"]
Source = Literal["model", "fallback", "none"]
"""Whose text the answer was: the model's, in its place the recipe's fallback, or none, as the
recipe has none."""


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    at: float
    role: ServedRole
    """The model that the request was meant for, also where it failed; `none` where there was none
    to ask."""
    version: str
    source: Source
    reason: str
    """Why it was not the model's; empty where it was."""
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
    def __init__(self, profile: Profile) -> None:
        self.recipe = get_recipe(profile.recipe)
        self._tenant, self._max_chars = profile.tenant, profile.serve.max_answer_chars
        self._max_tokens = profile.student.max_new_tokens
        # Requests are limited before they get here, and in time by whoever asks.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self.close = self._session.close

    async def answer(self, backend: Backend, question: Row, within_s: float) -> ModelAnswer:
        """The model's answer, fit to be used; a `ModelError` is transient where the server is at
        fault."""
        try:
            async with asyncio.timeout(within_s):
                text, usage = await self._ask(backend, question)
        except TimeoutError:
            raise ModelError(
                f"{backend.url}: no answer in time", "model_timeout", transient=True
            ) from None
        return ModelAnswer(self._usable(text), usage)

    async def _ask(self, backend: Backend, question: Row) -> ModelAnswer:
        body = {
            "model": backend.model,
            "messages": self.recipe.student_messages(question, self._tenant),
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        data = json.dumps(body, ensure_ascii=False).encode()
        try:
            try:
                status, content = await self._post(backend, data)
            except aiohttp.ClientConnectorError:
                raise
            except (
                aiohttp.ServerDisconnectedError,
                aiohttp.ClientOSError,
            ):  # a kept connection, closed by a restart
                status, content = await self._post(backend, data)
        except (aiohttp.ClientError, OSError) as error:
            raise ModelError(
                f"{backend.url}: {error}", "model_unreachable", transient=True
            ) from error
        if status != 200:
            at_fault = status >= 500 or status in (401, 403, 404, 408, 429)
            raise ModelError(
                f"{backend.url}: HTTP status {status}", "model_error", transient=at_fault
            )
        return _read(content, backend)

    async def _post(self, backend: Backend, data: bytes) -> tuple[int, bytes]:
        url, headers = f"{backend.url}/chat/completions", {"content-type": "application/json"}
        async with self._session.post(
            url, data=data, headers=headers, allow_redirects=False
        ) as response:
            return response.status, await response.read()

    def _usable(self, text: str) -> str:
        try:
            answer = self.recipe.parse_answer(text)
        except TeacherError as error:
            raise ModelError(str(error), error.reason) from error
        try:
            answer.encode()  # JSON can hold half of a character, UTF-8 can't
        except UnicodeEncodeError as error:
            raise ModelError("the answer is no valid Unicode", "invalid_text") from error
        if not self.recipe.grader.retrieves:
            if self._max_chars and len(answer) > self._max_chars:
                raise ModelError(f"the answer has {len(answer)} characters", "answer_too_long")
            return answer
        if len(answer) > (self._max_chars or _MOST_REWRITE_CHARS):
            raise ModelError(f"the rewrite has {len(answer)} characters", "rewrite_too_long")
        if is_boilerplate(answer):
            raise ModelError("the answer is no rewrite", "boilerplate")
        if is_degenerate(answer):
            raise ModelError("the rewrite repeats itself", "repetitive_rewrite")
        return answer


def _read(content: bytes, backend: Backend) -> ModelAnswer:
    try:
        body: Any = json.loads(content)
        choice, counted = body["choices"][0], body.get("usage") or {}
        text, ended = choice["message"]["content"], choice.get("finish_reason")
        usage = {name: int(counted[name]) for name in USAGE} if counted.keys() >= USAGE else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{backend.url}: the answer is no chat completion", "model_error", transient=True
        ) from error
    if ended == "length":
        raise ModelError("the answer was cut at student.max_new_tokens", "truncated")
    return ModelAnswer(text if isinstance(text, str) else "", usage)


class EventLoopLag:
    """How far the event loop is behind: for so long may a request have waited before this process
    saw it.

    Without it, a process that gets too little of the CPU would give each request its whole deadline
    and fall behind.
    """

    _due_s = float("inf")

    async def run(self) -> None:
        while True:
            self._due_s = time.perf_counter() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)

    def lag_s(self) -> float:
        return max(0.0, time.perf_counter() - self._due_s)


class RequestHandler:
    def __init__(
        self, config: Serve, table: RouteTable, models: ModelClient, lag_s: Callable[[], float]
    ) -> None:
        self._config, self._table, self._models, self._lag_s = config, table, models, lag_s
        deadline_s = config.deadline_ms / 1000
        self._allowed_s = deadline_s - min(_RESERVE_S, deadline_s / 10)
        self._circuits: dict[Backend, CircuitBreaker] = {}
        self.in_flight = 0

    async def answer(self, question: Row, arrived: float) -> ServedAnswer:
        """The answer before the deadline; a model's failure becomes a reason. `arrived` is by
        `time.perf_counter`."""
        give_up = arrived - self._lag_s() + self._allowed_s
        role: ServedRole = "none"
        version, answer, usage, reason = "", None, None, ""
        try:
            if self.in_flight >= self._config.max_in_flight or give_up <= time.perf_counter():
                raise ModelError("too many are asked", "overloaded")
            if unfit := self.unfit_reason(question):
                raise ModelError("no model may be asked this", unfit)
            if (route := self._table.pick(question.id)) is None:
                raise ModelError("no model is in service", "no_model")
            role, version = route[0], route[1].version
            answer, usage = await self._ask(route[1], question, give_up)
        except ModelError as error:
            reason = error.reason
        except Exception as error:  # noqa: BLE001 (the client needs an answer)
            _LOG.error("answered without the model: %s", describe_without_text(error))
            reason = "internal_error"
        source: Source = "model"
        if answer is None:
            source = "none" if self._models.recipe.fallback(question) is None else "fallback"
        latency_ms = 1000 * (time.perf_counter() - arrived)
        return ServedAnswer(
            time.time(), role, version, source, reason, latency_ms, question.id, answer, usage
        )

    def is_open(self, backend: Backend | None) -> bool:
        return backend in self._circuits and self._circuits[backend].is_open

    def unfit_reason(self, question: Row) -> str:
        """One of `UNFIT`; empty where the question may be put to a model."""
        if len(question.query) > self._config.max_query_chars:
            return "query_too_long"
        context = (question.profile, question.history, *question.inputs.values())
        if sum(map(len, context)) > self._config.max_context_chars:
            return "context_too_long"
        return "" if normalise(question.query) else "empty_query"

    async def _ask(self, backend: Backend, question: Row, give_up: float) -> ModelAnswer:
        if backend not in self._circuits:
            while len(self._circuits) >= _MOST_CIRCUITS:
                del self._circuits[next(iter(self._circuits))]
            self._circuits[backend] = CircuitBreaker(CIRCUIT_FAILURES, CIRCUIT_OPEN_FOR_S)
        circuit = self._circuits[backend]
        if circuit.wait_s():
            raise ModelError(f"{backend.url}: failed too often of late", "circuit_open")
        left_s = give_up - time.perf_counter()
        circuit.sent(left_s)
        self.in_flight += 1
        try:
            answer = await self._models.answer(backend, question, left_s)
        except ModelError as error:
            (circuit.failed if error.transient else circuit.answered)()
            raise
        finally:
            self.in_flight -= 1
        circuit.answered()
        return answer


def describe_without_text(error: BaseException) -> str:
    """The error's kind and the lines of code that it came through; its message may hold what a user
    asked."""
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()
