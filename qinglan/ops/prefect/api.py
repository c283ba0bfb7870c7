"""Requests to Prefect's API, sent again when it is busy: on SQLite it answers 503 while another
process writes.

Everything here raises httpx2.HTTPError where the server can't be reached, or refuses.
"""

import time
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx2

from qinglan.runs.back_off import BackOff

_RETRIES = 4
_BACK_OFF = BackOff(0.5, 4.0)
"""All pauses together take less than the 12 s for which doctor waits."""
_PASSING = (
    httpx2.codes.TOO_MANY_REQUESTS,
    httpx2.codes.BAD_GATEWAY,
    httpx2.codes.SERVICE_UNAVAILABLE,
)
_PAGE = 200
TAG = "qinglan"
"""Of our deployments and automations."""


class RetryingClient(httpx2.Client):
    """Sends again what was answered with 429, 502 or 503, or for want of a CSRF token, as Prefect's
    own client does."""

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        answer = self._send_with_retries(request, **options)
        if answer.status_code == httpx2.codes.FORBIDDEN and "CSRF" in answer.read().decode(
            errors="replace"
        ):
            client = str(
                uuid4()
            )  # a new token each time: a server forgets its tokens after an hour
            given = self._send_with_retries(
                self.build_request("GET", "csrf-token", params={"client": client})
            )
            with suppress(ValueError, KeyError, TypeError):  # then the server's refusal stands
                token = {
                    "prefect-csrf-token": str(given.json()["token"]),
                    "prefect-csrf-client": client,
                }
                self.headers.update(token)
                request.headers.update(token)
            answer = self._send_with_retries(request, **options)
        return answer

    def _send_with_retries(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        for failures in range(1, _RETRIES + 1):
            answer = super().send(request, **options)
            if answer.status_code not in _PASSING:
                return answer
            answer.close()
            time.sleep(_BACK_OFF.pause_s(failures))
        return super().send(request, **options)


def call(
    api: httpx2.Client, method: str, path: str, body: Any = None, *, may_lack: bool = False
) -> Any:
    """The answer's JSON; None where it is empty, or with `may_lack` where there is no such
    thing."""
    answer = api.request(method, path, json=body)
    if may_lack and answer.status_code == httpx2.codes.NOT_FOUND:
        return None
    answer.raise_for_status()
    return answer.json() if answer.content else None


def pages(api: httpx2.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        page = call(api, "POST", path, query | {"offset": len(found), "limit": _PAGE})
        found += page
        if len(page) < _PAGE:
            return found
