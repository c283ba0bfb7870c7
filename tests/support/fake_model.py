"""A chat model in the place of a client."""

from typing import Any

from qinglan.clients.chat import Answer


class FakeModel:
    """Always gives the same answer, and remembers what it was asked."""

    def __init__(self, text: str, reasoning: str | None = None) -> None:
        self.text, self.reasoning, self.asked = text, reasoning, list[Any]()

    async def ask(self, messages: Any, parse: Any, schema: Any = None) -> Answer[Any]:
        self.asked.append(messages)
        return Answer(parse(self.text), f"hash of {self.text}", False, 0.5, 12.0, self.reasoning)
