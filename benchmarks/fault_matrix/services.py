"""Teacher, judge and RAG outside the site, with books of the answers, and faults that can be switched on for each.

`python -m fault_matrix.services KNOWLEDGE_BASE` in benchmarks/ prints its address. `/teacher/v1`, `/judge/v1` and
`/rag/retrieve` are the services; `/books`, `/switch` and `/reset` are the benchmark's.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

from night_site.services import Billed, Books, serve_on_free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from qinglan.clients.openai_protocol import completion_body
from qinglan.simulators import chat_server, rag_server
from qinglan.simulators.retriever import Retriever, load_documents

_GIGABYTE, _BLOCK = 10**9, b"x" * 65_536
_ERROR_SHARE = 0.3


class FaultyBooks(Books):
    """Books, and the fault of each service, by its name; empty while it is well."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, str] = {}


class Faulty:
    """ASGI middleware: a service, with the fault that is switched on for it.

    A fault of the network, which the benchmark's proxy makes, spoils every answer: meanwhile none is in the books.
    """

    def __init__(self, service: str, app: ASGIApp, books: FaultyBooks) -> None:
        self._service, self._books, self._rng = service, books, Random(7)
        self._unbilled, self._well = app, app if service == "rag" else Billed(app, books)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._books.faults.get(self._service, "")
        is_spared = fault == "30% errors" and self._rng.random() >= _ERROR_SHARE
        if scope["type"] != "http" or not fault or is_spared:
            await self._well(scope, receive, send)
        else:
            await self._spoil(fault)(scope, receive, send)

    def _spoil(self, fault: str) -> ASGIApp:
        if fault == "30% errors":
            return JSONResponse({"error": {"message": "internal error"}}, 500)
        if fault == "1 GB body":
            return StreamingResponse(_gigabyte(), media_type="application/json")
        if fault == "wrong shape":
            return JSONResponse({"answer": 42})
        if fault == "blank":
            message = {"role": "assistant", "content": ""}
            return Response() if self._service == "rag" else JSONResponse(completion_body("0", 0, "m", message))
        return self._unbilled


async def _gigabyte() -> AsyncIterator[bytes]:
    """A JSON text that does not end before a gigabyte."""
    yield b'{"choices": "'
    for _ in range(_GIGABYTE // len(_BLOCK)):
        yield _BLOCK
        await asyncio.sleep(0)  # so that the server notices that its client has gone
    yield b'"}'


def create_app(knowledge_base: Path) -> Starlette:
    books = FaultyBooks()

    async def read_books(_: Request) -> JSONResponse:
        return JSONResponse(books.stats())

    async def switch(request: Request) -> JSONResponse:
        for name, value in json.loads(await request.body()).items():
            setattr(books, name, value)
        return JSONResponse({})

    async def reset(_: Request) -> JSONResponse:
        books.answered.clear()
        books.faults = {}
        return JSONResponse({})

    rag = rag_server.create_app(Retriever(load_documents(knowledge_base)))
    chat = chat_server.create_app()
    return Starlette(
        routes=[
            Route("/books", read_books),
            Route("/switch", switch, methods=["POST"]),
            Route("/reset", reset, methods=["POST"]),
            Mount("/teacher", app=Faulty("teacher", chat, books)),
            Mount("/judge", app=Faulty("judge", chat, books)),
            Mount("/rag", app=Faulty("rag", rag, books)),
        ]
    )


if __name__ == "__main__":
    serve_on_free_port(create_app(Path(sys.argv[1])))
