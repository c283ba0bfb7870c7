"""Which calls of a stage MLflow shows as traces."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from qinglan.rows import BottomK


@dataclass(frozen=True)
class TracedCall:
    role: str
    kind: Literal["CHAT_MODEL", "RETRIEVER"]
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
    """The calls whose keys have the lowest hashes: the same ones whenever the same calls are
    made."""

    def __init__(self, size: int) -> None:
        self._kept, self._attempts = BottomK[TracedCall](size), Counter[str]()

    def add(
        self,
        key: str,
        role: str,
        kind: Literal["CHAT_MODEL", "RETRIEVER"],
        inputs: Any,
        outputs: Any = None,
        *,
        failure: str = "",
        latency_ms: float | None = None,
        **attributes: Any,
    ) -> None:
        """Note a request that was sent; `key` stands for its content."""
        if self._kept.wants(key):
            self._attempts[key] += 1
            attributes |= {"attempt": self._attempts[key], "status": failure or "ok"}
            call = TracedCall(
                role, kind, inputs, outputs, failure, time.time_ns(), latency_ms, attributes
            )
            self._kept.add(key, call)

    def calls(self) -> list[TracedCall]:
        return self._kept.items()
