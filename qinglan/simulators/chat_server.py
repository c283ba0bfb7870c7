"""The simulated models of all domains over OpenAI's chat completions.

Start it with `python -m qinglan.simulators.chat_server --port 8002`.
"""

import hashlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import Field

from qinglan.clients.openai_protocol import (
    ChatMessage,
    ChatRequest,
    completion_body,
    error_body,
    model_list,
)
from qinglan.recipes.prompting import undelimited
from qinglan.simulators.domains import ReasonedAnswer, simulated_models
from qinglan.simulators.server import argument_parser, serve

TOKENS_PER_CHARACTER = 0.8
"""Roughly what current tokenizers need for Chinese."""
TOKENS_PER_MESSAGE = 4


class SeededRequest(ChatRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    seed: int | None = None
    """Decides the simulated model's random errors."""


def complete(
    request: SeededRequest, default_seed: int = 7, names: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of the answer to the last message of the user; `names` are further ones
    of the models."""
    domains, name = simulated_models(), (names or {}).get(request.model, request.model)
    if name not in domains:
        return 404, error_body(
            404, f"The model `{name}` does not exist; there are {', '.join(domains)}"
        )
    if request.stream:
        return 400, error_body(400, "the simulator can't stream")
    model = domains[name].models[name]
    answer = model(
        undelimited(request.last_user_text), default_seed if request.seed is None else request.seed
    )
    text, reasoning = answer if isinstance(answer, ReasonedAnswer) else (answer, "")
    prompt = sum(_count_tokens(m.text) + TOKENS_PER_MESSAGE for m in request.messages)
    completion = _count_tokens(text) + _count_tokens(reasoning)
    reply = {"role": "assistant", "content": text, "refusal": None}
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if reasoning:
        reply["reasoning_content"] = reasoning
        usage["completion_tokens_details"] = {"reasoning_tokens": _count_tokens(reasoning)}
    digest = hashlib.sha256("\n".join(m.text for m in request.messages).encode()).hexdigest()
    return 200, completion_body(digest[:24], int(time.time()), request.model, reply) | {
        "usage": usage
    }


def create_app(seed: int = 7, names: Mapping[str, str] | None = None) -> FastAPI:
    """The service; `seed` decides the simulated models' random errors unless a request brings its
    own."""
    app = FastAPI(title="Qinglan's simulated models")

    @app.exception_handler(RequestValidationError)
    async def refuse(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][1:]))
        return JSONResponse(error_body(400, f"{where}: {first['msg']}"), 400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return model_list([*simulated_models(), *(names or {})])

    @app.post("/v1/chat/completions")
    async def chat_completions(request: SeededRequest) -> JSONResponse:
        status, body = complete(request, seed, names)
        return JSONResponse(body, status)

    return app


def _count_tokens(text: str) -> int:
    return math.ceil(len(text) * TOKENS_PER_CHARACTER)


def main() -> int:
    parser = argument_parser("Simulated teachers and judges behind OpenAI's protocol.")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=MODEL", type=lambda text: text.partition("=")[::2],
        help="a further name of a model, such as gpt-5=simulated-rewriter; may be given several times",
    )  # fmt: skip
    options = parser.parse_args()
    serve(create_app(options.seed, dict(options.also)), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
