"""Prefect's API, answered by a function of a test's own."""

import json
from collections.abc import Callable
from typing import Any

import httpx2


def api_of(answer: Callable[[str, str, Any], Any]) -> httpx2.Client:
    """Each request is answered by what `answer` makes of its method, path and body: JSON, or a
    status without any.

    A list is given in pages where it is asked for so.
    """

    def respond(request: httpx2.Request) -> httpx2.Response:
        path, body = (
            request.url.path.removeprefix("/api/").strip("/"),
            json.loads(request.content or b"null"),
        )
        reply = answer(request.method, path, body)
        if isinstance(reply, int):
            return httpx2.Response(reply)
        if isinstance(reply, list) and isinstance(body, dict) and "offset" in body:
            reply = reply[body["offset"] :][: body["limit"]]
        return httpx2.Response(200, json=reply)

    return httpx2.Client(base_url="http://test/api", transport=httpx2.MockTransport(respond))
