"""An OpenAI-compatible server that answers after a fixed time: the ruler of the benchmark.

    python latency_server.py PORT

A raw asyncio protocol, because a web framework would take a core away from the clients that it
measures: an answer costs next to nothing. It knows what was asked how often and what was answered
how often, when the first request came and the last answer left, and how late its own answers were.
Whether a request fails is a hash of seed, question and attempt: the same in every run, whatever the
order.

`POST /reset` takes `latency_s`, `fault_share` (in thirds: 429 at once with Retry-After: 1, 500, no
answer at all) and `seed`; `GET /stats` gives the counts since then.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections import Counter
from typing import Any

PROMPT_TOKENS = 250
COMPLETION_TOKENS = 25
MODEL = "bench-teacher"
_COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "?"}}
    ],
    "usage": {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": COMPLETION_TOKENS,
        "total_tokens": PROMPT_TOKENS + COMPLETION_TOKENS,
    },
}
# The JSON around an answer's text is made once.
_BEFORE_TEXT, _AFTER_TEXT = json.dumps(_COMPLETION).split("?")
_MODELS = json.dumps(
    {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "b"}]}
)
_KINDS = ("rate_limited", "server_error", "hang")


class Site:
    """Settings and counts, shared by all connections."""

    def __init__(self) -> None:
        self.reset({})

    def reset(self, settings: dict[str, Any]) -> None:
        """Count anew, with these settings."""
        self.latency_s = float(settings.get("latency_s", 0.2))
        self.fault_share = float(settings.get("fault_share", 0))
        self.seed = int(settings.get("seed", 0))
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.in_flight = 0
        self.max_in_flight = 0
        self.first_s = 0.0
        self.last_s = 0.0
        self.late_s: list[float] = []
        self.cpu_start_s = time.process_time()

    def fault_of(self, question: str) -> str | None:
        """The fault of this attempt at this question; None if it is answered."""
        self.asked[question] += 1
        if not self.fault_share:
            return None
        key = f"{self.seed}\x1f{self.asked[question]}\x1f{question}".encode()
        fraction = int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64
        if fraction >= self.fault_share:
            return None
        return _KINDS[int(3 * fraction / self.fault_share)]

    def stats(self) -> dict[str, Any]:
        """The counts; seconds are of the system's monotonic clock."""
        late_s = sorted(self.late_s) or [0.0]
        return {
            "calls": sum(self.asked.values()),
            "questions": len(self.asked),
            "answered": sum(self.answered.values()),
            "answered_questions": len(self.answered),
            "answered_again": sum(self.answered.values()) - len(self.answered),
            **{kind: self.outcomes[kind] for kind in (*_KINDS, "abandoned", "refused")},
            "max_in_flight": self.max_in_flight,
            "first_s": self.first_s,
            "last_s": self.last_s,
            "late_ms_p50": 1000 * late_s[len(late_s) // 2],
            "late_ms_p99": 1000 * late_s[int(0.99 * (len(late_s) - 1))],
            "cpu_s": time.process_time() - self.cpu_start_s,
        }


class Connection(asyncio.Protocol):
    """One keep-alive connection; a client sends the next request after the answer."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.loop = asyncio.get_running_loop()
        self.buffer = b""
        self.waiting: dict[int, tuple[asyncio.TimerHandle | None, str]] = {}
        self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection's way back."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the answers that were on their way: who hangs up would have paid for them."""
        del exc
        for timer, kind in self.waiting.values():
            self.site.in_flight -= 1
            if timer:
                timer.cancel()
            if kind != "hang":
                self.site.outcomes["abandoned"] += 1
        self.waiting.clear()

    def data_received(self, data: bytes) -> None:
        """Take the requests that have come in whole; the rest waits for more data."""
        self.buffer += data
        # One read may hold several requests, or a part of one.
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"\r\ncontent-length:")
            length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            body_start = end + 4
            body_end = body_start + length
            if len(self.buffer) < body_end:
                return
            body = self.buffer[body_start:body_end]
            self.buffer = self.buffer[body_end:]
            self.route(head[: head.find(b"\r\n")], body)

    def route(self, line: bytes, body: bytes) -> None:
        """Answer one whole request, by its first line."""
        if line.startswith(b"post /v1/chat/completions"):
            self.complete(body)
        elif line.startswith(b"get /stats"):
            self.send(200, json.dumps(self.site.stats()))
        elif line.startswith(b"post /reset"):
            self.site.reset(json.loads(body or b"{}"))
            self.send(200, "{}")
        elif line.startswith(b"get /v1/models"):
            self.send(200, _MODELS)
        else:
            self.send(404, '{"error":{"message":"no such page"}}')

    def complete(self, body: bytes) -> None:
        """Answer later, or fail as drawn."""
        site = self.site
        messages = json.loads(body)["messages"]
        # Curator asks so for the rate-limit headers.
        if not messages:
            site.outcomes["refused"] += 1
            self.send(400, '{"error":{"message":"no messages"}}')
            return
        question = messages[-1]["content"]
        site.first_s = site.first_s or time.monotonic()
        fault = site.fault_of(question)
        if fault:
            site.outcomes[fault] += 1
        if fault == "rate_limited":
            error = '{"error":{"message":"slow down","code":"rate_limit"}}'
            self.send(429, error, "retry-after: 1\r\n")
            return
        site.in_flight += 1
        site.max_in_flight = max(site.max_in_flight, site.in_flight)
        self.number += 1
        if fault == "hang":
            # Without a timer: no answer will ever be due.
            self.waiting[self.number] = (None, "hang")
            return
        due = self.loop.time() + site.latency_s
        timer = self.loop.call_at(due, self.answer, self.number, question, fault, due)
        self.waiting[self.number] = (timer, fault or "")

    def answer(self, number: int, question: str, fault: str | None, due: float) -> None:
        """Send the answer that is due."""
        site = self.site
        del self.waiting[number]
        site.in_flight -= 1
        site.late_s.append(self.loop.time() - due)
        if fault:
            self.send(500, '{"error":{"message":"something broke"}}')
            return
        site.answered[question] += 1
        text = json.dumps(question.rpartition("\n")[2][-40:], ensure_ascii=False)[1:-1]
        self.send(200, f"{_BEFORE_TEXT}{text}{_AFTER_TEXT}")
        site.last_s = time.monotonic()

    def send(self, status: int, text: str, headers: str = "") -> None:
        """Send a JSON answer; the connection stays open."""
        body = text.encode()
        head = (
            f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)


async def serve(port: int) -> None:
    """Serve until killed; the first line of the output is the port."""
    site = Site()
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(site), "127.0.0.1", port, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
