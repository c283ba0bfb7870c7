"""A simulator of OpenAI's files and batches beside the chat server, kept in memory.

A batch moves by the clock: its status is computed at each request, and a line's answer is that of
the chat server. Lines fail at the given rate; those that a cancelled or expired batch never reached
are in its error file, as at OpenAI.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from math import inf
from random import Random
from typing import Annotated, Any, Literal, TypeVar
from uuid import uuid4

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from openai.types import Batch
from pydantic import BaseModel
from waiting import wait_until

from qinglan.clients.openai_protocol import error_body
from qinglan.simulators.chat_server import SeededRequest, complete, create_app
from qinglan.simulators.domains import simulated_models

_CANCELLING = 0.05
"""Share of a batch's time that it takes to cancel it."""
Stored = TypeVar("Stored")


class _InputLine(BaseModel, strict=True):
    custom_id: str
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: dict[str, Any]


def unknown_models(lines: Sequence[_InputLine]) -> list[dict[str, Any]]:
    """The errors that make a batch fail as a whole."""
    errors = []
    for number, line in enumerate(lines, 1):
        model = line.body.get("model")
        if model not in simulated_models():
            message = f"The model '{model}' does not exist."
            errors.append(
                {"code": "model_not_found", "message": message, "param": None, "line": number}
            )
    return errors


class BatchRequest(BaseModel):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


@dataclass
class SimulatedBatch:
    request: BatchRequest
    lines: list[_InputLine]
    errors: list[dict[str, Any]]
    faulty: Collection[int]
    """Indices of the lines that fail."""
    created_s: float
    takes_s: float
    window_s: float
    cancelling_s: float | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    id: str = field(default_factory=lambda: f"batch_{uuid4().hex}")

    def progress(self, now: float) -> tuple[str, int]:
        """The batch's status, and how many lines are answered, with or without an error.

        Lines are answered in the order of the file.
        """
        if self.errors:
            return "failed", 0
        age_s = now - self.created_s
        cancelled_s = inf if self.cancelling_s is None else self.cancelling_s - self.created_s
        ends = {
            self.takes_s: "completed",
            self.window_s: "expired",
            cancelled_s + _CANCELLING * self.takes_s: "cancelled",
        }
        end_s = min(ends)
        if age_s >= end_s:
            status = ends[end_s]
        else:
            status = "cancelling" if age_s >= cancelled_s else "in_progress"
        if not self.takes_s:
            return status, len(self.lines)
        worked_s = min(age_s, end_s, cancelled_s)
        return status, int(len(self.lines) * (worked_s / self.takes_s))

    def as_object(self, now: float) -> dict[str, Any]:
        status, answered = self.progress(now)
        failed = sum(index < answered for index in self.faulty)
        batch_object = self.request.model_dump() | {
            "id": self.id,
            "object": "batch",
            "created_at": int(self.created_s),
            "status": status,
            "errors": {"object": "list", "data": self.errors} if status == "failed" else None,
            "request_counts": {
                "total": len(self.lines),
                "completed": answered - failed,
                "failed": failed,
            },
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
        }
        # It has to be what the client's own type takes.
        Batch.model_validate(batch_object)
        return batch_object


class SimulatedBatchStore:
    """Files and batches of one server; safe for the threads that serve it."""

    def __init__(
        self,
        *,
        batch_s: float = 0.0,
        window_s: float = 86_400.0,
        fault_rate: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A batch takes `batch_s`, and expires where that is more than `window_s`."""
        self._clock = clock
        self._batch_s = batch_s
        self._window_s = window_s
        self._fault_rate = fault_rate
        self._rng = Random(seed)
        self._lock = threading.RLock()
        self._files: dict[str, bytes] = {}
        self._batches: dict[str, SimulatedBatch] = {}

    def _add_file(self, content: bytes) -> str:
        file_id = f"file-{uuid4().hex}"
        self._files[file_id] = content
        return file_id

    async def upload(self, request: Request) -> dict[str, Any]:
        # The standard library's mail parser reads a multipart form.
        head = f"Content-Type: {request.headers['content-type']}\r\n\r\n".encode()
        form = message_from_bytes(head + await request.body())
        (content,) = (part.get_payload(decode=True) for part in form.walk() if part.get_filename())
        return {"id": self._add_file(content), "object": "file"}

    def file(self, file_id: str) -> bytes:
        return _stored(self._files, file_id, "File")

    def content(self, file_id: str) -> Response:
        return Response(self.file(file_id), media_type="application/octet-stream")

    def delete_file(self, file_id: str) -> dict[str, Any]:
        with self._lock:
            self.file(file_id)
            del self._files[file_id]
        return {"id": file_id, "object": "file", "deleted": True}

    def create(self, request: BatchRequest) -> dict[str, Any]:
        """Start a batch; unknown models give it the status `failed`."""
        content = self.file(request.input_file_id)
        with self._lock:
            lines = [_InputLine.model_validate_json(text) for text in content.splitlines()]
            faulty = {index for index in range(len(lines)) if self._rng.random() < self._fault_rate}
            now = self._clock()
            batch = SimulatedBatch(
                request,
                lines,
                unknown_models(lines),
                faulty,
                now,
                self._batch_s,
                self._window_s,
            )
            self._batches[batch.id] = batch
            return batch.as_object(now)

    def retrieve(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is now; its files are there as soon as it has ended."""
        with self._lock:
            batch = _stored(self._batches, batch_id, "Batch")
            now = self._clock()
            if batch.progress(now)[0] in ("completed", "expired", "cancelled"):
                self._write_results(batch, now)
            return batch.as_object(now)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        with self._lock:
            batch = _stored(self._batches, batch_id, "Batch")
            now = self._clock()
            if batch.cancelling_s is None:
                batch.cancelling_s = now
            return batch.as_object(now)

    def list(
        self, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
    ) -> dict[str, Any]:
        with self._lock:
            newest = list(reversed(self._batches))
            start = newest.index(_stored(self._batches, after, "Batch").id) + 1 if after else 0
            data = [self.retrieve(batch_id) for batch_id in newest[start : start + limit]]
            return {"object": "list", "data": data, "has_more": start + limit < len(newest)}

    def _write_results(self, batch: SimulatedBatch, now: float) -> None:
        if batch.output_file_id or batch.error_file_id:
            return
        status, answered = batch.progress(now)
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        for index, line in enumerate(batch.lines):
            if index >= answered:
                bad.append(_result(line, error=_not_executed(status)))
            elif index in batch.faulty:
                bad.append(_result(line, response=(500, error_body(500, "injected failure"))))
            else:
                response = complete(SeededRequest.model_validate(line.body))
                (good if response[0] == 200 else bad).append(_result(line, response=response))
        # OpenAI promises no order.
        Random(batch.id).shuffle(good)
        batch.output_file_id = self._add_results(good)
        batch.error_file_id = self._add_results(bad)

    def _add_results(self, results: Sequence[dict[str, Any]]) -> str | None:
        if not results:
            return None
        lines = [json.dumps(result, ensure_ascii=False) + "\n" for result in results]
        return self._add_file("".join(lines).encode())


def _not_executed(status: str) -> dict[str, str]:
    return {"code": f"batch_{status}", "message": f"This request was not executed: {status}."}


def _result(
    line: _InputLine,
    *,
    response: tuple[int, dict[str, Any]] | None = None,
    error: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A line of an output or error file."""
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": error,
    }
    if response:
        status, body = response
        request_id = f"req_{uuid4().hex}"
        result["response"] = {"status_code": status, "request_id": request_id, "body": body}
    return result


def _stored(objects: Mapping[str, Stored], key: str, kind: str) -> Stored:
    if key not in objects:
        raise HTTPException(404, f"No such {kind} object: {key}")
    return objects[key]


def app_with_batches(store: SimulatedBatchStore) -> FastAPI:
    """The chat server with files and batches."""
    app = create_app()
    app.post("/v1/files")(store.upload)
    app.get("/v1/files/{file_id}/content")(store.content)
    app.delete("/v1/files/{file_id}")(store.delete_file)
    app.post("/v1/batches")(store.create)
    app.get("/v1/batches")(store.list)
    app.get("/v1/batches/{batch_id}")(store.retrieve)
    app.post("/v1/batches/{batch_id}/cancel")(store.cancel)
    return app


@contextmanager
def running_app(app: Any) -> Iterator[str]:
    """An app that is served by a thread on a free port of this machine; its address."""
    config = uvicorn.Config(app, port=0, timeout_graceful_shutdown=1, log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until("the app", lambda: server.started, look_every_s=0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
