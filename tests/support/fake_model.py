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
        self.reasoning, self.asked = reasoning, list[Any]()

    @property
    def questions(self) -> list[str]:
        """The last message of each, without delimiters."""
        return [undelimited(messages[-1]["content"]) for messages in self.asked]

    async def ask(self, messages: Any, parse: Any, schema: Any = None) -> Answer[Any]:
        self.asked.append(messages)
        said = self._answer(undelimited(messages[-1]["content"]))
        if isinstance(said, Exception):
            raise said
        return Answer(parse(said), f"hash of {said}", False, 0.5, 12.0, self.reasoning)


class FakeRag:
    """Finds what a function of query and rewrite says; an error is raised."""

    def __init__(self, find: Callable[[str, str | None], Retrieved | Exception]) -> None:
        self._find, self.asked = find, list[tuple[str, str | None]]()

    async def retrieve(self, query: str, rewritten_query: str | None = None, **_: Any) -> Retrieved:
        self.asked.append((query, rewritten_query))
        found = self._find(query, rewritten_query)
        if isinstance(found, Exception):
            raise found
        return found

    async def close(self) -> None:
        pass
