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

from qinglan.clients.chat import NOT_SENT, Completion, Request, account_is_empty
from qinglan.clients.limits import MOST_BODY_BYTES, BodyTooLargeError, retry_after_s
from qinglan.errors import ConfigError, TeacherError

_ENDPOINT: Final = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
_METADATA_KEY = "qinglan"
_FILE_TIMEOUT_S = 600.0
_READ_WITHIN_S = 7200.0
"""All of a result file: time for 700 MB on a line of 100 kB a second."""
_CLOCK_SKEW_S = 3600.0
_SPOOL_BYTES = 8_000_000
_PAGE = 100
_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")
Answer = TypeVar("Answer", bound=BaseModel)


class _Problem(BaseModel):
    code: str | None = None


class BatchState(BaseModel):
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
        return self.completed or 0, self.failed or 0

    @property
    def missing_reason(self) -> str:
        """The reason of requests that no file of an ended batch mentions."""
        if self.status == "completed":
            return "batch_no_answer"
        return _reason(self.problem) if self.status == "failed" else f"batch_{self.status}"


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
    """What an HTTP 200 says; None where nothing was paid for."""


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
        self._asking = client.with_options(max_retries=retries)
        self._files = client.with_options(max_retries=retries, timeout=_FILE_TIMEOUT_S).files
        self._paying = client.with_options(max_retries=0).batches.with_raw_response
        self._batches = self._asking.batches.with_raw_response
        self._role, self.retries = role, retries

    async def upload(self, requests: Iterable[Request]) -> str:
        """The input file's id; nothing is paid for yet. ConfigError also where the service has no
        batch API."""
        with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as file:
            await asyncio.to_thread(file.writelines, map(request_line, requests))
            file.seek(0)
            upload = ("requests.jsonl", file, "application/jsonl")
            sending = self._files.with_raw_response.create(file=upload, purpose="batch")
            return (await self._ask(sending, _StoredFile, "/files")).id

    async def create(self, digest: str, input_file_id: str) -> str:
        """The id of a new batch; after a `transient` error without `retry_after_s` there may be one
        all the same."""
        sending = self._paying.create(
            input_file_id=input_file_id,
            endpoint=_ENDPOINT,
            completion_window="24h",
            metadata={_METADATA_KEY: digest},
        )
        return (await self._ask(sending, BatchState, "/batches")).id

    async def find(self, digest: str, since_s: float) -> BatchState | None:
        """The batch that carries this digest, if there is one that was created since then."""
        after: dict[str, Any] = {}
        while True:
            page = await self._ask(self._batches.list(limit=_PAGE, **after), _Page)
            for batch in page.data:
                if (batch.metadata or {}).get(_METADATA_KEY) == digest:
                    return batch
            last = page.data[-1] if page.data else None
            if (
                not page.has_more
                or last is None
                or (last.created_at or since_s) < since_s - _CLOCK_SKEW_S
            ):
                return None
            after = {"after": last.id}

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
                    if result := parse_result(line):
                        yield result
        except openai.APIError as error:
            raise self._failure(error) from error
        except httpx2.HTTPError as error:  # openai wraps only what happens before the body
            message = f"{self._role}: a batch's answers broke off: {error}"
            raise TeacherError(
                message, "batch_lost", transient=not isinstance(error, BodyTooLargeError)
            ) from error

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
        final = (
            status is not None
            and (400 <= status < 500 or status == 501)
            and status not in (408, 409, 429)
        )
        said = " ".join(str(error.message).split())[:200]
        reason = f"http_{status}" if status else "teacher_unavailable"
        after_s = 0.0 if isinstance(error.__cause__, NOT_SENT) else None
        if isinstance(error, openai.RateLimitError):
            after_s = retry_after_s(error.response.headers)
        return TeacherError(
            f"{self._role}: batch API: {said}", reason, transient=not final, retry_after_s=after_s
        )


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest, end_s = b"", time.monotonic() + _READ_WITHIN_S
    async for (
        block
    ) in blocks:  # not httpx2's lines: those end at characters that JSON may hold, such as U+2028
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > MOST_BODY_BYTES:
            raise BodyTooLargeError(f"a line has more than {MOST_BODY_BYTES:,} bytes")
        if time.monotonic() > end_s:  # httpx2 limits each wait alone
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
    """None for a line that names no request."""
    try:
        found = _ResultLine.model_validate_json(line)
    except ValidationError:
        return None
    if found.error is not None or found.response is None:
        return Result(found.custom_id, None, _reason(found.error.code if found.error else None))
    if found.response.status_code != 200:
        return Result(found.custom_id, None, f"http_{found.response.status_code}")
    billed = json.dumps(found.response.body).encode()
    try:
        return Result(found.custom_id, Completion.model_validate(found.response.body), "", billed)
    except ValidationError:
        return Result(found.custom_id, None, "teacher_bad_response", billed)


def _reason(code: str | None) -> str:
    """A service's code as a reason; whatever doesn't look like a code is not repeated."""
    if code is None or not _CODE.fullmatch(code):
        return "batch_failed"
    return code if code.startswith("batch_") else f"batch_{code}"
