"""OpenAI's chat completions: what is sent to which model, and how the router and the simulated
models answer.

A service answers 400 to a parameter that its model does not know. Sources of the table: OpenAI's
and DeepSeek's API references, vLLM's OpenAI-compatible server. The first pattern that fits decides;
whatever is served under another name (vLLM, a gateway) gets plain chat parameters.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from qinglan.config import Endpoint

StructuredOutput = Literal["json_schema", "json_object", "off"]
Message = dict[str, str]
"""A message of a chat: its `role` and its `content`."""
JsonSchema = dict[str, Any]


@dataclass(frozen=True)
class Capability:
    """The parameters that the models of one family take."""

    pattern: str
    """Pattern of the model's name without the organisation in front of a slash."""
    token_parameter: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # noqa: S105
    temperature: bool = True
    reasoning_effort: bool | None = False
    """None where it is not known."""
    structured_output: StructuredOutput = "off"


# The first pattern that fits decides, so a name that extends another stands before it.
TABLE = (
    Capability(r"gpt-5[^/]*-chat", "max_completion_tokens", structured_output="json_schema"),
    Capability(r"gpt-[5-9]|o\d", "max_completion_tokens", False, True, "json_schema"),
    Capability(r"gpt-4o|gpt-4\.1", structured_output="json_schema"),
    Capability(r"gpt-oss", reasoning_effort=True),
    Capability(r"deepseek-(chat|reasoner|flash|v\d)", structured_output="json_object"),
    Capability(r"", reasoning_effort=None),
)


@cache
def capability_of(model: str) -> Capability:
    name = model.rpartition("/")[2].lower()
    for family in TABLE:
        if re.match(family.pattern, name):
            return family
    raise AssertionError("the last pattern fits every name")


def request_parameters(endpoint: Endpoint, schema: JsonSchema | None = None) -> dict[str, Any]:
    """The request's fields beside the messages; `schema` is the JSON schema of the answer."""
    family = capability_of(endpoint.model)
    parameters: dict[str, Any] = {
        "model": endpoint.model,
        family.token_parameter: endpoint.max_tokens,
    }
    if family.temperature:
        parameters["temperature"] = endpoint.temperature
    if endpoint.reasoning_effort:
        parameters["reasoning_effort"] = endpoint.reasoning_effort
    if schema is not None:
        parameters |= _response_format(endpoint, family, schema)
    return parameters | endpoint.extra_body


def _response_format(endpoint: Endpoint, family: Capability, schema: JsonSchema) -> dict[str, Any]:
    """The parameter that holds the answer to JSON, where the model can be held to it."""
    kind = endpoint.structured_output
    if kind == "auto":
        kind = family.structured_output
    if kind == "json_schema":
        answer = {"name": "answer", "strict": True, "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": answer}}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {}


_CODES = {
    401: "invalid_api_key",
    404: "model_not_found",
    429: "rate_limit_exceeded",
    500: "server_error",
}


class ContentPart(BaseModel):
    type: str
    text: str = ""


class ChatMessage(BaseModel):
    role: str
    content: str | list[ContentPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.type == "text")
        return self.content or ""


class StreamOptions(BaseModel):
    include_usage: bool | None = False
    """A chunk with the tokens comes before the end of the stream."""


class ChatRequest(BaseModel, hide_input_in_errors=True):
    """The fields of a chat completion request that a server here uses; all others are accepted and
    ignored."""

    model: str
    messages: list[ChatMessage]
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def last_user_text(self) -> str:
        """Text of the last message that has the role `user`; empty without one."""
        for message in reversed(self.messages):
            if message.role == "user":
                return message.text
        return ""


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = code or _CODES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def model_list(names: Iterable[str]) -> dict[str, Any]:
    """The answer to GET /v1/models."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "qinglan"} for name in names]
    return {"object": "list", "data": data}


def completion_body(
    identity: str, created_s: int, model: str, message: dict[str, Any], *, is_chunk: bool = False
) -> dict[str, Any]:
    """A completion of one choice, or the only chunk of a stream."""
    choice = {
        "index": 0,
        "delta" if is_chunk else "message": message,
        "logprobs": None,
        "finish_reason": "stop",
    }
    return {
        "id": f"chatcmpl-{identity}",
        "object": "chat.completion.chunk" if is_chunk else "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [choice],
    }
