"""OpenAI's files and batches for the stand-in teacher, kept in memory; `batch_routes` puts them on HTTP.

A batch moves by the clock: where it stands is worked out whenever somebody asks, and a line's answer is that of the
live route. Lines fail at the server's fault rate; those that a cancelled or expired batch never came to are listed in
its error file, as OpenAI lists them.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from qinglan.simulators.batch_input import Line, read_input
from qinglan.simulators.server import error_body

_VALIDATED, _ANSWERED = 0.05, 0.95
"""Shares of a batch's time after which it is validated, and all of its lines are answered."""

Complete = Callable[[object], tuple[int, dict[str, Any]]]
"""The live route without HTTP: a request's body to status and answer."""
Stored = TypeVar("Stored")


class StoreError(Exception):
    """What the service answers instead of an object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class StoredFile:
    """A file as it was sent or written."""

    content: bytes
    filename: str
    purpose: str
    created_s: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: f"file-{uuid4().hex}")

    def as_object(self) -> dict[str, Any]:
        """OpenAI's File object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": len(self.content),
            "created_at": int(self.created_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass
class StoredBatch:
    """A batch and the moments at which it changes."""

    request: BatchRequest
    lines: list[Line]
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

    @property
    def moments(self) -> dict[str, float]:
        """When each status begins, in seconds of the clock; statuses that are never reached are left out."""
        validated, answered, done = (self.created_s + share * self.takes_s for share in (_VALIDATED, _ANSWERED, 1.0))
        if self.errors:
            return {"failed": validated}
        moments = {"in_progress": validated, "finalizing": answered, "completed": done}
        expires = self.created_s + self.window_s
        if expires < done:
            moments = {name: at for name, at in moments.items() if at < expires} | {"expired": expires}
        if self.cancelling_s is not None:
            moments = {name: at for name, at in moments.items() if at <= self.cancelling_s}
            moments |= {"cancelling": self.cancelling_s}
            moments |= {"cancelled": self.cancelling_s + (1 - _ANSWERED) * self.takes_s}
        return moments

    def status(self, now: float) -> str:
        """Where the batch stands."""
        reached = [name for name, at in self.moments.items() if at <= now]
        return reached[-1] if reached else "validating"

    def lines_done(self, now: float) -> int:
        """How many lines are answered, well or badly, in the order of the file."""
        if "in_progress" not in self.moments or now < (start := self.moments["in_progress"]):
            return 0
        stopped = min(self.moments.get(name, now) for name in ("cancelling", "expired"))
        answering_s = (_ANSWERED - _VALIDATED) * self.takes_s
        share = (min(now, stopped) - start) / answering_s if answering_s else 1.0
        return int(len(self.lines) * min(1.0, share))

    def as_object(self, now: float) -> dict[str, Any]:
        """OpenAI's Batch object."""
        done = self.lines_done(now)
        failed = sum(index < done for index in self.faulty)
        stamps = {f"{name}_at": int(at) for name, at in self.moments.items() if at <= now}
        counts = {"total": len(self.lines), "completed": done - failed, "failed": failed}
        return {
            "id": self.id,
            "object": "batch",
            **self.request.model_dump(),
            "created_at": int(self.created_s),
            "expires_at": int(self.created_s + self.window_s),
            **stamps,
            "status": self.status(now),
            "errors": {"object": "list", "data": self.errors} if "failed_at" in stamps else None,
            "request_counts": counts,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
        }


class BatchStore:
    """Files and batches of one server; safe for the threads that serve it."""

    def __init__(
        self,
        complete: Complete,
        models: Collection[str],
        *,
        batch_s: float,
        window_s: float = 86_400.0,
        fault_rate: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """A batch takes `batch_s`, and expires where that is more than `window_s`."""
        self._complete, self._models, self._clock = complete, models, clock
        self._batch_s, self._window_s, self._fault_rate = batch_s, window_s, fault_rate
        self._rng = Random(seed)
        self._lock = threading.RLock()
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, StoredBatch] = {}

    def add_file(self, content: bytes, filename: str, purpose: str) -> StoredFile:
        """Keep a file."""
        stored = StoredFile(content, filename, purpose, self._clock())
        self._files[stored.id] = stored
        return stored

    def file(self, file_id: str) -> StoredFile:
        """A file by its id; 404 where there is none."""
        return _found(self._files, file_id, "File")

    def delete_file(self, file_id: str) -> None:
        """Forget a file; batches made from it go on."""
        with self._lock:
            self.file(file_id)
            del self._files[file_id]

    def create(self, request: BatchRequest) -> dict[str, Any]:
        """Start a batch; what is wrong with its lines shows as the status `failed`."""
        content = self.file(request.input_file_id).content
        with self._lock:
            lines, errors = read_input(content, self._models)
            faulty = {index for index in range(len(lines)) if self._rng.random() < self._fault_rate}
            batch = StoredBatch(request, lines, errors, faulty, self._clock(), self._batch_s, self._window_s)
            self._batches[batch.id] = batch
            return batch.as_object(self._clock())

    def retrieve(self, batch_id: str) -> dict[str, Any]:
        """Where a batch stands; its files are there as soon as it has ended."""
        with self._lock:
            batch, now = _found(self._batches, batch_id, "Batch"), self._clock()
            if batch.status(now) in ("completed", "expired", "cancelled"):
                self._write_results(batch, now)
            return batch.as_object(now)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Stop a batch where it stands; 409 where it has ended."""
        with self._lock:
            batch, now = _found(self._batches, batch_id, "Batch"), self._clock()
            if (status := batch.status(now)) not in ("validating", "in_progress", "finalizing", "cancelling"):
                raise StoreError(409, f"Cannot cancel a batch with status '{status}'.")
            if batch.cancelling_s is None:
                batch.cancelling_s = now
            return batch.as_object(now)

    def list(self, after: str | None, limit: int) -> dict[str, Any]:
        """A page, newest first."""
        with self._lock:
            newest = list(reversed(self._batches))
            start = newest.index(_found(self._batches, after, "Batch").id) + 1 if after else 0
            page = newest[start : start + limit]
            return {
                "object": "list",
                "data": [self.retrieve(batch_id) for batch_id in page],
                "first_id": page[0] if page else None,
                "last_id": page[-1] if page else None,
                "has_more": start + limit < len(newest),
            }

    def _write_results(self, batch: StoredBatch, now: float) -> None:
        if batch.output_file_id or batch.error_file_id:
            return
        good: list[dict[str, Any]] = []
        bad: list[dict[str, Any]] = []
        done = batch.lines_done(now)
        for index, line in enumerate(batch.lines):
            result = self._result(batch, index, line, batch.status(now) if index >= done else None)
            (good if (result["response"] or {}).get("status_code") == 200 else bad).append(result)
        Random(batch.id).shuffle(good)  # OpenAI promises no order
        for name, results in (("output", good), ("error", bad)):
            if results:
                stored = self.add_file(_jsonl(results), f"{batch.id}_{name}.jsonl", "batch_output")
                setattr(batch, f"{name}_file_id", stored.id)

    def _result(self, batch: StoredBatch, index: int, line: Line, ended: str | None) -> dict[str, Any]:
        result = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}
        if ended:
            return result | {"error": {"code": f"batch_{ended}", "message": f"This request was not executed: {ended}."}}
        faulty = index in batch.faulty
        status, body = (500, error_body("injected failure", "server_error")) if faulty else self._complete(line.body)
        return result | {"response": {"status_code": status, "request_id": f"req_{uuid4().hex}", "body": body}}


def _found(kept: Mapping[str, Stored], key: str, kind: str) -> Stored:
    if key not in kept:
        raise StoreError(404, f"No such {kind} object: {key}")
    return kept[key]


def _jsonl(results: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results).encode()
