"""What a batch API sends and is sent: as much of it as is used, and nothing trusted to be there."""

import json
import re
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from qinglan.clients.chat import Completion, Request

ENDPOINT = "/v1/chat/completions"
_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")


class _Counts(BaseModel):
    completed: int | None = 0
    failed: int | None = 0


class _Problem(BaseModel):
    code: str | None = None


class _Problems(BaseModel):
    data: list[_Problem] | None = None


class BatchState(BaseModel):
    """Where a batch stands."""

    id: str
    status: str
    input_file_id: str = ""
    created_at: float | None = None
    metadata: dict[str, str] | None = None
    request_counts: _Counts | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _Problems | None = None

    @property
    def ended(self) -> bool:
        """Whether it will change no more."""
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def counts(self) -> tuple[int, int]:
        """Requests answered and failed so far."""
        counts = self.request_counts or _Counts()
        return counts.completed or 0, counts.failed or 0

    @property
    def result_files(self) -> list[str]:
        """What has answers or errors in it, the answers first."""
        return [each for each in (self.output_file_id, self.error_file_id) if each]

    @property
    def missing_reason(self) -> str:
        """The reason of requests that no file of an ended batch mentions."""
        if self.status == "completed":
            return "batch_no_answer"
        if self.status == "failed" and self.errors and self.errors.data:
            return _reason(self.errors.data[0].code)
        return f"batch_{self.status}"


class Page(BaseModel):
    """Some batches, newest first."""

    data: list[BatchState] = []
    has_more: bool | None = False


class StoredFile(BaseModel):
    """A file that was taken."""

    id: str


@dataclass(frozen=True)
class Result:
    """One line of an output or error file: an answer, or the reason why there is none."""

    request_hash: str
    completion: Completion | None
    reason: str


class _Response(BaseModel):
    status_code: int
    body: Any = None


class _ResultLine(BaseModel):
    custom_id: str
    response: _Response | None = None
    error: _Problem | None = None


def request_line(request: Request) -> bytes:
    """A request as a line of an input file."""
    line = {"custom_id": request.request_hash, "method": "POST", "url": ENDPOINT, "body": request.body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def parse_result(line: bytes) -> Result | None:
    """None for a line that names no request."""
    try:
        found = _ResultLine.model_validate_json(line)
    except ValidationError:
        return None
    if found.error is not None or found.response is None:
        return Result(found.custom_id, None, _reason(found.error.code if found.error else None))
    if found.response.status_code != 200:
        return Result(found.custom_id, None, f"http_{found.response.status_code}")
    try:
        return Result(found.custom_id, Completion.model_validate(found.response.body), "")
    except ValidationError:
        return Result(found.custom_id, None, "teacher_bad_response")


def _reason(code: str | None) -> str:
    """A service's code as a reason; whatever doesn't look like a code is not repeated."""
    if code is None or not _CODE.fullmatch(code):
        return "batch_failed"
    return code if code.startswith("batch_") else f"batch_{code}"
