"""Teacher, judge, RAG and webhook receiver outside the site, whose books no fault there can touch.

Teacher and RAG are the simulators' own apps. Around them: a count of the answers given per request,
as a provider's bill would have it, and switches for bad times. `python services.py KNOWLEDGE_BASE`
prints its address.
"""

import asyncio
import hashlib
import json
import socket
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qinglan.simulators import chat_server, rag_server
from qinglan.simulators.retriever import Retriever, load_documents


class Books:
    """The answers that were given and paid for, and how the services behave just now."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        """Number of answers by the digest of the request's body."""
        self.notified: list[dict[str, Any]] = []
        self.latency_s = 0.05
        self.fault_share = 0.0
        self.rag_up = True
        self.rng = Random(5)

    def note(self, _service: str, question: str, _answer: bytes) -> None:
        """Write down that a service answers a request, by the digest of its body."""
        self.answered[question] += 1

    def stats(self) -> dict[str, Any]:
        """Paid answers, how many of them had been paid for before, and the webhook's messages."""
        paid = self.answered.total()
        return {"paid": paid, "paid_twice": paid - len(self.answered), "notified": self.notified}


class Billed:
    """ASGI middleware around a paid service: writes down each request once it is answered."""

    def __init__(self, app: ASGIApp, books: Books, service: str = "") -> None:
        self._app = app
        self._books = books
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        # The body is read here to know the request, and handed on by `replay`.
        body = await Request(scope, receive).body()
        await asyncio.sleep(self._books.latency_s)
        if self._books.rng.random() < self._books.fault_share:
            status = self._books.rng.choice([429, 500])
            refused = JSONResponse(
                {"error": {"message": "try again"}}, status, {"retry-after-ms": "50"}
            )
            await refused(scope, receive, send)
            return

        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        is_paid = False

        async def replay() -> Message:
            return unread.pop() if unread else await receive()

        async def noted(message: Message) -> None:
            nonlocal is_paid
            # The body is sent after the status: an answer counts once its text is on the way.
            if is_paid:
                self._books.note(self._service, hashlib.sha256(body).hexdigest(), message["body"])
            is_paid = message["type"] == "http.response.start" and message["status"] == 200
            await send(message)

        await self._app(scope, replay, noted)


class Switched:
    """ASGI middleware around the RAG: 503 while it is down."""

    def __init__(self, app: ASGIApp, books: Books) -> None:
        self._app = app
        self._books = books

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._books.rag_up:
            await Response("down for maintenance", 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def create_app(knowledge_base: Path) -> Starlette:
    """The services and the benchmark's own addresses as one app.

    `/v1` is teacher and judge, `/rag/retrieve` the RAG; `/books`, `/webhook` and `/switch` are the
    benchmark's.
    """
    books = Books()

    async def read_books(_: Request) -> JSONResponse:
        return JSONResponse(books.stats())

    async def webhook(request: Request) -> JSONResponse:
        books.notified.append(json.loads(await request.body() or b"{}"))
        return JSONResponse({"ok": True})

    async def switch(request: Request) -> JSONResponse:
        for name, value in (await request.json()).items():
            setattr(books, name, value)
        return JSONResponse({"ok": True})

    rag = rag_server.create_app(Retriever(load_documents(knowledge_base)))
    return Starlette(
        routes=[
            Route("/books", read_books),
            Route("/webhook", webhook, methods=["POST"]),
            Route("/switch", switch, methods=["POST"]),
            Mount("/rag", app=Switched(rag, books)),
            Mount("/", app=Billed(chat_server.create_app(), books)),
        ]
    )


def serve_on_free_port(app: ASGIApp) -> None:
    """Serve on a port of loopback until killed; the first line of the output is the address."""
    # Bound before the server starts, so that the address can be said at once.
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.run(sockets=[listener])


if __name__ == "__main__":
    serve_on_free_port(create_app(Path(sys.argv[1])))
