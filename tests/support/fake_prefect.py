"""Prefect's API, answered by a function of a test's own."""

import json
from collections.abc import Callable
from typing import Any

import httpx2


def api_of(answer: Callable[[str, str, Any], Any]) -> httpx2.Client:
    """A client whose requests are answered by a function of method, path and body.

    The function gives JSON, or a status without any. A list is given in pages if it is asked for
    so.
    """

    def respond(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/api/").strip("/")
        body = json.loads(request.content or b"null")
        reply = answer(request.method, path, body)
        if isinstance(reply, int):
            return httpx2.Response(reply)
        if isinstance(reply, list) and isinstance(body, dict) and "offset" in body:
            reply = reply[body["offset"] :][: body["limit"]]
        return httpx2.Response(200, json=reply)

    return httpx2.Client(base_url="http://test/api", transport=httpx2.MockTransport(respond))
