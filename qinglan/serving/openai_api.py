"""What the router reads of a chat completion request, and how its answers look."""

import json
import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from qinglan.clients.openai_protocol import ChatRequest, completion_body
from qinglan.data.sources.records import without_illegal
from qinglan.recipes import Input, identifying
from qinglan.rows import Row, row_id
from qinglan.serving.request_handler import ServedAnswer

CHAMPION = "champion"
"""Model name that always means the one in service."""


class RefusedError(Exception):
    """A request that can't be answered, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RouterRequest(ChatRequest):
    model: str = CHAMPION
    profile: str | None = None
    """What is known of the user (`extra_body` of the openai client)."""
    history: str | None = None
    """A summary of what was said before."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """What else the recipe needs, by `Input.name`."""

    def question(self, tenant: str, inputs: Sequence[Input] = ()) -> Row:
        """The last user message with the recipe's inputs, as a row like those of the training, without its labels."""
        query, profile, history = (
            without_illegal(text or "").strip() for text in (self.last_user_text, self.profile, self.history)
        )
        if not query:
            raise RefusedError(400, "messages: there is no user message with text; the last one is the question")
        given = {name: text for name, value in self.inputs.items() if (text := without_illegal(value).strip())}
        known = {each.name for each in inputs}
        if unknown := [name for name in given if name not in known]:
            names = ", ".join(sorted(known)) or "none"
            raise RefusedError(400, f"inputs: there is no `{unknown[0]}` here, but {names}")
        if missing := [each for each in inputs if each.is_asked and each.name not in given]:
            raise RefusedError(400, f"inputs.{missing[0].name}: is missing or empty; it is part of what is asked")
        return Row(
            id=row_id(tenant, query, profile, history, identifying(given, inputs)),
            tenant=tenant,
            query=query,
            profile=profile,
            history=history,
            inputs=given,
            source="router",
        )


def answer_body(served: ServedAnswer, content: str, request: RouterRequest) -> bytes:
    """The answer as one JSON object, or as server-sent events: one chunk, and the end."""
    stream = bool(request.stream)
    message = {"role": "assistant", "content": content} | ({} if stream else {"refusal": None})
    identity = f"{served.row_id}{time.time_ns():x}"
    body = completion_body(identity, int(served.at), request.model, message, is_chunk=stream)
    answer = to_json(body | {"qinglan": details_of(served)})
    return b"data: " + answer + b"\n\ndata: [DONE]\n\n" if stream else answer


def details_of(served: ServedAnswer) -> dict[str, str | None]:
    return {
        "source": served.source,
        "reason": served.reason or None,
        "role": served.role,
        "version": served.version or None,
        "row_id": served.row_id,
    }


def to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
