"""One request to a chat model and its completion: the ledger's key, what it costs, and when an
answer is none."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import AliasPath, BaseModel, Field, ValidationError

from qinglan.clients.openai_protocol import JsonSchema, Message, request_parameters
from qinglan.config import Endpoint, Price
from qinglan.errors import TeacherError
from qinglan.ledger import Call, Failure
from qinglan.runs.artifacts import hash_of
from qinglan.text import shown

TOKENS_PER_CHARACTER = 0.8
"""Roughly what current tokenizers need for Chinese; English needs less."""
_DEFAULT_COMPLETION_TOKENS = 1024
_MOST_TOKENS = 10**9
_SHOWN_CHARS = 200
_ENDED = ("stop", "eos", "end_turn", "")
"""Endings of a whole answer; some gateways don't say."""
_INTERRUPTED = ("insufficient_system_resource", "network_error", "error", "abort")
"""Endings of an answer that DeepSeek, Zhipu, a gateway or vLLM could not finish: another try
may."""
_REFUSED = ("content_filter", "sensitive")
_EMPTY_REASONS = {"judge": "empty_judgement", "answerer": "empty_candidate"}


@dataclass(frozen=True)
class Request:
    """A request's body, and the ledger's key for it."""

    request_hash: str
    body: dict[str, Any]


def request_of(
    endpoint: Endpoint, key_salt: str, messages: list[Message], schema: JsonSchema | None = None
) -> Request:
    """The request for these messages; its hash covers model, parameters, prompt and service, not
    the row's place."""
    body = request_parameters(endpoint, schema) | {"messages": messages}
    return Request(hash_of(key_salt, body), body)


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    """DeepSeek's name for the chain of thought."""
    reasoning: Any = None
    """vLLM's name for it; elsewhere it may be something else than text."""

    @property
    def chain_of_thought(self) -> str:
        """Empty where the service gives none beside the answer."""
        if self.reasoning_content:
            return self.reasoning_content
        return self.reasoning if isinstance(self.reasoning, str) else ""


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    """The tokens that a service counts; None where it doesn't."""

    prompt_tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))
    completion_tokens: int | None = Field(
        None, validation_alias=AliasPath("usage", "completion_tokens")
    )


class Completion(_Usage):
    choices: list[_Choice] = Field(min_length=1)


@dataclass(frozen=True)
class Account:
    """The run, tenant and role in whose name a client asks: the ledger keeps them beside each
    call."""

    run_id: str
    tenant: str
    role: str
    model: str
    price: Price

    def call(self, request: Request, completion: Completion, latency_ms: float | None) -> Call:
        """The ledger's entry for an answer; where the service doesn't count tokens, they are
        estimated."""
        choice = completion.choices[0]
        text = choice.message.content or ""
        thoughts = choice.message.chain_of_thought
        prompt_tokens = _count(completion.prompt_tokens, _prompt_chars(request))
        completion_tokens = _count(completion.completion_tokens, len(text) + len(thoughts))
        return Call(
            **self._identity,
            request_hash=request.request_hash,
            text=_without_nul(text),
            reasoning=_without_nul(thoughts) or None,
            refusal=_without_nul(choice.message.refusal or "") or None,
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
        latency_ms: float | None = None,
    ) -> Failure:
        """The ledger's entry for a try without an answer.

        It costs what the service's `content` says that it used, otherwise the most that it can.
        """
        usage = _Usage()
        with suppress(ValidationError):
            usage = _Usage.model_validate_json(content)
        usd = cost_usd(
            self.price, _count(usage.prompt_tokens, 0), _count(usage.completion_tokens, 0)
        )
        is_counted = None not in (usage.prompt_tokens, usage.completion_tokens)
        is_estimated = may_be_paid and not is_counted
        if is_estimated:
            usd = max(usd, most_usd(request, self.price))
        return Failure(
            **self._identity,
            request_hash=request.request_hash,
            reason=reason,
            cost_usd=usd,
            estimated=is_estimated,
            latency_ms=latency_ms,
        )

    @property
    def _identity(self) -> dict[str, str]:
        return {
            "run_id": self.run_id,
            "tenant": self.tenant,
            "role": self.role,
            "model": self.model,
        }


def cost_usd(price: Price, prompt_tokens: float, completion_tokens: float) -> float:
    return (
        price.input_per_million_usd * prompt_tokens
        + price.output_per_million_usd * completion_tokens
    ) / 1e6


def most_usd(request: Request, price: Price) -> float:
    """The cost of a request whose answer is as long as it may be."""
    longest = (
        request.body.get("max_completion_tokens")
        or request.body.get("max_tokens")
        or _DEFAULT_COMPLETION_TOKENS
    )
    return cost_usd(price, round(TOKENS_PER_CHARACTER * _prompt_chars(request)), longest)


def unanswered(call: Call) -> str | None:
    """The reason why a completion must not be stored: it was interrupted, or is blank."""
    if call.finish_reason in _INTERRUPTED:
        return "teacher_interrupted"
    if call.finish_reason in _ENDED and not call.refusal and not call.text.strip():
        return empty_reason(call.role)
    return None


def usable_text(call: Call, max_chars: int) -> str:
    """The answer's text; raises TeacherError where it is a refusal, cut off, empty or too long."""
    if call.refusal or call.finish_reason in _REFUSED:
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
        raise TeacherError(f"{call.role}: empty answer", empty_reason(call.role))
    if len(call.text) > max_chars:
        raise TeacherError(
            f"{call.role}: an answer of {len(call.text):,} characters, "
            f"more than {call.role}.max_answer_chars = {max_chars:,}",
            "answer_too_long",
        )
    return call.text


def empty_reason(role: str) -> str:
    """The reason of a row for which this role gave a blank answer."""
    return _EMPTY_REASONS.get(role, "empty_answer")


def _without_nul(text: str) -> str:
    # PostgreSQL's text holds no NUL.
    return text.replace("\x00", "")


def _prompt_chars(request: Request) -> int:
    return sum(len(message["content"]) for message in request.body["messages"])


def _count(tokens: int | None, chars: int) -> int:
    """The tokens that the service counts, otherwise an estimate from the characters."""
    if tokens is None:
        return int(TOKENS_PER_CHARACTER * chars)
    return min(max(0, tokens), _MOST_TOKENS)
