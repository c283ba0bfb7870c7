"""Clients' places taken by functions: a chat model and a RAG that remember what they were asked."""

from collections.abc import Callable
from typing import Any

from qinglan.clients.chat import Answer
from qinglan.recipes.prompting import undelimited
from qinglan.rows import Retrieved


class FakeModel:
    """Gives one answer, or the one of a function of the last message; an error is raised."""

    def __init__(
        self, answer: str | Callable[[str], str | Exception], reasoning: str | None = None
    ) -> None:
        self._answer = answer if callable(answer) else lambda _: answer
        self.reasoning = reasoning
        self.asked: list[Any] = []

    @property
    def questions(self) -> list[str]:
        """The last message of each request, without delimiters."""
        return [undelimited(messages[-1]["content"]) for messages in self.asked]

    async def ask(self, messages: Any, parse: Any, schema: Any = None) -> Answer[Any]:
        self.asked.append(messages)
        text = self._answer(undelimited(messages[-1]["content"]))
        if isinstance(text, Exception):
            raise text
        return Answer(parse(text), f"hash of {text}", False, 0.5, 12.0, self.reasoning)


class FakeRag:
    """Finds what a function of query and rewrite says; an error is raised."""

    def __init__(self, find: Callable[[str, str | None], Retrieved | Exception]) -> None:
        self._find = find
        self.asked: list[tuple[str, str | None]] = []

    async def retrieve(self, query: str, rewritten_query: str | None = None, **_: Any) -> Retrieved:
        self.asked.append((query, rewritten_query))
        retrieved = self._find(query, rewritten_query)
        if isinstance(retrieved, Exception):
            raise retrieved
        return retrieved

    async def close(self) -> None:
        pass
