"""Asking a teacher or judge over OpenAI chat completions, through the ledger.

The openai package does the transport. Added here: limits that all tasks share, when an answer is no
answer, what may still be spent, and that nothing is paid for twice, not even what is asked again
while the first request is under way.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

import httpx2
from pydantic import AliasPath, BaseModel, Field, ValidationError

from qinglan.clients.limits import (
    BodyTooLargeError,
    CircuitBreaker,
    Limits,
    retry_after_s,
    with_retries,
)
from qinglan.clients.openai_protocol import JsonSchema, Message, request_parameters
from qinglan.config import Endpoint, Price
from qinglan.errors import ConfigError, TeacherError
from qinglan.ledger import Call, Failure
from qinglan.ledger.queue import LedgerQueue
from qinglan.runs.artifacts import hash_of
from qinglan.runs.back_off import BackOff
from qinglan.runs.traces import CallSample
from qinglan.text import shown, without_controls

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

TOKENS_PER_CHARACTER = 0.8
"""Roughly what current tokenizers need for Chinese; English needs less."""
_DEFAULT_COMPLETION_TOKENS = 1024
_LAST_ANSWERS_S = 10.0
_MOST_FAILURES = 20
"""In a row, beside those that were under way at once: more are not risked, as a request that hangs
may be paid for."""
_TRIAL_EVERY_S = 15.0
_RETRIES_BEFORE_ANSWERS = 50
"""And two for each answer, which is enough while half of the requests fail. A service that answers
one request in twenty opens no circuit breaker, and would get several requests for every row."""
_POLL_S = 0.05
_QUOTA_RETURNS_S = 60.0
"""Some services say of the tokens per minute that the quota is spent."""
_ENDED = ("stop", "eos", "end_turn", "")
"""How a whole answer ends; some gateways don't say."""
_INTERRUPTED = ("insufficient_system_resource", "network_error", "error", "abort")
"""How DeepSeek, Zhipu, gateways and vLLM end an answer that they could not finish: another try
may."""
_GATEWAY_TIMEOUTS = (504, 524)
"""The model behind the gateway may go on, and is paid for."""
NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
_ACCOUNT = re.compile(
    r"arrearage|overdue|insufficient_?balance|exceeded_current_quota|(user|token)_quota|billing_|free_?tier_?only"
    r"|\b(1113|30001)\b",
    re.I,
)
_QUOTA = re.compile(r"insufficient_?quota", re.I)
_POLICY = re.compile(
    r"content_?policy|content_?filter|data_?inspection|sensitive_?content|\b1301\b", re.I
)
"""Codes and types of errors; docs/how-to/teachers.md says whose they are."""
_CODE = re.compile(r"[\w.-]{1,40}", re.ASCII)
"""A code or type of an error that quotes nothing."""
_MOST_TOKENS = 10**9
_SHOWN_CHARS = 200
_LOG = logging.getLogger(__name__)
_BACK_OFF = BackOff(0.5, 30.0, jitter=True)


@dataclass(frozen=True)
class Answer(Generic[T]):
    value: T
    request_hash: str
    cached: bool
    cost_usd: float
    latency_ms: float | None
    """None where the batch API brought it."""
    reasoning: str | None = None
    """The chain of thought, where the service gives it beside the answer."""


@dataclass(frozen=True)
class Request:
    """What is sent, and the ledger's key for it."""

    request_hash: str
    body: dict[str, Any]


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """DeepSeek's name for the chain of thought."""
    reasoning: Any = None
    """vLLM's name for it; elsewhere it may be something else than text."""


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))
    completion_tokens: int | None = Field(
        None, validation_alias=AliasPath("usage", "completion_tokens")
    )


class Completion(_Usage):
    choices: list[_Choice] = Field(min_length=1)


@dataclass(frozen=True)
class Account:
    """In whose name a client asks: what the ledger keeps beside each call."""

    run_id: str
    tenant: str
    role: str
    model: str
    price: Price

    def call(self, request: Request, completion: Completion, latency_ms: float | None) -> Call:
        """The ledger's entry for an answer; where the service doesn't count tokens, they are
        estimated."""
        choice = completion.choices[0]
        message, other_thoughts = choice.message, choice.message.reasoning
        text = message.content or ""
        thoughts = message.reasoning_content or (
            other_thoughts if isinstance(other_thoughts, str) else ""
        )
        prompt_tokens = _count(completion.prompt_tokens, _prompt_chars(request))
        completion_tokens = _count(completion.completion_tokens, len(text) + len(thoughts))
        # PostgreSQL's text holds no NUL.
        text, thoughts, refusal = (
            said.replace("\x00", "") for said in (text, thoughts, message.refusal or "")
        )
        return Call(
            **self._who,
            request_hash=request.request_hash,
            text=text,
            reasoning=thoughts or None,
            refusal=refusal or None,
            finish_reason=choice.finish_reason or "",
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost_usd=cost_usd(self.price, prompt_tokens, completion_tokens),
            latency_ms=latency_ms,
        )

    def failure(
        self,
        request: Request,
        reason: str,
        content: bytes = b"",
        *,
        may_be_paid: bool = True,
        **known: Any,
    ) -> Failure:
        """For a try without an answer; it costs what `content` says that it used, else the most
        that it can."""
        usage = _Usage()
        with suppress(ValidationError):
            usage = _Usage.model_validate_json(content)
        estimated = may_be_paid and None in (usage.prompt_tokens, usage.completion_tokens)
        usd = cost_usd(
            self.price, _count(usage.prompt_tokens, 0), _count(usage.completion_tokens, 0)
        )
        known |= {
            "cost_usd": max(usd, most_usd(request, self.price)) if estimated else usd,
            "estimated": estimated,
        }
        return Failure(**self._who, request_hash=request.request_hash, reason=reason, **known)

    @property
    def _who(self) -> dict[str, str]:
        return {
            "run_id": self.run_id,
            "tenant": self.tenant,
            "role": self.role,
            "model": self.model,
        }


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

        self._traced = traced or CallSample(0)
        self._endpoint, self._account, self._ledger, self._key_salt = (
            endpoint,
            account,
            ledger,
            key_salt,
        )
        self._limits = Limits(
            endpoint.concurrency, endpoint.requests_per_minute, endpoint.tokens_per_minute
        )
        # Of a killed process, what is in here may be lost: requests built ahead, so that a free
        # place is taken at once, those under way, and answers that are being committed.
        self._places = endpoint.concurrency + max(8, endpoint.concurrency // 2)
        self._started = asyncio.Semaphore(self._places)
        self._under_way: dict[str, asyncio.Task[tuple[Call, bool]]] = {}
        self._kept: dict[str, asyncio.Task[tuple[Call, bool]]] | None = None
        self._sent: WeakSet[asyncio.Task[Any]] = WeakSet()
        self._closing = False
        self._answered, self._mean_cost_usd, self._mean_tokens = 0, 0.0, 2.0 * endpoint.max_tokens
        self._last_answer_s = -math.inf
        self._breaker = CircuitBreaker(_MOST_FAILURES + endpoint.concurrency, _TRIAL_EVERY_S)
        self._last_failure, self._unread = "", 0
        self._retries, self._forbidden = 0, 0
        self.cached_count = 0
        self.transient_failures = 0
        """Questions left without an answer that may get one later."""
        self._client = openai_client(endpoint, base_url, account.role, self._send_within_limits)
        self._path = f"{base_url.rstrip('/')}/chat/completions"  # absolute: openai need not join it each time

    def keep_answers(self) -> None:
        """From now on nothing is asked again that was answered, if with a refusal or a blank."""
        self._kept = self._kept or {}

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
        kept = (self._kept or {}).get(request.request_hash)
        task = joined = kept or self._under_way.get(request.request_hash)
        if task is None:
            task = self._under_way[request.request_hash] = asyncio.create_task(
                self._answer(request)
            )
            task.add_done_callback(lambda done: self._finished(request.request_hash, done))
        # A cancelled caller must not cancel the request for the others.
        try:
            call, paid = await asyncio.shield(task)
        except TeacherError as error:
            self.transient_failures += error.transient
            raise
        cached = bool(joined) or not paid
        self.cached_count += cached and not kept
        text = usable_text(call, self._endpoint.max_answer_chars)
        return Answer(
            parse(text),
            request.request_hash,
            cached,
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
        if paid := [task for task in tasks if task in self._sent]:
            await asyncio.wait(paid, timeout=self._endpoint.timeout_s + _LAST_ANSWERS_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _finished(self, request_hash: str, task: asyncio.Task[tuple[Call, bool]]) -> None:
        del self._under_way[request_hash]
        # Where the stage stopped meanwhile, nobody awaits the failure: unread, asyncio would log
        # it.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if self._kept is not None and (
            error is None or (isinstance(error, TeacherError) and not error.transient)
        ):
            self._kept[request_hash] = task

    async def _answer(self, request: Request) -> tuple[Call, bool]:
        """The call, and whether it was paid for just now."""
        longest_s = (
            2 * self._endpoint.timeout_s * (1 + self._endpoint.max_retries)
        )  # that another run may take to ask
        if known := await self._ledger.acquire(request.request_hash, longest_s):
            return known, False
        try:
            call = await with_retries(
                lambda: self._attempt(request), self._endpoint.max_retries, _BACK_OFF
            )
        except BaseException:
            self._ledger.release(request.request_hash)
            raise
        return call, True

    async def _send_within_limits(
        self, send: Callable[[], Awaitable[httpx2.Response]]
    ) -> httpx2.Response:
        """Send a request that is built, as soon as the limits allow.

        A place is held for the time on the wire only: what openai does before and after would let
        it lie idle.
        """
        estimate = self._mean_tokens
        async with self._limits.slot(estimate):
            if self._closing:  # the caller has given up, and nothing has been paid yet
                raise asyncio.CancelledError
            self._check_budget(but=1)
            self._check_breaker()
            self._breaker.sent()
            if task := asyncio.current_task():
                self._sent.add(task)
            start = time.perf_counter()
            response = await send()
            latency_ms = 1000 * (time.perf_counter() - start)
        self._unread += 1
        for _ in range(
            2
        ):  # reading the answer can wait until those have sent theirs whose place this was
            await asyncio.sleep(0)
        response.extensions["latency_ms"] = latency_ms
        response.extensions["estimated_tokens"] = estimate
        return response

    def _check_budget(self, but: int = 0) -> None:
        self._ledger.check_budget(
            self._mean_cost_usd * (self._limits.in_flight - but + self._unread)
        )

    def _check_breaker(self) -> None:
        if wait_s := self._breaker.wait_s():
            raise TeacherError(
                self._outage, "teacher_unavailable", transient=True, retry_after_s=wait_s
            )

    @property
    def _outage(self) -> str:
        return (
            f"{self._account.role} {self._account.model}: {self._breaker.failures} requests in a row failed, the last "
            f"with `{self._last_failure}`; see whether {self._path} answers. Until it does, one request is tried every "
            f"{_TRIAL_EVERY_S:.0f} s"
        )

    def _unavailable(
        self, what: str, reason: str, after_s: float | None = None, said: str = ""
    ) -> TeacherError:
        """Of a failure that is the service's; keeps `after_s` while retries are left, and warns
        once it seems away."""
        was_open, self._last_failure = self._breaker.is_open, what
        self._breaker.failed()
        if self._breaker.is_open and not was_open:
            _LOG.warning("%s", self._outage)
        if (
            after_s is not None and not self._breaker.is_open
        ):  # an open one lets few through, whoever sends them
            self._retries += 1
            if self._retries > _RETRIES_BEFORE_ANSWERS + 2 * self._answered:
                after_s = None
        return TeacherError(
            f"{self._account.role}: {what}",
            reason,
            said=said,
            transient=True,
            retry_after_s=after_s,
        )

    async def _attempt(self, request: Request) -> Call:
        self._check_budget()  # before a place is waited for that would not be used
        self._check_breaker()
        async with self._started:
            try:
                call = await self._call(request)
            except TeacherError as error:
                if error.reason != _empty_reason(self._account.role):
                    raise
                call = await self._call(request)  # that the answer was blank may have been chance
            await self._ledger.record(call)
        return call

    async def _call(self, request: Request) -> Call:
        import openai

        try:
            response = await self._client.post(
                self._path, body=request.body, cast_to=httpx2.Response
            )
        except openai.APIError as error:
            if (
                task := asyncio.current_task()
            ):  # nothing is under way any more: `close` need not wait for it
                self._sent.discard(task)
            self._unread -= isinstance(error, openai.APIStatusError)
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
        if reason := unanswered(call):
            self._fail(request, reason, latency_ms, response.content)
        if reason == "teacher_interrupted":
            raise self._unavailable(
                f"the answer was interrupted ({call.finish_reason})", reason, 0.0
            )
        self._breaker.answered()
        if reason:
            raise TeacherError(f"{self._account.role}: empty answer", reason)
        self._last_answer_s = time.monotonic()
        used = {"prompt_tokens": call.prompt_tokens, "completion_tokens": call.completion_tokens}
        self._trace(request, call.text, latency_ms=latency_ms, cost_usd=call.cost_usd, **used)
        tokens, estimate = (
            call.prompt_tokens + call.completion_tokens,
            response.extensions["estimated_tokens"],
        )
        self._limits.answered(response.headers, estimate, tokens or estimate)
        # Means over about the last hundred calls, from which the next ones are estimated.
        self._answered += 1
        share = 0.01 if self._answered > 1 else 1.0
        self._mean_tokens += share * (tokens - self._mean_tokens)
        self._mean_cost_usd += share * (call.cost_usd - self._mean_cost_usd)
        return call

    async def _failure(self, request: Request, error: "openai.APIError") -> Exception:
        import openai

        role, model = self._account.role, self._account.model
        status, latency_ms, after_s, content = None, None, 0.0, b""
        if isinstance(error, openai.APIStatusError):
            status, latency_ms = error.status_code, error.response.extensions["latency_ms"]
            after_s, content = retry_after_s(error.response.headers), error.response.content
        self._limits.tokens.correct(-self._mean_tokens)
        if isinstance(error.__cause__, BodyTooLargeError):
            self._breaker.answered()
            self._fail(request, "answer_too_long", None)
            return TeacherError(f"{role}: {error.__cause__}", "answer_too_long")
        unavailable = (
            "teacher_timeout"
            if isinstance(error, openai.APITimeoutError)
            else "teacher_unavailable"
        )
        reason = f"http_{status}" if status else unavailable
        may_be_paid = (
            status in _GATEWAY_TIMEOUTS if status else not isinstance(error.__cause__, NOT_SENT)
        )
        self._fail(request, reason, latency_ms, content, may_be_paid=may_be_paid)
        said, code = (
            without_controls(error.message),
            without_controls(error.code or error.type or ""),
        )
        what, said = (
            (f"HTTP {status} {code if _CODE.fullmatch(code) else ''}".rstrip(), said)
            if status
            else (said, "")
        )
        what = (
            f"no connection: {error.__cause__}"
            if isinstance(error.__cause__, httpx2.ConnectError)
            else what
        )
        may_return = status == 429 and time.monotonic() < self._last_answer_s + _QUOTA_RETURNS_S
        if account_is_empty(error, quota_may_return=may_return):
            return ConfigError(
                f"{role} {model}: the account's balance or quota is spent (HTTP {status} {code[:_SHOWN_CHARS]}); "
                "top it up and run again: every answer paid for is kept"
            )
        if _POLICY.search(f"{error.code} {error.type}") or (
            status == 403 and await self._is_answered()
        ):
            self._breaker.answered()
            return TeacherError(f"{role}: {what}: refused", "teacher_refused", said=said)
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            variable = self._endpoint.api_key_env
            hint = (
                f"check the environment variable {variable}"
                if variable
                else f"set {role}.api_key_env"
            )
            return ConfigError(f"{role} {model}: the service refuses the key; {hint}")
        if isinstance(error, openai.NotFoundError):
            return ConfigError(f"{role}: the service knows no model {model!r}; set {role}.model")
        if status and 400 <= status < 500 and status not in (408, 409, 429):
            self._breaker.answered()
            return TeacherError(
                f"{role}: {what}: request refused", "teacher_bad_request", said=said
            )
        if isinstance(error, openai.RateLimitError):
            self._limits.refused()
            unavailable = "teacher_rate_limited"
        return self._unavailable(what, unavailable, after_s, said)

    async def _is_answered(self) -> bool:
        """Whether any request was, so that a 403 is its question's. As a refusal is quicker, others
        are awaited."""
        self._forbidden += 1  # it keeps its place, so a service that lets nobody in gets no more requests than places
        give_up_s = time.monotonic() + self._endpoint.timeout_s
        while (
            not (is_answered := bool(self._answered or self.cached_count))
            and time.monotonic() < give_up_s
        ):
            if self._forbidden >= min(len(self._under_way), self._places):
                break
            await asyncio.sleep(_POLL_S)
        return is_answered

    def _fail(
        self,
        request: Request,
        reason: str,
        latency_ms: float | None,
        content: bytes = b"",
        *,
        may_be_paid: bool = True,
    ) -> None:
        failed = self._account.failure(
            request, reason, content, may_be_paid=may_be_paid, latency_ms=latency_ms
        )
        self._ledger.fail(failed)
        self._trace(request, failure=reason, latency_ms=latency_ms, cost_usd=failed.cost_usd)

    def _trace(self, request: Request, answer: str | None = None, **known: Any) -> None:
        account, asked = (
            self._account,
            {"messages": request.body["messages"]},
        )  # not the headers, which hold the key
        self._traced.add(
            request.request_hash,
            account.role,
            "CHAT_MODEL",
            asked,
            answer,
            model=account.model,
            **known,
        )


def request_of(
    endpoint: Endpoint, key_salt: str, messages: list[Message], schema: JsonSchema | None = None
) -> Request:
    """What is sent for these messages; its hash covers model, parameters, prompt and service, not
    the row's place."""
    body = request_parameters(endpoint, schema) | {"messages": messages}
    return Request(hash_of(key_salt, body), body)


def cost_usd(price: Price, prompt_tokens: float, completion_tokens: float) -> float:
    return (
        price.input_per_million_usd * prompt_tokens
        + price.output_per_million_usd * completion_tokens
    ) / 1e6


def most_usd(request: Request, price: Price) -> float:
    """What a request costs whose answer is as long as it may be."""
    longest = (
        request.body.get("max_completion_tokens")
        or request.body.get("max_tokens")
        or _DEFAULT_COMPLETION_TOKENS
    )
    return cost_usd(price, round(TOKENS_PER_CHARACTER * _prompt_chars(request)), longest)


def account_is_empty(error: "openai.APIError", *, quota_may_return: bool = False) -> bool:
    """A service says that nothing more can be paid for, whatever is asked."""
    named = f"{error.code} {error.type}"
    is_spent = _ACCOUNT.search(named) or (_QUOTA.search(named) and not quota_may_return)
    return bool(is_spent) or getattr(error, "status_code", None) == 402


def unanswered(call: Call) -> str | None:
    """Why a completion must not be stored: it was interrupted, or is blank."""
    if call.finish_reason in _INTERRUPTED:
        return "teacher_interrupted"
    is_blank = call.finish_reason in _ENDED and not call.refusal and not call.text.strip()
    return _empty_reason(call.role) if is_blank else None


def usable_text(call: Call, max_chars: int) -> str:
    """The answer's text; raises TeacherError where it is a refusal, cut off, empty or too long."""
    if call.refusal or call.finish_reason in ("content_filter", "sensitive"):
        said = shown(call.refusal or call.text, _SHOWN_CHARS)
        raise TeacherError(f"{call.role}: refused", "teacher_refused", said=said)
    if call.finish_reason == "length":
        raise TeacherError(
            f"{call.role}: truncated at max_tokens; raise {call.role}.max_tokens", "truncated"
        )
    if call.finish_reason not in _ENDED:
        raise TeacherError(
            f"{call.role}: the answer ended with {call.finish_reason!r}", "unknown_ending"
        )
    if not call.text.strip():
        raise TeacherError(f"{call.role}: empty answer", _empty_reason(call.role))
    if len(call.text) > max_chars:
        message = f"an answer of {len(call.text):,} characters, more than {call.role}.max_answer_chars = {max_chars:,}"
        raise TeacherError(f"{call.role}: {message}", "answer_too_long")
    return call.text


def _empty_reason(role: str) -> str:
    return {"judge": "empty_judgement", "answerer": "empty_candidate"}.get(role, "empty_answer")


def _prompt_chars(request: Request) -> int:
    return sum(len(message["content"]) for message in request.body["messages"])


def _count(tokens: int | None, chars: int) -> int:
    """As the service counts; estimated where the service sends no usage."""
    return (
        min(max(0, tokens), _MOST_TOKENS)
        if tokens is not None
        else int(TOKENS_PER_CHARACTER * chars)
    )
