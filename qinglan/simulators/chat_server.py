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
_ID_CHARS = 24


class SeededRequest(ChatRequest):
    messages: list[ChatMessage] = Field(min_length=1)
    seed: int | None = None
    """Decides the simulated model's random errors."""


def complete(
    request: SeededRequest, default_seed: int = 7, names: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    """Answer the last message of the user, with an HTTP status and a body.

    Args:
        request: the chat completion request.
        default_seed: decides the model's random errors where the request has no seed.
        names: further names of models, each with the simulated model that it stands for.
    """
    domains = simulated_models()
    model_name = (names or {}).get(request.model, request.model)
    if model_name not in domains:
        problem = f"The model `{model_name}` does not exist; there are {', '.join(domains)}"
        return 404, error_body(404, problem)
    if request.stream:
        return 400, error_body(400, "the simulator can't stream")
    simulated_model = domains[model_name].models[model_name]
    seed = default_seed if request.seed is None else request.seed
    answer = simulated_model(undelimited(request.last_user_text), seed)
    if not isinstance(answer, ReasonedAnswer):
        answer = ReasonedAnswer(answer, reasoning="")
    message = {"role": "assistant", "content": answer.answer, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    body = completion_body(_completion_id(request), int(time.time()), request.model, message)
    body["usage"] = _usage(request, answer)
    return 200, body


def _completion_id(request: SeededRequest) -> str:
    conversation = "\n".join(message.text for message in request.messages)
    return hashlib.sha256(conversation.encode()).hexdigest()[:_ID_CHARS]


def _usage(request: SeededRequest, answer: ReasonedAnswer) -> dict[str, Any]:
    """The token counts of a call, as OpenAI's protocol names them."""
    prompt_tokens = sum(
        _count_tokens(message.text) + TOKENS_PER_MESSAGE for message in request.messages
    )
    reasoning_tokens = _count_tokens(answer.reasoning)
    completion_tokens = _count_tokens(answer.answer) + reasoning_tokens
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if answer.reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def _count_tokens(text: str) -> int:
    return math.ceil(len(text) * TOKENS_PER_CHARACTER)


def create_app(seed: int = 7, names: Mapping[str, str] | None = None) -> FastAPI:
    """The service.

    Args:
        seed: decides the simulated models' random errors unless a request brings its own.
        names: further names of models; see `complete`.
    """
    app = FastAPI(title="Qinglan's simulated models")

    @app.exception_handler(RequestValidationError)
    async def refuse(_request: Request, error: RequestValidationError) -> JSONResponse:
        first_problem = error.errors()[0]
        # The location begins with "body", which the caller knows.
        field = ".".join(map(str, first_problem["loc"][1:]))
        return JSONResponse(error_body(400, f"{field}: {first_problem['msg']}"), 400)

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


def _name_and_model(argument: str) -> tuple[str, str]:
    name, _, model = argument.partition("=")
    return name, model


def main() -> int:
    parser = argument_parser("Simulated teachers and judges behind OpenAI's protocol.")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        type=_name_and_model,
        help="a further name of a model, such as gpt-5=simulated-rewriter; "
        "may be given several times",
    )
    options = parser.parse_args()
    serve(create_app(options.seed, dict(options.also)), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
