"""A tiny HTTP service with a test's own answers, and answers in the form of chat and RAG."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

PRICE = {"input_per_million_usd": 1.0, "output_per_million_usd": 10.0}
SIMULATED = {
    "teacher": {"model": "simulated-rewriter"},
    "judge": {"model": "simulated-judge"},
    "prices": dict.fromkeys(("simulated-rewriter", "simulated-judge"), PRICE),
}
"""Sections of a profile whose chat services are simulated."""
Reply = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None
"""Status, body (bytes, or an iterator of them, as they are, else JSON), headers; None drops the
connection."""
Script = Callable[[dict[str, Any]], Reply]


def script_of(*replies: Any) -> Script:
    """One reply after the other, the last one for good."""
    queue = list(replies)

    def reply(_: dict[str, Any]) -> Any:
        return queue.pop(0) if len(queue) > 1 else queue[0]

    return reply


def trickle() -> Iterator[bytes]:
    """A body that never ends, a byte at a time."""
    while True:
        yield b" "
        time.sleep(0.02)


class FakeService:
    """A real HTTP server on loopback. Remembers the bodies and headers that it was sent."""

    REPLY_HEADERS: ClassVar[dict[str, str]] = {
        "content-type": "application/json",
        "retry-after-ms": "1",
    }

    def __init__(self, script: Script | None = None, port: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self._script = script
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                body = json.loads(self.rfile.read(length) or b"{}")
                service.bodies.append(body)
                service.headers.append(
                    {name.lower(): value for name, value in self.headers.items()}
                )
                self._answer(service.answer(self.command, self.path, body))

            do_GET = do_POST  # noqa: N815

            def _answer(self, reply: Reply) -> None:
                if reply is None:
                    self.close_connection = True
                    return
                status, body, *more = reply
                if isinstance(body, Iterator):
                    self._stream(status, body)
                    return
                is_json = not isinstance(body, bytes)
                content = json.dumps(body, ensure_ascii=False).encode() if is_json else body
                headers = service.REPLY_HEADERS | (more[0] if more else {})
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _stream(self, status: int, parts: Iterator[bytes]) -> None:
                """Send parts as long as there are any: the body has no length."""
                self.send_response(status)
                self.end_headers()
                self.close_connection = True
                for part in parts:
                    self.wfile.write(part)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

            def handle_error(self, *_: Any) -> None:
                """Say nothing of a client that gave up waiting."""

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Reply:
        """The reply to a request; subclasses answer by method and path."""
        assert self._script
        return self._script(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def asked(body: dict[str, Any]) -> str:
    """The user's message in a chat request, as a model reads it that keeps to the delimiters."""
    # The services of other processes start without it.
    from qinglan.recipes.prompting import undelimited

    return undelimited(body["messages"][-1]["content"])


def completion(text: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion as OpenAI sends it."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": text, **message},
    }
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }


def recall(*passages: tuple[str | None, float]) -> dict[str, Any]:
    """A RAG's answer: (id, score) per passage."""
    hits = [
        {"id": document_id, "content": f"正文{document_id}", "reranker_score": score}
        for document_id, score in passages
    ]
    return {"data": {"recall": hits}}
