"""Requests to Prefect's API, sent again while its server is busy.

On SQLite the server answers 503 while another process writes. Everything here raises
httpx2.HTTPError where the server can't be reached, or refuses.
"""

import time
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx2

from qinglan.runs.back_off import BackOff

# Prefect's own client takes more than two seconds to import, and tries a busy server for two
# minutes, while `qinglan doctor` has to end in half a minute.
_RETRIES = 4
_BACK_OFF = BackOff(0.5, 4.0)
"""All pauses together take less than the 12 s for which doctor waits."""
_BUSY_STATUSES = (
    httpx2.codes.TOO_MANY_REQUESTS,
    httpx2.codes.BAD_GATEWAY,
    httpx2.codes.SERVICE_UNAVAILABLE,
)
_PAGE_SIZE = 200
TAG = "qinglan"
"""The tag of our deployments and automations."""


class RetryingClient(httpx2.Client):
    """A client that repeats what was answered with 429, 502 or 503, or for want of a CSRF token.

    Prefect's own client does the same.
    """

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        response = self._send_until_answered(request, **options)
        if not _wants_csrf_token(response):
            return response
        token_headers = self._csrf_token_headers()
        self.headers.update(token_headers)
        request.headers.update(token_headers)
        return self._send_until_answered(request, **options)

    def _csrf_token_headers(self) -> dict[str, str]:
        """Headers with a new token, or none where the server gives no token."""
        # A new token each time: a server forgets its tokens after an hour.
        client_id = str(uuid4())
        request = self.build_request("GET", "csrf-token", params={"client": client_id})
        response = self._send_until_answered(request)
        # Where this is no token, the server's refusal of the request itself is what users see.
        with suppress(ValueError, KeyError, TypeError):
            token = str(response.json()["token"])
            return {"prefect-csrf-token": token, "prefect-csrf-client": client_id}
        return {}

    def _send_until_answered(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        for failures in range(1, _RETRIES + 1):
            response = super().send(request, **options)
            if response.status_code not in _BUSY_STATUSES:
                return response
            response.close()
            time.sleep(_BACK_OFF.pause_s(failures))
        return super().send(request, **options)


def _wants_csrf_token(response: httpx2.Response) -> bool:
    if response.status_code != httpx2.codes.FORBIDDEN:
        return False
    return "CSRF" in response.read().decode(errors="replace")


def call(
    api: httpx2.Client, method: str, path: str, body: Any = None, *, may_lack: bool = False
) -> Any:
    """The JSON of the server's answer.

    None where the answer is empty, or with `may_lack` where there is no such thing.
    """
    response = api.request(method, path, json=body)
    if may_lack and response.status_code == httpx2.codes.NOT_FOUND:
        return None
    response.raise_for_status()
    return response.json() if response.content else None


def pages(api: httpx2.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    """All entries that a `filter` route of the API gives for a query, page by page."""
    entries: list[dict[str, Any]] = []
    while True:
        page = call(api, "POST", path, query | {"offset": len(entries), "limit": _PAGE_SIZE})
        entries += page
        if len(page) < _PAGE_SIZE:
            return entries
