"""The stand-in models of all worlds over OpenAI chat completions.

Start it with `python -m qinglan.simulators.teacher_server --port 8002`.
"""

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, ValidationError

from qinglan.simulators.batch_routes import mount_batches
from qinglan.simulators.batch_store import BatchStore
from qinglan.simulators.domains import ReasonedAnswer, SimulatedModel, simulated_models
from qinglan.simulators.server import argument_parser, error_body, serve

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


class SimulatedModels:
    """The models by name, and what they answer: the live route and the batches are the same to them."""

    def __init__(self, seed: int = 7) -> None:
        self._seed = seed
        self.models: dict[str, SimulatedModel] = {
            model: domain.MODELS[model] for model, domain in simulated_models().items()
        }

    def complete(self, request: ChatRequest) -> tuple[int, dict[str, Any]]:
        """HTTP status and body."""
        if request.model not in self.models:
            message = f"The model `{request.model}` does not exist; there are {', '.join(self.models)}"
            return 404, error_body(message, "model_not_found")
        if request.stream:
            return 400, error_body("the stand-ins don't stream", "invalid_request_error")
        text = next((m.content for m in reversed(request.messages) if m.role == "user"), "")
        said = self.models[request.model](text, self._seed if request.seed is None else request.seed)
        return 200, _completion(request, said)

    def complete_line(self, body: object) -> tuple[int, dict[str, Any]]:
        """The same for the body of a batch's line, which nobody has checked yet."""
        try:
            return self.complete(ChatRequest.model_validate(body))
        except ValidationError as error:
            return 400, _invalid(error.errors()[0], error.errors()[0]["loc"])


def create_app(seed: int = 7, batches: BatchStore | None = None) -> FastAPI:
    """The service; `seed` decides the teacher's whims unless a request brings its own."""
    app = FastAPI(title="Qinglan's embedded teacher")
    simulated_models = SimulatedModels(seed)
    if batches:
        mount_batches(app, batches)

    @app.exception_handler(RequestValidationError)
    async def refuse(_request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse(_invalid(first, first["loc"][1:]), 400)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "qinglan"} for name in simulated_models.models
        ]
        return {"object": "list", "data": data}

    @app.post("/v1/chat/completions")
    async def complete(request: ChatRequest) -> JSONResponse:
        status, body = simulated_models.complete(request)
        return JSONResponse(body, status)

    return app


def batch_store(options: argparse.Namespace) -> BatchStore:
    """Batches that are answered as the live route answers, with faults at the same rate."""
    simulated_models = SimulatedModels(options.seed)
    return BatchStore(
        simulated_models.complete_line,
        simulated_models.models,
        batch_s=options.batch_seconds,
        window_s=options.batch_window_seconds,
        fault_rate=options.fault_rate,
        seed=options.seed,
    )


def _invalid(error: Mapping[str, Any], location: Sequence[int | str]) -> dict[str, Any]:
    where = ".".join(str(part) for part in location)
    return error_body(f"{where}: {error['msg']}", "invalid_request_error")


def _completion(request: ChatRequest, said: str | ReasonedAnswer) -> dict[str, Any]:
    """Thoughts are paid for as what is said is; who has none sends neither them nor their count."""
    answer, reasoning = said if isinstance(said, ReasonedAnswer) else (said, "")
    prompt = sum(_count_tokens(m.content) + TOKENS_PER_MESSAGE for m in request.messages)
    thought = _count_tokens(reasoning)
    completion = _count_tokens(answer) + thought
    digest = hashlib.sha256("\n".join(m.content for m in request.messages).encode()).hexdigest()
    message = {"role": "assistant", "content": answer, "refusal": None}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    details = {"completion_tokens_details": {"reasoning_tokens": thought}} if reasoning else {}
    message |= {"reasoning_content": reasoning} if reasoning else {}
    return {
        "id": f"chatcmpl-{digest[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": usage | details,
    }


def _count_tokens(text: str) -> int:
    return math.ceil(len(text) * TOKENS_PER_CHARACTER)


def main() -> int:
    """Parse the arguments and serve."""
    parser = argument_parser("Teacher and judge stand-ins behind the OpenAI protocol.")
    parser.add_argument("--batch-seconds", type=float, default=2.0, help="how long a batch takes")
    parser.add_argument("--batch-window-seconds", type=float, default=86_400.0, help="after which a batch expires")
    options = parser.parse_args()
    serve(create_app(options.seed, batch_store(options)), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
