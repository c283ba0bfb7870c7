"""What the router knows of a request that was answered, for metrics, the request log and whoever watches."""

from dataclasses import dataclass
from typing import Literal, Protocol

from qinglan.rows import Row
from qinglan.serving.models import Models
from qinglan.serving.route_table import RouteTable

ServedRole = Literal["champion", "challenger", "none"]
Source = Literal["model", "fallback", "none"]
"""Whose text the answer was: the model's, in its place the recipe's fallback, or nobody's, as the recipe has none."""


@dataclass(frozen=True, slots=True)
class Served:
    """One answer."""

    at: float
    """Unix time of the answer."""
    role: ServedRole
    """Whose turn it was, also where it failed; `none` where no model could have been asked."""
    version: str
    """Of the registered model; empty without one."""
    source: Source
    reason: str
    """Why it was not the model's; empty where it was."""
    latency_ms: float
    """From the request's arrival."""
    row_id: str
    answer: str | None = None
    """The model's text, if that was the answer."""


class Observer(Protocol):
    """Hears of every answer, and may work in the background as long as the router runs."""

    def on_served(self, served: Served, question: Row) -> None:
        """Called in the event loop after the answer was sent; must return at once."""

    async def run(self, table: RouteTable, models: Models) -> None:
        """Started with the router, cancelled with it; may return early."""
