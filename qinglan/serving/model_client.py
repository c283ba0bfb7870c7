"""Client of the models' servers: the same prompts as in training, greedy, over connections that stay open."""

import asyncio
import json
from typing import Any, Literal

import aiohttp

from qinglan.config import Profile
from qinglan.errors import ModelError, TeacherError
from qinglan.evaluation.red_team import is_degenerate
from qinglan.recipes import Recipe, get_recipe
from qinglan.recipes.kinds.selection import is_boilerplate
from qinglan.rows import Row
from qinglan.serving.routes import Backend

_KEEP_ALIVE_S = 3.0
"""Less than the 5 s after which uvicorn, and with it vLLM and ms-swift, closes a connection that lies idle."""
_MOST_REWRITE_CHARS = 200
_HEADERS = {"content-type": "application/json"}


class ModelClient:
    def __init__(self, profile: Profile) -> None:
        self._recipe: Recipe = get_recipe(profile.recipe)
        self._tenant, self._max_chars = profile.tenant, profile.serve.max_answer_chars
        self._max_tokens = profile.student.max_new_tokens
        # Requests are limited before they get here, and in time by whoever asks.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar()
        )

    async def close(self) -> None:
        await self._session.close()

    def source_without(self, question: Row) -> Literal["fallback", "none"]:
        return "none" if self._recipe.fallback(question) is None else "fallback"

    async def answer(self, backend: Backend, question: Row, within_s: float) -> str:
        """The model's answer, fit to be used.

        Raises `ModelError` where there is none; its `transient` says that the server is at fault, not the question.
        """
        try:
            async with asyncio.timeout(within_s):
                text = await self._ask(backend, question)
        except TimeoutError:
            raise ModelError(f"{backend.url}: no answer in time", "model_timeout", transient=True) from None
        return self._usable(text)

    async def _ask(self, backend: Backend, question: Row) -> str:
        body = {
            "model": backend.model,
            "messages": self._recipe.student_messages(question, self._tenant),
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        data = json.dumps(body, ensure_ascii=False).encode()
        try:
            try:
                status, content = await self._post(backend, data)
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):  # a kept connection, closed by a restart
                status, content = await self._post(backend, data)
        except (aiohttp.ClientError, OSError) as error:
            raise ModelError(f"{backend.url}: {error}", "model_unreachable", transient=True) from error
        if status != 200:
            at_fault = status >= 500 or status in (401, 403, 404, 408, 429)
            raise ModelError(f"{backend.url}: HTTP status {status}", "model_error", transient=at_fault)
        return _text_of(content, backend)

    async def _post(self, backend: Backend, data: bytes) -> tuple[int, bytes]:
        url = f"{backend.url}/chat/completions"
        async with self._session.post(url, data=data, headers=_HEADERS, allow_redirects=False) as response:
            return response.status, await response.read()

    def _usable(self, text: str) -> str:
        try:
            answer = self._recipe.parse_answer(text)
        except TeacherError as error:
            raise ModelError(str(error), error.reason) from error
        try:
            answer.encode()  # JSON can hold half of a character, UTF-8 can't
        except UnicodeEncodeError as error:
            raise ModelError("the answer is no valid Unicode", "invalid_text") from error
        if not self._recipe.retrieves:
            if self._max_chars and len(answer) > self._max_chars:
                raise ModelError(f"the answer has {len(answer)} characters", "answer_too_long")
            return answer
        if len(answer) > (self._max_chars or _MOST_REWRITE_CHARS):
            raise ModelError(f"the rewrite has {len(answer)} characters", "rewrite_too_long")
        if is_boilerplate(answer):
            raise ModelError("the answer is no rewrite", "boilerplate")
        if is_degenerate(answer):
            raise ModelError("the rewrite repeats itself", "repetitive_rewrite")
        return answer


def _text_of(content: bytes, backend: Backend) -> str:
    try:
        choice: Any = json.loads(content)["choices"][0]
        text, ended = choice["message"]["content"], choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{backend.url}: the answer is no chat completion", "model_error", transient=True) from error
    if ended == "length":
        raise ModelError("the answer was cut at student.max_new_tokens", "truncated")
    return text if isinstance(text, str) else ""
