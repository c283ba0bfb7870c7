"""Teacher, judge and RAG outside the site, with books of the answers and faults for each.

`python -m fault_matrix.services KNOWLEDGE_BASE` in benchmarks/ prints its address. `/teacher/v1`,
`/judge/v1` and `/rag/retrieve` are the services; `/books`, `/switch`, `/keep` and `/reset` are the
benchmark's.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

from night_site.services import Billed, Books, serve_on_free_port
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from qinglan.clients.openai_protocol import completion_body
from qinglan.simulators import chat_server, rag_server
from qinglan.simulators.retriever import Retriever, load_documents

_GIGABYTE = 10**9
_BLOCK = b"x" * 65_536
_ERRORS = "30% errors"
_ERROR_SHARE = 0.3


class FaultyBooks(Books):
    """Every answer with status 200 that teacher or judge sent, as a provider would charge for it.

    An answer that a fault spoils, its service's own or one of the network, is paid too. It explains
    why the question is asked again, and so does a blank answer, after which Qinglan tries once
    more: a repeat counts as paid twice only where an answer to the same question had arrived before
    it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, str] = {}
        """The fault of each service; empty while it is well."""
        self.arrived = set[str]()
        self.repeated = 0
        self.paid_twice = 0
        self._arrived_by_kind: dict[str, set[str]] = {}

    def note(self, service: str, question: str, answer: bytes) -> None:
        if question in self.answered or question in self.arrived:
            self.repeated += 1
        if question in self.arrived:
            self.paid_twice += 1
        super().note(service, question, answer)
        # Where a share of the answers are errors, those are not paid; what is paid is well.
        is_well = self.faults.get(service, "") in ("", _ERRORS)
        if is_well and json.loads(answer)["choices"][0]["message"]["content"]:
            self.arrived.add(question)

    def keep(self, kind: str) -> None:
        """Keep the answers that arrived until now, for the trials that begin with this site."""
        self._arrived_by_kind[kind] = set(self.arrived)

    def reset(self, kind: str) -> None:
        """Begin anew, with the answers that had arrived when this site was prepared."""
        self.answered.clear()
        self.faults = {}
        self.arrived = set(self._arrived_by_kind.get(kind, ()))
        self.repeated = 0
        self.paid_twice = 0

    def stats(self) -> dict[str, Any]:
        return {
            "paid": self.answered.total(),
            "repeated": self.repeated,
            "paid_twice": self.paid_twice,
        }


class Faulty:
    """ASGI middleware: a service, with the fault that is switched on for it.

    A fault of the network is the proxy's to make: the service answers as ever.
    """

    def __init__(self, service: str, app: ASGIApp, books: FaultyBooks) -> None:
        self._service = service
        self._well = app
        self._books = books
        self._rng = Random(7)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._books.faults.get(self._service, "")
        is_spared = fault == _ERRORS and self._rng.random() >= _ERROR_SHARE
        if scope["type"] != "http" or not fault or is_spared:
            await self._well(scope, receive, send)
        else:
            await self._spoil(fault)(scope, receive, send)

    def _spoil(self, fault: str) -> ASGIApp:
        """The app that answers in the service's place."""
        if fault == _ERRORS:
            return JSONResponse({"error": {"message": "internal error"}}, 500)
        if fault == "1 GB body":
            return StreamingResponse(_gigabyte(), media_type="application/json")
        if fault == "wrong shape":
            return JSONResponse({"answer": 42})
        if fault == "blank" and self._service == "rag":
            return Response()
        if fault == "blank":
            message = {"role": "assistant", "content": ""}
            return JSONResponse(completion_body("0", 0, "m", message))
        return self._well


async def _gigabyte() -> AsyncIterator[bytes]:
    """A JSON text that does not end before a gigabyte."""
    yield b'{"choices": "'
    for _ in range(_GIGABYTE // len(_BLOCK)):
        yield _BLOCK
        # Gives way, so that the server notices that its client has gone.
        await asyncio.sleep(0)
    yield b'"}'


def create_app(knowledge_base: Path) -> Starlette:
    """The services and the benchmark's own addresses as one app."""
    books = FaultyBooks()

    async def read_books(_: Request) -> JSONResponse:
        return JSONResponse(books.stats())

    async def switch(request: Request) -> JSONResponse:
        for name, value in json.loads(await request.body()).items():
            setattr(books, name, value)
        return JSONResponse({})

    async def keep(request: Request) -> JSONResponse:
        books.keep((await request.json())["kind"])
        return JSONResponse({})

    async def reset(request: Request) -> JSONResponse:
        books.reset((await request.json())["kind"])
        return JSONResponse({})

    def billed(name: str) -> Billed:
        return Billed(Faulty(name, chat, books), books, name)

    rag = rag_server.create_app(Retriever(load_documents(knowledge_base)))
    chat = chat_server.create_app()
    return Starlette(
        routes=[
            Route("/books", read_books),
            Route("/switch", switch, methods=["POST"]),
            Route("/keep", keep, methods=["POST"]),
            Route("/reset", reset, methods=["POST"]),
            Mount("/teacher", app=billed("teacher")),
            Mount("/judge", app=billed("judge")),
            Mount("/rag", app=Faulty("rag", rag, books)),
        ]
    )


if __name__ == "__main__":
    serve_on_free_port(create_app(Path(sys.argv[1])))
