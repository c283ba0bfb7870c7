"""The grade of one text, and the services that a grader asks for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from qinglan.clients.openai_protocol import JsonSchema, Message
from qinglan.errors import CallError
from qinglan.rows import Retrieved

if TYPE_CHECKING:
    from qinglan.clients.chat import Answer

Value = TypeVar("Value")
GradingRole = Literal["rag", "judge"]

QUESTION_ITSELF: None = None
"""The text to grade where the user's question is retrieved with as it stands: the service is sent
no rewrite, and does with the question what it always does."""


class Retriever(Protocol):
    """The part of the RAG's client that a grader needs."""

    async def retrieve(self, query: str, rewritten_query: str | None = None) -> Retrieved: ...


class Judge(Protocol):
    """The part of the judge's client that a grader needs."""

    async def ask(
        self,
        messages: list[Message],
        parse: Callable[[str], Value],
        schema: JsonSchema | None = None,
    ) -> "Answer[Value]": ...


class GradingServices(Protocol):
    """The clients of a stage or of a sample; a recipe that lacks a service never asks for it."""

    @property
    def rag(self) -> Retriever: ...

    @property
    def judge(self) -> Judge: ...


@dataclass(frozen=True)
class Grade:
    """The worth of one text; None for what was not asked and for what a failed call left open."""

    text: str | None
    """The graded text; empty where a model answered with nothing, `QUESTION_ITSELF` for the user's
    own words."""
    retrieved: Retrieved | None = None
    judge_score: float | None = None
    """The judge's score of the text, 0–5."""
    relevance: float | None = None
    """The judge's score of the best passage, 0–5: does it answer the question?"""
    parts: Mapping[str, float] | None = None
    """The text by the recipe's rules, each part from 0 to 1."""
    judge_requests: tuple[str, ...] = ()
    """Ledger keys of the judge's answers."""
    failures: Mapping[GradingRole, CallError] = field(default_factory=dict)
    """The error of each service whose call failed, by the service."""

    def raise_failure(self) -> None:
        """Raise the first failed call's error, if any call failed."""
        for error in self.failures.values():
            raise error


Scores = dict[str, float]
"""A sample's `score` in RL and its parts, by name; absent or NaN for what is not known."""
