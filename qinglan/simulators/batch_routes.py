"""OpenAI's /v1/files and /v1/batches over a store."""

from email import message_from_bytes
from email.message import Message
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from qinglan.simulators.batch_store import BatchRequest, BatchStore, StoreError
from qinglan.simulators.server import error_body


def mount_batches(app: FastAPI, store: BatchStore) -> None:
    """Add the routes and the shape of their errors to an app."""

    @app.exception_handler(StoreError)
    async def refuse(_request: Request, error: StoreError) -> JSONResponse:
        return JSONResponse(error_body(str(error), "invalid_request_error"), error.status)

    app.include_router(batch_router(store))


def batch_router(store: BatchStore) -> APIRouter:
    """The routes over a store."""
    router = APIRouter(prefix="/v1")

    @router.post("/files")
    async def upload(request: Request) -> dict[str, Any]:
        body = await request.body()
        parts = await run_in_threadpool(_parts, request.headers.get("content-type", ""), body)
        if "file" not in parts or "purpose" not in parts:
            raise StoreError(400, "a multipart form with `purpose` and `file` is wanted")
        content, filename = parts["file"]
        return store.add_file(content, filename, parts["purpose"][0].decode()).as_object()

    @router.get("/files/{file_id}")
    def file(file_id: str) -> dict[str, Any]:
        return store.file(file_id).as_object()

    @router.get("/files/{file_id}/content")
    def content(file_id: str) -> Response:
        return Response(store.file(file_id).content, media_type="application/octet-stream")

    @router.delete("/files/{file_id}")
    def delete(file_id: str) -> dict[str, Any]:
        store.delete_file(file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.post("/batches")
    def create(request: BatchRequest) -> dict[str, Any]:
        return store.create(request)

    @router.get("/batches")
    def batches(after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> dict[str, Any]:
        return store.list(after, limit)

    @router.get("/batches/{batch_id}")
    def batch(batch_id: str) -> dict[str, Any]:
        return store.retrieve(batch_id)

    @router.post("/batches/{batch_id}/cancel")
    def cancel(batch_id: str) -> dict[str, Any]:
        return store.cancel(batch_id)

    return router


class _Part(NamedTuple):
    content: bytes
    filename: str


def _parts(content_type: str, body: bytes) -> dict[str, _Part]:
    """A multipart form's fields by name; the standard library reads mail, which has the same parts."""
    form = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    parts = (part for part in form.walk() if not part.is_multipart())
    return {str(part.get_param("name", "", "content-disposition")): _part(part) for part in parts}


def _part(part: Message) -> _Part:
    content = part.get_payload(decode=True)
    return _Part(content if isinstance(content, bytes) else b"", part.get_filename("upload"))
