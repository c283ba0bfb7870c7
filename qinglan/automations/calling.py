"""Requests to Prefect's API, with patience: on SQLite it answers 503 while another writer is at it."""

import time
from typing import Any

import httpx

_TRIES, _WAIT_S, _PAGE = 8, 0.5, 200
_PASSING = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE)


def call(api: httpx.Client, method: str, path: str, body: Any = None, *, may_lack: bool = False) -> Any:
    """The answer's JSON; None where it has none.

    Args:
        may_lack: None also where there is no such thing.

    Raises:
        httpx.HTTPError: the server can't be reached, or refuses.
    """
    for attempt in range(1, _TRIES + 1):
        answer = api.request(method, path, json=body)
        if answer.status_code not in _PASSING or attempt == _TRIES:
            break
        time.sleep(_WAIT_S * attempt)
    if may_lack and answer.status_code == httpx.codes.NOT_FOUND:
        return None
    answer.raise_for_status()
    return answer.json() if answer.content else None


def pages(api: httpx.Client, path: str, **query: Any) -> list[dict[str, Any]]:
    """Everything that a `filter` of the API finds."""
    found: list[dict[str, Any]] = []
    while True:
        page = call(api, "POST", path, query | {"offset": len(found), "limit": _PAGE})
        found += page
        if len(page) < _PAGE:
            return found
