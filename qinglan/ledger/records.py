"""Records that go into the ledger and come out of it."""

import time
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, Field

from qinglan.rows import Retrieved


class _Try(BaseModel, frozen=True):
    """The fields that an answer and a failure have in common."""

    request_hash: str
    run_id: str
    tenant: str
    role: str
    """The role that was asked: teacher, answerer or judge; with `-probe` where the doctor asked."""
    model: str
    cost_usd: float


class Call(_Try):
    """A request that was answered, usably or not."""

    text: str
    reasoning: str | None = None
    """The chain of thought, where the service shows it."""
    refusal: str | None = None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    latency_ms: float | None
    """None for an answer by the batch API, whose time says nothing."""


class Failure(_Try):
    """A request that brought no usable answer, and may have cost something all the same."""

    reason: str
    cost_usd: float = 0.0
    estimated: bool = False
    """The service did not say what it used: the cost is the most that it can have been."""
    latency_ms: float | None = None
    created_s: float = Field(default_factory=time.time)


class Usage(BaseModel, frozen=True, extra="forbid"):
    """Calls, tokens and dollars of one run and role."""

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
    """The cost of a failure is estimated."""


class Retrieval(BaseModel, frozen=True):
    """The RAG's answer to one request, kept so that the same run need not ask again."""

    key: str
    """Digest of scope and request."""
    scope: str
    """The range in which the answer holds: one run, or one state of a knowledge base."""
    found: Retrieved


@dataclass
class Order:
    """Everything that a client wants of the ledger in one transaction."""

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
        lookups = len(self.wanted) + len(self.sought)
        entries = len(self.calls) + len(self.failures) + len(self.retrievals)
        return lookups + entries + len(self.released)


@dataclass(frozen=True)
class Delivery:
    """The ledger's reply to an order.

    Another client is asking right now for a request that is neither in `found` nor in `claimed`.
    """

    found: dict[str, Call]
    claimed: set[str]
    spent_usd: tuple[float, float]
    """Dollars that the run which was named spent, and those of all runs this month."""
    retrieved: dict[str, Retrieved] = field(default_factory=dict)
    """Retrievals by key, of an order's `sought`; a key that is not known is absent."""
