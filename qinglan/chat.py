"""Asking a teacher or judge over OpenAI chat completions, through the ledger.

The openai package does the transport and its retries (back-off, Retry-After). What it can't know is added here:
which models refuse which parameters, when an answer is no answer, and that nothing is paid for twice: not even where
the same is asked again while the first request is still under way.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import httpx
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from qinglan.artifacts import hash_of
from qinglan.config import Endpoint, Price, require_secret, uses_proxy
from qinglan.errors import ConfigError, TeacherError
from qinglan.ledger import Call, Ledger

Message = dict[str, str]
T = TypeVar("T")

_REASONING = re.compile(r"^(gpt-[5-9]|o\d)")
"""Models that take `max_completion_tokens` and refuse a temperature (OpenAI's reasoning families)."""
_HASH_HEADER = "x-request-hash"
_LAST_ANSWERS_S = 10.0


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A usable answer and what it cost."""

    value: T
    request_hash: str
    cached: bool
    cost_usd: float
    latency_ms: float


def request_parameters(endpoint: Endpoint) -> dict[str, Any]:
    """What is sent beside the messages, by what the model accepts."""
    parameters: dict[str, Any] = {"model": endpoint.model}
    if _REASONING.match(endpoint.model):
        parameters |= {"max_completion_tokens": endpoint.max_tokens}
    else:
        parameters |= {"max_tokens": endpoint.max_tokens, "temperature": endpoint.temperature}
    return parameters | ({"extra_body": endpoint.extra_body} if endpoint.extra_body else {})


class ChatClient:
    """One role's client: concurrency limit, ledger, failure reasons. Belongs to one event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        base_url: str,
        *,
        role: str,
        ledger: Ledger,
        price: Price,
        run_id: str,
        tenant: str,
        key_salt: str = "",
    ) -> None:
        """`key_salt` tells apart services that answer differently under one model name."""
        self._endpoint, self._role, self._ledger, self._price = endpoint, role, ledger, price
        self._run_id, self._tenant, self._key_salt = run_id, tenant, key_salt
        self._parameters = request_parameters(endpoint)
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._under_way: dict[str, asyncio.Task[Call]] = {}
        self._closing = False
        self.cached_count = 0
        transport = _CountingClient(
            self._record_failure,
            limits=httpx.Limits(max_connections=endpoint.concurrency),
            timeout=endpoint.timeout_s,
            trust_env=uses_proxy(base_url),
        )
        self._client = AsyncOpenAI(
            base_url=base_url,
            api_key=require_secret(endpoint.api_key_env, f"{role} {endpoint.model}"),
            timeout=endpoint.timeout_s,
            max_retries=endpoint.max_retries,
            http_client=cast(Any, transport),  # openai 2 wants httpx, openai 3 httpx2 and takes both
        )

    async def ask(self, messages: list[Message], parse: Callable[[str], T]) -> Answer[T]:
        """The parsed answer, from the ledger if it was ever given.

        Raises:
            TeacherError: no usable answer; `reason` says why.
            ConfigError: the service refuses the key or the model; no row could succeed.
        """
        request_hash = hash_of(self._key_salt, self._parameters, messages)
        call = self._ledger.get(request_hash)
        cached = call is not None or request_hash in self._under_way
        self.cached_count += cached
        if call is None:
            call = await self._call_once(request_hash, messages)
        return Answer(parse(_usable_text(call)), request_hash, cached, call.cost_usd, call.latency_ms)

    async def close(self) -> None:
        """Wait a little for answers under way, as they are paid for, send nothing new, and close the connections."""
        self._closing = True
        if tasks := list(self._under_way.values()):
            await asyncio.wait(tasks, timeout=_LAST_ANSWERS_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _call_once(self, request_hash: str, messages: list[Message]) -> Call:
        task = self._under_way.get(request_hash)
        if task is None:
            task = self._under_way[request_hash] = asyncio.create_task(self._call(request_hash, messages))
            task.add_done_callback(lambda _: self._under_way.pop(request_hash))
            # Where the stage stopped meanwhile, nobody is left to hear of a failure, and asyncio would complain.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(task)  # whoever gives up waiting does not take the answer from the others

    async def _call(self, request_hash: str, messages: list[Message]) -> Call:
        async with self._slots:
            if call := self._ledger.get(request_hash):  # another process was quicker
                return call
            if self._closing:  # whoever asked has given up, and nothing has been paid yet
                raise asyncio.CancelledError
            start = time.perf_counter()
            try:
                answer: object = await self._client.chat.completions.create(
                    messages=cast(Any, messages), **self._parameters, extra_headers={_HASH_HEADER: request_hash}
                )
            except openai.APIError as error:
                raise self._failure(error) from error
            except ValueError as error:  # a body that is not JSON
                answer = error
            latency_ms = 1000 * (time.perf_counter() - start)
        completion = _completion_of(answer)
        if completion is None:
            self._record_failure(request_hash, "teacher_bad_response")
            raise TeacherError(
                f"{self._role}: the answer is no chat completion", "teacher_bad_response", transient=True
            )
        message, usage = completion.choices[0].message, completion.usage
        prompt_tokens = (usage.prompt_tokens or 0) if usage else 0
        completion_tokens = (usage.completion_tokens or 0) if usage else 0
        call = Call(
            request_hash=request_hash,
            run_id=self._run_id,
            tenant=self._tenant,
            role=self._role,
            model=self._endpoint.model,
            text=message.content or "",
            refusal=message.refusal,
            finish_reason=cast(str | None, completion.choices[0].finish_reason) or "",
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cost_usd=cost_usd(self._price, prompt_tokens, completion_tokens),
            latency_ms=latency_ms,
        )
        self._ledger.record(call)
        return call

    def _failure(self, error: openai.APIError) -> Exception:
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            variable = self._endpoint.api_key_env
            remedy = f"check the environment variable {variable}" if variable else f"set {self._role}.api_key_env"
            return ConfigError(f"{self._role} {self._endpoint.model}: the service refuses the key; {remedy}")
        if isinstance(error, openai.NotFoundError):
            return ConfigError(
                f"{self._role}: the service knows no model {self._endpoint.model!r}; set {self._role}.model"
            )
        if isinstance(error, openai.RateLimitError) and error.code == "insufficient_quota":
            return ConfigError(f"{self._role} {self._endpoint.model}: the account's quota is spent; top it up")
        if isinstance(error, openai.APIStatusError) and _is_final(error.status_code):
            return TeacherError(f"{self._role}: request refused: {error.message}", "teacher_bad_request")
        return TeacherError(f"{self._role}: {error.message}", _transient_reason(error), transient=True)

    def _record_failure(self, request_hash: str, reason: str) -> None:
        self._ledger.record_failure(request_hash, self._run_id, self._tenant, self._role, self._endpoint.model, reason)


class _CountingClient(httpx.AsyncClient):
    """Counts every request without a usable HTTP answer, those that openai repeats included."""

    def __init__(self, count: Callable[[str, str], None], **options: Any) -> None:
        super().__init__(**options)
        self._count = count

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """As the parent does."""
        request_hash = request.headers.get(_HASH_HEADER, "")
        try:
            response = await super().send(request, **options)
        except httpx.RequestError as error:
            self._count(request_hash, type(error).__name__)
            raise
        if response.status_code >= 400:
            self._count(request_hash, f"http_{response.status_code}")
        return response


def _completion_of(answer: object) -> ChatCompletion | None:
    # openai does not check what a service sends: a proxy's error page arrives here as a string.
    return answer if isinstance(answer, ChatCompletion) and answer.choices else None


def cost_usd(price: Price, prompt_tokens: int, completion_tokens: int) -> float:
    """Dollars for one call."""
    return (price.input_per_million_usd * prompt_tokens + price.output_per_million_usd * completion_tokens) / 1e6


def _is_final(status: int) -> bool:
    return 400 <= status < 500 and status not in (408, 409, 429)


def _transient_reason(error: openai.APIError) -> str:
    if isinstance(error, openai.APITimeoutError):
        return "teacher_timeout"
    if isinstance(error, openai.RateLimitError):
        return "teacher_rate_limited"
    return "teacher_unavailable"


def _usable_text(call: Call) -> str:
    if call.refusal or call.finish_reason == "content_filter":
        raise TeacherError(f"{call.role}: refused: {call.refusal or call.text[:80]}", "teacher_refused")
    if call.finish_reason == "length":
        raise TeacherError(f"{call.role}: truncated at max_tokens; raise {call.role}.max_tokens", "truncated")
    if not call.text.strip():
        raise TeacherError(
            f"{call.role}: empty answer", f"empty_{'rewrite' if call.role == 'teacher' else 'judgement'}"
        )
    return call.text
