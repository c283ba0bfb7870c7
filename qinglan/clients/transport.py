"""The openai package as transport. Only who asks loads it, as that takes most of a second."""

import os
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import aiohttp
import httpx2
import openai
from openai import AsyncOpenAI

from qinglan.clients.limits import receive
from qinglan.config import Endpoint, require_secret, uses_proxy

Throttle = Callable[[Callable[[], Awaitable[httpx2.Response]]], Awaitable[httpx2.Response]]
_tls_context = cache(httpx2.create_ssl_context)
"""Loading the certificates takes 50 ms, and every client would."""


class _HttpClient(openai.DefaultAioHttpClient):
    """Lets the caller decide when a request goes out.

    With 64 at once aiohttp takes a third less CPU than httpx2.
    """

    def __init__(self, throttle: Throttle | None, **options: Any) -> None:
        super().__init__(**options)
        self._throttle = throttle

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        if self._throttle:
            return await self._throttle(lambda: self._send(request, **options))
        return await self._send(request, **options)

    async def _send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            sending = super().send(request, **options | {"stream": True})
            if options.get("stream"):
                return await sending
            return await receive(sending, request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            cause = error.__cause__
            # openai's transport says so of every lost connection, also of one that a paid request
            # was sent over.
            if isinstance(cause, aiohttp.ConnectionTimeoutError):
                raise
            if isinstance(cause, aiohttp.ClientConnectorError):
                reason = _reason_of(cause) or type(cause).__name__
                raise httpx2.ConnectError(reason, request=request) from None
            raise httpx2.RemoteProtocolError(type(cause).__name__, request=request) from None
        except aiohttp.ClientError as error:
            # Not mapped by openai's transport, and the original carries the request's headers with
            # the key.
            raise httpx2.RemoteProtocolError(type(error).__name__, request=request) from None


def _reason_of(error: aiohttp.ClientConnectorError) -> str | None:
    # A resolver's error numbers are negative, and os.strerror does not know them.
    if error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror


def openai_client(
    endpoint: Endpoint, base_url: str, role: str, throttle: Throttle | None = None
) -> AsyncOpenAI:
    """A client without retries of its own, which need limits and ledger; `throttle` sends what is
    ready when it may."""
    # Before the client is made: one that nobody closes is warned of.
    api_key = require_secret(endpoint.api_key_env, f"{role} {endpoint.model}")
    http_client = _HttpClient(
        throttle,
        limits=httpx2.Limits(max_connections=endpoint.concurrency),
        timeout=endpoint.timeout_s,
        trust_env=uses_proxy(base_url),
        verify=_tls_context(),
    )
    return AsyncOpenAI(
        base_url=base_url,
        api_key=api_key,
        timeout=endpoint.timeout_s,
        max_retries=0,
        http_client=http_client,
    )
