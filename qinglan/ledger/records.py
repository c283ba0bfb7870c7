"""What goes into the ledger and what comes out of it."""

import time
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, Field

from qinglan.rows import Retrieved


class _Asked(BaseModel, frozen=True):
    request_hash: str
    run_id: str
    tenant: str
    role: str
    """teacher, answerer or judge; with `-probe` where the doctor asked"""
    model: str
    cost_usd: float


class Call(_Asked):
    text: str
    reasoning: str | None = None
    """The chain of thought, where the service shows it."""
    refusal: str | None = None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    latency_ms: float | None
    """None for an answer by the batch API, whose time says nothing."""


class Failure(_Asked):
    """A request that brought no usable answer, and may have cost something all the same."""

    reason: str
    cost_usd: float = 0.0
    estimated: bool = False
    """The service did not say what it used: the cost is the most that it can have been."""
    latency_ms: float | None = None
    created_s: float = Field(default_factory=time.time)


class Usage(BaseModel, frozen=True, extra="forbid"):
    """What a run spent on one role."""

    calls: int = 0
    cached: int = 0
    """Answers that came from the ledger and cost nothing."""
    failed: int = 0
    """Requests without a usable HTTP answer, retries included."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0


class BatchJob(BaseModel, frozen=True):
    """Requests that were handed to a batch API and are not merged yet."""

    digest: str
    """Digest of the hashes: sent to the service, so that a batch whose id was never recorded can be
    found again."""
    server: str
    role: str
    status: Literal["submitting", "creating", "submitted", "merged"]
    batch_id: str = ""
    request_hashes: list[str]
    created_s: float

    def with_requests(self, request_hashes: list[str]) -> Self:
        return self.model_copy(update={"request_hashes": request_hashes})

    def with_created(self, created_s: float) -> Self:
        return self.model_copy(update={"created_s": created_s})

    def creating(self, created_s: float) -> Self:
        """The job whose batch is about to be asked for."""
        return self.model_copy(update={"status": "creating", "created_s": created_s})

    def submitted(self, batch_id: str) -> Self:
        """The job whose batch is known to exist."""
        return self.model_copy(update={"status": "submitted", "batch_id": batch_id})

    def merged(self) -> Self:
        """The job that is done with."""
        return self.model_copy(update={"status": "merged"})


class Spending(Usage):
    """One line of `qinglan ledger`; its `calls` are those with an answer."""

    key: str


class Attempt(BaseModel, frozen=True):
    """One try at a request: `outcome` is the reason of a failure, else how the answer ended."""

    created_s: float
    request_hash: str
    run_id: str
    role: str
    model: str
    outcome: str
    latency_ms: float | None
    cost_usd: float
    estimated: bool
    """As of a failure."""


class Retrieval(BaseModel, frozen=True):
    """What the RAG answered to one request, kept so that the same run need not ask again."""

    key: str
    """Digest of scope and request."""
    scope: str
    """Where the answer holds: one run, or one state of a knowledge base."""
    found: Retrieved


@dataclass
class Order:
    """What a client wants of the ledger, for one transaction."""

    wanted: list[str] = field(default_factory=list)
    """Requests to look up, and to claim where there is no answer."""
    calls: list[Call] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    """Requests that this client claimed and got no answer to."""
    retrievals: list[Retrieval] = field(default_factory=list)
    sought: list[str] = field(default_factory=list)
    """Keys of retrievals to look up."""
    run_id: str = ""
    """The run whose spending is returned."""
    is_resent: bool = False
    """It was sent before, and it is not known whether it arrived."""

    def __len__(self) -> int:
        asked = len(self.wanted) + len(self.sought)
        return (
            asked + len(self.calls) + len(self.failures) + len(self.released) + len(self.retrievals)
        )


@dataclass(frozen=True)
class Delivery:
    """What became of an order's `wanted`: another client is asking right now for what is in
    neither."""

    found: dict[str, Call]
    claimed: set[str]
    spent_usd: tuple[float, float]
    """By the run that was named, and by all runs this month."""
    retrieved: dict[str, Retrieved] = field(default_factory=dict)
    """Those of an order's `sought` that there are."""
