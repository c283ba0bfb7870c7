"""Asking a teacher or judge over OpenAI chat completions, through the ledger.

The openai package does the transport. Added here: limits that all tasks share, what may still be
spent, and that nothing is paid for twice, not even what is asked again while the first request is
under way.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import httpx2
from pydantic import ValidationError

from qinglan.clients.completions import (
    Account,
    Completion,
    Request,
    empty_reason,
    request_of,
    unanswered,
    usable_text,
)
from qinglan.clients.limits import BodyTooLargeError, CircuitBreaker, Limits, with_retries
from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.clients.service_errors import account_is_empty, read_error
from qinglan.config import Endpoint
from qinglan.errors import ConfigError, TeacherError
from qinglan.ledger import Call
from qinglan.ledger.queue import LedgerQueue
from qinglan.runs.back_off import BackOff
from qinglan.runs.traces import CallSample

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

_LAST_ANSWERS_S = 10.0
_MOST_FAILURES = 20
"""Failures in a row, beside those that were under way at once, after which a service seems away.

More are not risked, as a request that hangs may be paid for.
"""
_TRIAL_EVERY_S = 15.0
_RETRIES_BEFORE_ANSWERS = 50
"""Retries that a client may make before its first answer; each answer allows two more.

That is enough while half of the requests fail. A service that answers one request in twenty opens
no circuit breaker, and would get several requests for every row.
"""
_POLL_S = 0.05
_QUOTA_RETURNS_S = 60.0
"""Some services say of the tokens per minute that the quota is spent."""
_SHOWN_CHARS = 200
_LOG = logging.getLogger(__name__)
_BACK_OFF = BackOff(0.5, 30.0, jitter=True)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A parsed answer, and the call that it comes from."""

    value: T
    request_hash: str
    cached: bool
    cost_usd: float
    latency_ms: float | None
    """None where the batch API brought it."""
    reasoning: str | None = None
    """The chain of thought, where the service gives it beside the answer."""


class _Means:
    """Tokens and cost of the last hundred calls or so, from which the next ones are estimated."""

    def __init__(self, tokens: float) -> None:
        """`tokens` is the guess before the first call."""
        self.calls = 0
        self.tokens = tokens
        self.cost_usd = 0.0

    def add(self, tokens: int, cost_usd: float) -> None:
        self.calls += 1
        weight = 0.01 if self.calls > 1 else 1.0
        self.tokens += weight * (tokens - self.tokens)
        self.cost_usd += weight * (cost_usd - self.cost_usd)


class ChatClient:
    """One role's client: limits, ledger, failure reasons. Belongs to one event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        base_url: str,
        account: Account,
        ledger: LedgerQueue,
        *,
        key_salt: str = "",
        traced: CallSample | None = None,
    ) -> None:
        """`key_salt` separates services that answer differently under one model name; `traced`
        notes what is sent."""
        from qinglan.clients.transport import openai_client

        self._endpoint = endpoint
        self._account = account
        self._ledger = ledger
        self._key_salt = key_salt
        self._traced = traced or CallSample(0)
        self._limits = Limits(
            endpoint.concurrency, endpoint.requests_per_minute, endpoint.tokens_per_minute
        )
        # Of a killed process, what is in here may be lost: requests built ahead, so that a free
        # place is taken at once, those under way, and answers that are being committed.
        self._places = endpoint.concurrency + max(8, endpoint.concurrency // 2)
        self._started = asyncio.Semaphore(self._places)
        self._under_way: dict[str, asyncio.Task[tuple[Call, bool]]] = {}
        self._keeps_answers = False
        self._kept_answers: dict[str, asyncio.Task[tuple[Call, bool]]] = {}
        self._sent: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._closing = False
        self._means = _Means(2.0 * endpoint.max_tokens)
        self._last_answer_s = -math.inf
        self._breaker = CircuitBreaker(_MOST_FAILURES + endpoint.concurrency, _TRIAL_EVERY_S)
        self._last_failure = ""
        self._unread = 0
        """Answers that have arrived and whose cost is not known yet."""
        self._retries = 0
        self._forbidden = 0
        self.cached_count = 0
        self.transient_failures = 0
        """Questions left without an answer that may get one later."""
        self._client = openai_client(endpoint, base_url, account.role, self._send_within_limits)
        # Absolute, so that openai need not join it each time.
        self._path = f"{base_url.rstrip('/')}/chat/completions"

    def keep_answers(self) -> None:
        """Ask nothing again from now on that was answered, if with a refusal or a blank."""
        self._keeps_answers = True

    async def ask(
        self, messages: list[Message], parse: Callable[[str], T], schema: JsonSchema | None = None
    ) -> Answer[T]:
        """The parsed answer, from the ledger if it was ever given; `schema` is for models that can
        be held to one.

        Raises:
            TeacherError: no usable answer; `reason` says why.
            BudgetError: it would cost more than may be spent.
            ConfigError: the service refuses the key or the model, or the account is empty; no row
                could succeed.
            LedgerError: another run has been asking the same for too long.
        """
        request = request_of(self._endpoint, self._key_salt, messages, schema)
        kept_task = self._kept_answers.get(request.request_hash)
        task = kept_task or self._under_way.get(request.request_hash)
        is_joined = task is not None
        if task is None:
            task = self._start(request)
        # A cancelled caller must not cancel the request for the others.
        try:
            call, is_paid = await asyncio.shield(task)
        except TeacherError as error:
            self.transient_failures += error.transient
            raise
        is_cached = is_joined or not is_paid
        if is_cached and not kept_task:
            self.cached_count += 1
        text = usable_text(call, self._endpoint.max_answer_chars)
        return Answer(
            parse(text),
            request.request_hash,
            is_cached,
            call.cost_usd,
            call.latency_ms,
            call.reasoning,
        )

    async def close(self) -> None:
        """Wait for answers under way, as they are paid for, send nothing new, and close the
        connections."""
        self._closing = True
        tasks = list(self._under_way.values())
        for task in tasks:
            if task not in self._sent:
                task.cancel()
        paid_tasks = [task for task in tasks if task in self._sent]
        if paid_tasks:
            await asyncio.wait(paid_tasks, timeout=self._endpoint.timeout_s + _LAST_ANSWERS_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _start(self, request: Request) -> asyncio.Task[tuple[Call, bool]]:
        task = asyncio.create_task(self._answer(request))
        self._under_way[request.request_hash] = task
        task.add_done_callback(lambda task: self._finished(request.request_hash, task))
        return task

    def _finished(self, request_hash: str, task: asyncio.Task[tuple[Call, bool]]) -> None:
        del self._under_way[request_hash]
        if task.cancelled():
            return
        # Where the stage stopped meanwhile, nobody awaits the failure: unread, asyncio would log
        # it.
        error = task.exception()
        is_final = error is None or (isinstance(error, TeacherError) and not error.transient)
        if self._keeps_answers and is_final:
            self._kept_answers[request_hash] = task

    async def _answer(self, request: Request) -> tuple[Call, bool]:
        """The call, and whether it was paid for just now."""
        # Another run may take so long to ask.
        longest_s = 2 * self._endpoint.timeout_s * (1 + self._endpoint.max_retries)
        call = await self._ledger.acquire(request.request_hash, longest_s)
        if call:
            return call, False
        try:
            call = await with_retries(
                lambda: self._attempt(request), self._endpoint.max_retries, _BACK_OFF
            )
        except BaseException:
            self._ledger.release(request.request_hash)
            raise
        return call, True

    async def _attempt(self, request: Request) -> Call:
        # Before a place is waited for that would not be used.
        self._check_budget(self._limits.in_flight)
        self._check_breaker()
        async with self._started:
            try:
                call = await self._call(request)
            except TeacherError as error:
                if error.reason != empty_reason(self._account.role):
                    raise
                # That the answer was blank may have been chance.
                call = await self._call(request)
            await self._ledger.record(call)
        return call

    async def _call(self, request: Request) -> Call:
        import openai

        try:
            response = await self._client.post(
                self._path, body=request.body, cast_to=httpx2.Response
            )
        except openai.APIError as error:
            # Nothing is under way any more: `close` need not wait for it.
            task = asyncio.current_task()
            if task:
                self._sent.discard(task)
            if isinstance(error, openai.APIStatusError):
                self._unread -= 1
            raise await self._failure(request, error) from error
        self._unread -= 1
        latency_ms: float = response.extensions["latency_ms"]
        try:
            completion = Completion.model_validate_json(response.content)
        except ValidationError as error:
            self._fail(request, "teacher_bad_response", latency_ms, response.content)
            # It may have been paid for, so it is not asked again here, only by the next attempt of
            # the batch.
            raise self._unavailable(
                "the answer is no chat completion", "teacher_bad_response"
            ) from error
        call = self._account.call(request, completion, latency_ms)
        reason = unanswered(call)
        if reason:
            self._fail(request, reason, latency_ms, response.content)
        if reason == "teacher_interrupted":
            raise self._unavailable(
                f"the answer was interrupted ({call.finish_reason})", reason, 0.0
            )
        self._breaker.answered()
        if reason:
            raise TeacherError(f"{self._account.role}: empty answer", reason)
        self._note_answer(request, call, response)
        return call

    def _note_answer(self, request: Request, call: Call, response: httpx2.Response) -> None:
        self._last_answer_s = time.monotonic()
        self._trace(
            request,
            call.text,
            latency_ms=call.latency_ms,
            cost_usd=call.cost_usd,
            prompt_tokens=call.prompt_tokens,
            completion_tokens=call.completion_tokens,
        )
        tokens = call.prompt_tokens + call.completion_tokens
        estimate = response.extensions["estimated_tokens"]
        self._limits.answered(response.headers, estimate, tokens or estimate)
        self._means.add(tokens, call.cost_usd)

    async def _send_within_limits(
        self, send: Callable[[], Awaitable[httpx2.Response]]
    ) -> httpx2.Response:
        """Send a request that is built, as soon as the limits allow.

        A place is held for the time on the wire only: what openai does before and after would let
        it lie idle.
        """
        estimate = self._means.tokens
        async with self._limits.slot(estimate):
            if self._closing:
                # The caller has given up, and nothing has been paid yet.
                raise asyncio.CancelledError
            # This request holds a place itself.
            self._check_budget(self._limits.in_flight - 1)
            self._check_breaker()
            self._breaker.sent()
            task = asyncio.current_task()
            if task:
                self._sent.add(task)
            start = time.perf_counter()
            response = await send()
            latency_ms = 1000 * (time.perf_counter() - start)
        self._unread += 1
        # Reading the answer can wait until those have sent theirs whose place this was.
        for _ in range(2):
            await asyncio.sleep(0)
        response.extensions["latency_ms"] = latency_ms
        response.extensions["estimated_tokens"] = estimate
        return response

    def _check_budget(self, in_flight: int) -> None:
        unknown_calls = in_flight + self._unread
        self._ledger.check_budget(self._means.cost_usd * unknown_calls)

    def _check_breaker(self) -> None:
        wait_s = self._breaker.wait_s()
        if wait_s:
            raise TeacherError(
                self._outage, "teacher_unavailable", transient=True, retry_after_s=wait_s
            )

    @property
    def _outage(self) -> str:
        return (
            f"{self._account.role} {self._account.model}: {self._breaker.failures} requests in a "
            f"row failed, the last with `{self._last_failure}`; see whether {self._path} answers. "
            f"Until it does, one request is tried every {_TRIAL_EVERY_S:.0f} s"
        )

    async def _failure(self, request: Request, error: "openai.APIError") -> Exception:
        """Record a failed request; returns the exception for its caller."""
        import openai

        role = self._account.role
        model = self._account.model
        self._limits.tokens.correct(-self._means.tokens)
        if isinstance(error.__cause__, BodyTooLargeError):
            self._breaker.answered()
            self._fail(request, "answer_too_long", None)
            return TeacherError(f"{role}: {error.__cause__}", "answer_too_long")
        failed = read_error(error)
        self._fail(
            request,
            failed.reason,
            failed.latency_ms,
            failed.content,
            may_be_paid=failed.may_be_paid,
        )
        # Where answers came just now, it may be the quota of the minute.
        is_recent = time.monotonic() < self._last_answer_s + _QUOTA_RETURNS_S
        if account_is_empty(error, quota_may_return=failed.status == 429 and is_recent):
            return ConfigError(
                f"{role} {model}: the account's balance or quota is spent "
                f"(HTTP {failed.status} {failed.code[:_SHOWN_CHARS]}); "
                "top it up and run again: every answer paid for is kept"
            )
        if failed.is_policy or (failed.status == 403 and await self._is_answered()):
            self._breaker.answered()
            return TeacherError(
                f"{role}: {failed.summary}: refused", "teacher_refused", said=failed.said
            )
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return ConfigError(f"{role} {model}: the service refuses the key; {self._key_hint()}")
        if isinstance(error, openai.NotFoundError):
            return ConfigError(f"{role}: the service knows no model {model!r}; set {role}.model")
        if failed.is_final:
            self._breaker.answered()
            return TeacherError(
                f"{role}: {failed.summary}: request refused",
                "teacher_bad_request",
                said=failed.said,
            )
        if isinstance(error, openai.RateLimitError):
            self._limits.refused()
        return self._unavailable(
            failed.summary, failed.unavailable_reason, failed.after_s, failed.said
        )

    async def _is_answered(self) -> bool:
        """Was any request answered, so that a 403 is its question's?

        As a refusal is quicker, others are awaited.
        """
        # A refused request keeps its place meanwhile, so a service that lets nobody in gets no more
        # requests than there are places.
        self._forbidden += 1
        give_up_s = time.monotonic() + self._endpoint.timeout_s
        while True:
            if self._means.calls or self.cached_count:
                return True
            if time.monotonic() >= give_up_s:
                return False
            if self._forbidden >= min(len(self._under_way), self._places):
                return False
            await asyncio.sleep(_POLL_S)

    def _key_hint(self) -> str:
        variable = self._endpoint.api_key_env
        if variable:
            return f"check the environment variable {variable}"
        return f"set {self._account.role}.api_key_env"

    def _unavailable(
        self, summary: str, reason: str, after_s: float | None = None, said: str = ""
    ) -> TeacherError:
        """The error for a failure that is the service's; warns once the service seems away.

        It keeps `after_s`, and so may be tried again, while retries are left.
        """
        was_open = self._breaker.is_open
        self._last_failure = summary
        self._breaker.failed()
        if self._breaker.is_open and not was_open:
            _LOG.warning("%s", self._outage)
        # An open breaker lets few through, whoever sends them.
        if after_s is not None and not self._breaker.is_open:
            self._retries += 1
            if self._retries > _RETRIES_BEFORE_ANSWERS + 2 * self._means.calls:
                after_s = None
        return TeacherError(
            f"{self._account.role}: {summary}",
            reason,
            said=said,
            transient=True,
            retry_after_s=after_s,
        )

    def _fail(
        self,
        request: Request,
        reason: str,
        latency_ms: float | None,
        content: bytes = b"",
        *,
        may_be_paid: bool = True,
    ) -> None:
        failure = self._account.failure(
            request, reason, content, may_be_paid=may_be_paid, latency_ms=latency_ms
        )
        self._ledger.fail(failure)
        self._trace(request, failure=reason, latency_ms=latency_ms, cost_usd=failure.cost_usd)

    def _trace(self, request: Request, answer: str | None = None, **attributes: Any) -> None:
        # Not the headers, which hold the key.
        inputs = {"messages": request.body["messages"]}
        self._traced.add(
            request.request_hash,
            self._account.role,
            "CHAT_MODEL",
            inputs,
            answer,
            model=self._account.model,
            **attributes,
        )
