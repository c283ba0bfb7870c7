"""OpenAI's chat completions as the router speaks them: what is read of a request, and how answers look."""

import json
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from qinglan.data.sources.records import without_illegal
from qinglan.recipes import Input, identifying
from qinglan.rows import Row, row_id
from qinglan.serving.records import Served

CHAMPION = "champion"
"""Model name that always means the one in service."""

_CODES = {400: "invalid_request_error", 401: "invalid_api_key", 404: "model_not_found"}


class RefusedError(Exception):
    """A request that can't be answered, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Part(BaseModel):
    type: str
    text: str = ""


class _Message(BaseModel):
    role: str
    content: str | list[_Part] | None = None


class ChatRequest(BaseModel):
    """As much of a chat completion request as counts here; the rest is accepted and ignored."""

    model_config = ConfigDict(hide_input_in_errors=True)

    model: str = CHAMPION
    messages: list[_Message]
    profile: str | None = None
    """What is known of the user (`extra_body` of the openai client)."""
    history: str | None = None
    """What was said before, in a summary."""
    inputs: dict[str, str] = {}
    """What else the recipe needs, by `Input.name`."""
    stream: bool | None = False

    def question(self, tenant: str, inputs: Sequence[Input] = ()) -> Row:
        """The last user message, as a row like those of the training.

        Args:
            inputs: the recipe's. Labels and answers that training rows bring are not asked for here.

        Raises:
            RefusedError: there is none, or an input is missing or unknown.
        """
        content = next((m.content for m in reversed(self.messages) if m.role == "user"), None)
        if isinstance(content, list):
            content = "\n".join(part.text for part in content if part.type == "text")
        query, profile, history = (
            without_illegal(text or "").strip() for text in (content, self.profile, self.history)
        )
        if not query:
            raise RefusedError(400, "messages: there is no user message with text; the last one is the question")
        further = self._inputs(inputs)
        return Row(
            id=row_id(tenant, query, profile, history, identifying(further, inputs)),
            tenant=tenant,
            query=query,
            profile=profile,
            history=history,
            inputs=further,
            source="router",
        )

    def _inputs(self, inputs: Sequence[Input]) -> dict[str, str]:
        given = {name: text for name, value in self.inputs.items() if (text := without_illegal(value).strip())}
        known = {each.name for each in inputs}
        if unknown := [name for name in given if name not in known]:
            raise RefusedError(
                400, f"inputs: there is no `{unknown[0]}` here, but {', '.join(sorted(known)) or 'none'}"
            )
        if missing := [each for each in inputs if each.is_asked and each.name not in given]:
            raise RefusedError(400, f"inputs.{missing[0].name}: is missing or empty; it is part of what is asked")
        return given


def read_request(body: bytes) -> ChatRequest:
    """The request in a body.

    Raises:
        RefusedError: it holds none.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RefusedError(400, f"{where or 'the body'}: {problem['msg']}") from None


def completion(served: Served, content: str, model: str) -> bytes:
    """The answer as one JSON object."""
    message = {"role": "assistant", "content": content, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return _json(_envelope(served, model, "chat.completion") | {"choices": [choice]})


def event_stream(served: Served, content: str, model: str) -> bytes:
    """The answer as server-sent events: one chunk, and the end."""
    delta = {"role": "assistant", "content": content}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop"}
    chunk = _json(_envelope(served, model, "chat.completion.chunk") | {"choices": [choice]})
    return b"data: " + chunk + b"\n\ndata: [DONE]\n\n"


def headers(served: Served) -> dict[str, str]:
    """What `qinglan` in the answer says, for those who don't read bodies."""
    return {f"x-qinglan-{name.replace('_', '-')}": value for name, value in _details(served).items() if value}


def error_body(status: int, message: str, code: str | None = None) -> bytes:
    """An error as OpenAI shapes it."""
    code = code or _CODES.get(status, "invalid_request_error")
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}})


def model_list(names: list[str]) -> bytes:
    """The answer to GET /v1/models."""
    return _json(
        {"object": "list", "data": [{"id": n, "object": "model", "created": 0, "owned_by": "qinglan"} for n in names]}
    )


def _details(served: Served) -> dict[str, str | None]:
    return {
        "source": served.source,
        "reason": served.reason or None,
        "role": served.role,
        "version": served.version or None,
        "row_id": served.row_id,
    }


def _envelope(served: Served, model: str, kind: str) -> dict[str, Any]:
    created = int(served.at)
    identity = f"chatcmpl-{served.row_id}{time.time_ns():x}"
    return {"id": identity, "object": kind, "created": created, "model": model, "qinglan": _details(served)}


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
