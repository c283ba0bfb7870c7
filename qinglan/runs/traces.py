"""The calls of a stage that MLflow shows as traces."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from qinglan.rows import BottomK

SpanKind = Literal["CHAT_MODEL", "RETRIEVER"]


@dataclass(frozen=True)
class TracedCall:
    role: str
    kind: SpanKind
    """MLflow's type of the span."""
    inputs: Any
    outputs: Any
    """None where the call failed."""
    failure: str
    """The reason's code; empty where the call was answered."""
    ended_ns: int
    latency_ms: float | None
    """Time on the wire; None where it is not known."""
    attributes: dict[str, Any]


class CallSample:
    """The calls whose keys have the lowest hashes.

    They are the same ones whenever the same calls are made.
    """

    def __init__(self, size: int) -> None:
        self._kept_calls = BottomK[TracedCall](size)
        self._attempts = Counter[str]()

    def add(
        self,
        key: str,
        role: str,
        kind: SpanKind,
        inputs: Any,
        outputs: Any = None,
        *,
        failure: str = "",
        latency_ms: float | None = None,
        **attributes: Any,
    ) -> None:
        """Note a request that was sent; `key` stands for its content."""
        # Most calls are not kept, so nothing is made of them.
        if not self._kept_calls.wants(key):
            return
        self._attempts[key] += 1
        attributes["attempt"] = self._attempts[key]
        attributes["status"] = failure or "ok"
        call = TracedCall(
            role, kind, inputs, outputs, failure, time.time_ns(), latency_ms, attributes
        )
        self._kept_calls.add(key, call)

    def calls(self) -> list[TracedCall]:
        return self._kept_calls.items()
