"""Teacher and judge stand-ins over OpenAI chat completions: `python -m qinglan.embedded.teacher_server --port 8002`."""

import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from qinglan.embedded.serving import argument_parser, error_body, serve
from qinglan.embedded.teacher import judge, rewrite

REWRITER = "standin-rewriter"
JUDGE = "standin-judge"

TOKENS_PER_CHARACTER = 0.8
"""Roughly what current tokenizers need for Chinese."""
TOKENS_PER_MESSAGE = 4


class ChatMessage(BaseModel):
    """One message; the stand-ins read the last of the user's."""

    role: str
    content: str


class ChatRequest(BaseModel):
    """As much of a chat completion request as the stand-ins heed; the rest is accepted and ignored."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    seed: int | None = None
    stream: bool = False


def create_app(seed: int = 7) -> FastAPI:
    """The service; `seed` decides the teacher's whims unless a request brings its own."""
    app = FastAPI(title="Qinglan's embedded teacher")
    speakers: dict[str, Callable[[str, int], str]] = {
        REWRITER: rewrite,
        JUDGE: lambda text, _seed: json.dumps(judge(text)._asdict(), ensure_ascii=False),
    }

    @app.exception_handler(RequestValidationError)
    async def refuse(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        return JSONResponse(error_body(f"{where}: {first['msg']}", "invalid_request_error"), 400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "qinglan"} for name in speakers]
        return {"object": "list", "data": data}

    @app.post("/v1/chat/completions")
    async def complete(request: ChatRequest) -> JSONResponse:
        if request.model not in speakers:
            message = f"The model `{request.model}` does not exist; there are {', '.join(speakers)}"
            return JSONResponse(error_body(message, "model_not_found"), 404)
        if request.stream:
            return JSONResponse(error_body("the stand-ins don't stream", "invalid_request_error"), 400)
        text = next((m.content for m in reversed(request.messages) if m.role == "user"), "")
        answer = speakers[request.model](text, seed if request.seed is None else request.seed)
        return JSONResponse(_completion(request, answer))

    return app


def _completion(request: ChatRequest, answer: str) -> dict[str, Any]:
    prompt = sum(_count_tokens(m.content) + TOKENS_PER_MESSAGE for m in request.messages)
    completion = _count_tokens(answer)
    digest = hashlib.sha256("\n".join(m.content for m in request.messages).encode()).hexdigest()
    message = {"role": "assistant", "content": answer, "refusal": None}
    return {
        "id": f"chatcmpl-{digest[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }


def _count_tokens(text: str) -> int:
    return math.ceil(len(text) * TOKENS_PER_CHARACTER)


def main() -> int:
    """Parse the arguments and serve."""
    options = argument_parser("Teacher and judge stand-ins behind the OpenAI protocol.").parse_args()
    serve(create_app(options.seed), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
