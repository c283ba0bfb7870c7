"""Asking through a batch API: half the price, an answer within a day, and nothing lost or paid twice over restarts.

The ledger knows of every batch before the service does, and its claims keep everybody else from asking the same.
A later call takes over the batches that a killed process left: one that was created is merged, one that was not is
forgotten. What comes back without an answer is the live pass's to ask.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from openai import AsyncOpenAI

from qinglan.clients.batch_api.jobs import CONFIRM_AFTER_S, BatchJobs, BatchProgress
from qinglan.clients.batch_api.plan import make_plan
from qinglan.clients.batch_api.service import BatchService
from qinglan.clients.batch_api.store import BatchStore
from qinglan.clients.chat import Account, Request
from qinglan.config import BatchApi
from qinglan.ledger import Ledger

_ROUNDS = 2
"""Under a budget the first round's real tokens show how much more can be afforded."""


@dataclass(frozen=True)
class BatchOutcome:
    """What became of the requests."""

    answered: int
    missing: tuple[str, ...]
    """Hashes without an answer, in the order given: to be asked one by one."""
    reasons: dict[str, int]
    """Why requests of batches came back without an answer, and how many; `over_budget` were never sent."""


async def distill_by_batch(
    requests: Sequence[Request],
    *,
    client: AsyncOpenAI,
    ledger: Ledger,
    account: Account,
    server: str,
    settings: BatchApi,
    retries: int = 4,
    affordable_usd: Callable[[], float | None] = lambda: None,
    on_progress: Callable[[BatchProgress], None] = lambda _: None,
) -> BatchOutcome:
    """Bring as many answers into the ledger as the batch API gives; what the ledger has is not asked.

    Cancelled or killed it loses nothing: the batches go on at the service, and the next call takes them up.

    Args:
        server: which service answers, wherever it is reached: part of the ledger's keys.
        retries: of one HTTP request.
        affordable_usd: what may still be spent, None without a limit; batches under way are not its to know.
        on_progress: called after every look at a batch.

    Raises:
        ConfigError: the service has no batch API, or refuses the key.
        LedgerError: the ledger can't be read or written.
    """
    service = BatchService(client, account.role, retries=retries, pause_s=min(CONFIRM_AFTER_S, settings.poll_every_s))
    store = BatchStore(ledger, account, server)
    jobs = BatchJobs(service, store, settings, on_progress)
    unique = {request.request_hash: request for request in requests}
    unaffordable: list[Request] = []
    async with store.hold_locks():
        for _ in range(_ROUNDS):
            adopted = await jobs.adopt()
            under_way = {each for job in adopted for each in job.request_hashes}
            plan = await asyncio.to_thread(
                make_plan, unique, under_way, jobs.tried, ledger, account, affordable_usd(), settings.max_requests
            )
            unaffordable = plan.unaffordable
            await jobs.run(adopted, unique.keys(), plan.chunks)
            if not unaffordable:
                break
    found = await asyncio.to_thread(ledger.get_many, unique.keys())
    missing = tuple(each for each in unique if each not in found)
    over_budget = sum(request.request_hash not in found for request in unaffordable)
    return BatchOutcome(len(found), missing, dict(store.reasons + Counter(over_budget=over_budget)))
