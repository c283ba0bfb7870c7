"""The ledger of a folder, and calls of the teacher as it keeps them."""

from contextlib import closing
from pathlib import Path
from typing import Any

from qinglan.config import LedgerStore
from qinglan.ledger import Call, Failure, Ledger, ledger_url

WHO: dict[str, Any] = {"run_id": "r", "tenant": "t", "role": "teacher", "model": "m"}


def call(request_hash: str = "h", **fields: Any) -> Call:
    """A call that was answered."""
    defaults = {
        **WHO,
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cost_usd": 0.25,
        "latency_ms": 12.5,
        "text": "改写",
        "finish_reason": "stop",
    }
    return Call(request_hash=request_hash, **defaults | fields)


def failure(request_hash: str = "h", reason: str = "http_500", **fields: Any) -> Failure:
    return Failure(request_hash=request_hash, reason=reason, **WHO | fields)


def ledger_in(folder: Path) -> closing[Ledger]:
    return closing(Ledger(ledger_url(LedgerStore(), folder)))
