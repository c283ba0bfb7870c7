"""OpenAI's chat completions from a server's side, as the router and the simulated models speak them."""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded", 500: "server_error"}


class ContentPart(BaseModel):
    type: str
    text: str = ""


class ChatMessage(BaseModel):
    role: str
    content: str | list[ContentPart] | None = None

    @property
    def text(self) -> str:
        """All text of the content."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content if part.type == "text")
        return self.content or ""


class ChatRequest(BaseModel):
    """The fields of a chat completion request that a server here uses; all others are accepted and ignored."""

    model_config = ConfigDict(hide_input_in_errors=True)

    model: str
    messages: list[ChatMessage]
    stream: bool | None = False

    @property
    def last_user_text(self) -> str:
        """Of the last message that has the role `user`; empty without one."""
        return next((message.text for message in reversed(self.messages) if message.role == "user"), "")


def first_problem(error: ValidationError) -> str:
    """The first reason why a request was refused, in one line and without its content."""
    problem = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, problem['loc'])) or 'the body'}: {problem['msg']}"


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
    return {
        "id": f"chatcmpl-{identity}",
        "object": "chat.completion.chunk" if is_chunk else "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [
            {"index": 0, "delta" if is_chunk else "message": message, "logprobs": None, "finish_reason": "stop"}
        ],
    }
