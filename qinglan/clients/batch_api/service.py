"""A batch API over the openai package: files, batches, and after which failures a batch may exist
all the same.

Creating a batch spends money and has no idempotency key, so it is never repeated blindly: after a
failure that leaves open whether there is a batch, it is looked for by the digest in its metadata.
"""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import httpx2
import openai
from openai import AsyncOpenAI
from pydantic import AliasPath, BaseModel, Field, ValidationError

from qinglan.clients.completions import Completion, Request
from qinglan.clients.limits import MOST_BODY_BYTES, BodyTooLargeError, retry_after_s
from qinglan.clients.service_errors import NOT_SENT, account_is_empty, is_final
from qinglan.errors import ConfigError, TeacherError

_ENDPOINT: Final = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
_METADATA_KEY = "qinglan"
_FILE_TIMEOUT_S = 600.0
_READ_WITHIN_S = 7200.0
"""Limit for all of a result file: time for 700 MB on a line of 100 kB a second."""
_CLOCK_SKEW_S = 3600.0
_SPOOL_BYTES = 8_000_000
_PAGE = 100
_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")
Answer = TypeVar("Answer", bound=BaseModel)


class _Problem(BaseModel):
    code: str | None = None


class BatchState(BaseModel):
    """A batch as its service describes it."""

    id: str
    status: str
    input_file_id: str = ""
    created_at: float | None = None
    metadata: dict[str, str] | None = None
    completed: int | None = Field(None, validation_alias=AliasPath("request_counts", "completed"))
    failed: int | None = Field(None, validation_alias=AliasPath("request_counts", "failed"))
    output_file_id: str | None = None
    error_file_id: str | None = None
    problem: str | None = Field(None, validation_alias=AliasPath("errors", "data", 0, "code"))

    @property
    def counts(self) -> tuple[int, int]:
        """Completed and failed requests."""
        return self.completed or 0, self.failed or 0

    @property
    def result_file_ids(self) -> list[str]:
        return [file_id for file_id in (self.output_file_id, self.error_file_id) if file_id]

    @property
    def missing_reason(self) -> str:
        """The reason of requests that no file of an ended batch mentions."""
        if self.status == "completed":
            return "batch_no_answer"
        if self.status == "failed":
            return _reason(self.problem)
        return f"batch_{self.status}"


class _Page(BaseModel):
    data: list[BatchState] = []
    """Newest first."""
    has_more: bool | None = False


class _StoredFile(BaseModel):
    id: str


@dataclass(frozen=True)
class Result:
    """One line of an output or error file: an answer, or the reason why there is none."""

    request_hash: str
    completion: Completion | None
    reason: str
    billed: bytes | None = None
    """The body of an HTTP 200; None where nothing was paid for."""


class _Response(BaseModel):
    status_code: int
    body: Any = None


class _ResultLine(BaseModel):
    custom_id: str
    response: _Response | None = None
    error: _Problem | None = None


class BatchService:
    """The batch API of one role's service: ConfigError where it refuses the key, TeacherError for
    any other failure."""

    def __init__(self, client: AsyncOpenAI, role: str, *, retries: int) -> None:
        self._role = role
        self.retries = retries
        self._asking = client.with_options(max_retries=retries)
        self._batches = self._asking.batches.with_raw_response
        self._files = client.with_options(max_retries=retries, timeout=_FILE_TIMEOUT_S).files
        # What spends money is never repeated by the package itself.
        self._paying = client.with_options(max_retries=0).batches.with_raw_response

    async def upload(self, requests: Iterable[Request]) -> str:
        """The input file's id; nothing is paid for yet. ConfigError also where the service has no
        batch API."""
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
            await asyncio.to_thread(file.writelines, map(request_line, requests))
            file.seek(0)
            upload = ("requests.jsonl", file, "application/jsonl")
            sending = self._files.with_raw_response.create(file=upload, purpose="batch")
            stored = await self._ask(sending, _StoredFile, "/files")
        return stored.id

    async def create(self, digest: str, input_file_id: str) -> str:
        """The id of a new batch; after a `transient` error without `retry_after_s` there may be one
        all the same."""
        sending = self._paying.create(
            input_file_id=input_file_id,
            endpoint=_ENDPOINT,
            completion_window="24h",
            metadata={_METADATA_KEY: digest},
        )
        batch = await self._ask(sending, BatchState, "/batches")
        return batch.id

    async def find(self, digest: str, since_s: float) -> BatchState | None:
        """The batch that carries this digest, if there is one that was created since then."""
        after: dict[str, Any] = {}
        while True:
            page = await self._ask(self._batches.list(limit=_PAGE, **after), _Page)
            for batch in page.data:
                if (batch.metadata or {}).get(_METADATA_KEY) == digest:
                    return batch
            if not page.has_more or not page.data:
                return None
            oldest = page.data[-1]
            if (oldest.created_at or since_s) < since_s - _CLOCK_SKEW_S:
                return None
            after = {"after": oldest.id}

    async def state(self, batch_id: str) -> BatchState | None:
        """None if the service doesn't know the batch (any more)."""
        try:
            return await self._ask(self._batches.retrieve(batch_id), BatchState)
        except TeacherError as error:
            if error.reason == "http_404":
                return None
            raise

    async def cancel(self, batch_id: str) -> None:
        """Ask for an end, which takes minutes; refused where the batch has ended meanwhile."""
        await self._ask(self._batches.cancel(batch_id), BatchState)

    async def results(self, file_id: str) -> AsyncIterator[Result]:
        """The lines of an output or error file as they come, without those that name no request."""
        try:
            async with self._files.with_streaming_response.content(file_id) as response:
                async for line in _lines(response.iter_bytes()):
                    result = parse_result(line)
                    if result:
                        yield result
        except openai.APIError as error:
            raise self._failure(error) from error
        except httpx2.HTTPError as error:
            # openai wraps only what happens before the body.
            message = f"{self._role}: a batch's answers broke off: {error}"
            is_transient = not isinstance(error, BodyTooLargeError)
            raise TeacherError(message, "batch_lost", transient=is_transient) from error

    async def delete_file(self, file_id: str) -> None:
        """Leave no users' questions behind at the service; that it fails does no harm here."""
        with suppress(openai.APIError):
            await self._files.delete(file_id)

    async def _ask(self, sending: Awaitable[Any], answer: type[Answer], path: str = "") -> Answer:
        """The answer; with a path, a service that does not know this path has no batch API."""
        # openai doesn't check what a service sends: a proxy's error page would pass for a batch.
        try:
            raw = await sending
            return answer.model_validate_json(raw.http_response.content)
        except openai.APIError as error:
            raise self._failure(error, path) from error
        except ValidationError as error:
            message = f"{self._role}: batch API: the answer is none"
            raise TeacherError(message, "teacher_bad_response", transient=True) from error

    def _failure(self, error: openai.APIError, path: str = "") -> Exception:
        if account_is_empty(error):
            return ConfigError(
                f"{self._role}: the account of the batch API is empty; top it up and run again"
            )
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return ConfigError(
                f"{self._role}: the batch API refuses the key; check {self._role}.api_key_env"
            )
        status = error.status_code if isinstance(error, openai.APIStatusError) else None
        if path and status in (404, 405, 501):
            problem = f"{self._asking.base_url} has no batch API ({path} answers {status})"
            return ConfigError(f"{self._role}: {problem}; set distill.mode=live")
        after_s = 0.0 if isinstance(error.__cause__, NOT_SENT) else None
        if isinstance(error, openai.RateLimitError):
            after_s = retry_after_s(error.response.headers)
        said = " ".join(str(error.message).split())[:200]
        return TeacherError(
            f"{self._role}: batch API: {said}",
            f"http_{status}" if status else "teacher_unavailable",
            transient=not (is_final(status) or status == 501),
            retry_after_s=after_s,
        )


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    # Not httpx2's lines: those end at characters that JSON may hold, such as U+2028.
    rest = b""
    end_s = time.monotonic() + _READ_WITHIN_S
    async for block in blocks:
        *whole_lines, rest = (rest + block).split(b"\n")
        for line in whole_lines:
            yield line
        if len(rest) > MOST_BODY_BYTES:
            raise BodyTooLargeError(f"a line has more than {MOST_BODY_BYTES:,} bytes")
        # httpx2 limits each wait alone.
        if time.monotonic() > end_s:
            raise httpx2.ReadTimeout(f"not whole after {_READ_WITHIN_S:.0f} s")
    yield rest


def request_line(request: Request) -> bytes:
    line = {
        "custom_id": request.request_hash,
        "method": "POST",
        "url": _ENDPOINT,
        "body": request.body,
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def parse_result(line: bytes) -> Result | None:
    """Read a line of an output or error file; None for one that names no request."""
    try:
        parsed = _ResultLine.model_validate_json(line)
    except ValidationError:
        return None
    if parsed.error is not None:
        return Result(parsed.custom_id, None, _reason(parsed.error.code))
    if parsed.response is None:
        return Result(parsed.custom_id, None, _reason(None))
    if parsed.response.status_code != 200:
        return Result(parsed.custom_id, None, f"http_{parsed.response.status_code}")
    billed = json.dumps(parsed.response.body).encode()
    try:
        completion = Completion.model_validate(parsed.response.body)
    except ValidationError:
        return Result(parsed.custom_id, None, "teacher_bad_response", billed)
    return Result(parsed.custom_id, completion, "", billed)


def _reason(code: str | None) -> str:
    """A service's code as a reason; whatever doesn't look like a code is not repeated."""
    if code is None or not _CODE.fullmatch(code):
        return "batch_failed"
    return code if code.startswith("batch_") else f"batch_{code}"
