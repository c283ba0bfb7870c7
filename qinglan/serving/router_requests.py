"""Requests to the router, and the questions that they become."""

from collections.abc import Mapping, Sequence

from pydantic import Field
from starlette.exceptions import HTTPException

from qinglan.clients.openai_protocol import ChatRequest
from qinglan.data.sources.records import without_illegal
from qinglan.recipes import Input, identifying
from qinglan.rows import Row, row_id

CHAMPION = "champion"
"""Model name that always means the one in service."""


class RefusedError(HTTPException):
    """A request that can't be answered, with its HTTP status."""


class RouterRequest(ChatRequest):
    """A chat completion request, with what a recipe asks for beside the question."""

    model: str = CHAMPION
    profile: str | None = None
    """Facts about the user (`extra_body` of the openai client)."""
    history: str | None = None
    """A summary of what was said before."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """The recipe's further inputs, by `Input.name`."""

    def question(self, tenant: str, inputs: Sequence[Input]) -> Row:
        """The last user message with the recipe's inputs.

        It is a row like those of the training, without their labels.

        Raises:
            RefusedError: there is no message, or an input is missing or unknown.
        """
        query = _clean(self.last_user_text)
        if not query:
            raise RefusedError(
                400, "messages: there is no user message with text; the last one is the question"
            )
        texts = {
            "query": query,
            "profile": _clean(self.profile or ""),
            "history": _clean(self.history or ""),
        }
        values: dict[str, str] = {}
        for name, text in self.inputs.items():
            value = _clean(text)
            if value:
                values[name] = value
        _check_inputs(values, inputs)
        identity = row_id(tenant, **texts, inputs=identifying(values, inputs))
        return Row(id=identity, tenant=tenant, **texts, inputs=values, source="router")


class TryRequest(RouterRequest):
    """A question to one of the arms of the page to try."""

    arm: str


def _clean(text: str) -> str:
    return without_illegal(text).strip()


def _check_inputs(values: Mapping[str, str], inputs: Sequence[Input]) -> None:
    """Refuse values that the recipe does not know, and a lack of one that it asks for."""
    known_names = {known_input.name for known_input in inputs}
    for name in values:
        if name not in known_names:
            names = ", ".join(sorted(known_names)) or "none"
            raise RefusedError(400, f"inputs: there is no `{name}` here, but {names}")
    for known_input in inputs:
        if known_input.is_asked and known_input.name not in values:
            raise RefusedError(
                400,
                f"inputs.{known_input.name}: is missing or empty; it is part of what is asked",
            )
