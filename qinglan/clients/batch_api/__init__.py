"""Asking through a batch API: half the price, an answer within a day, and nothing lost or paid
twice over restarts.

The ledger knows of every batch before the service does. A later call takes over the batches that a
killed process left: one that was created is merged, one that was not is forgotten. What has no
answer then is asked row by row.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

from openai import AsyncOpenAI

from qinglan.clients.batch_api.jobs import BatchJobs, BatchProgress, BatchStore
from qinglan.clients.batch_api.service import BatchService, request_line
from qinglan.clients.chat import Account, Request, cost_usd, most_usd
from qinglan.config import BatchApi, Price
from qinglan.ledger import Ledger

_ROUNDS = 2
"""Under a budget the first round's real tokens show how much more can be afforded."""
_MAX_BYTES = 190_000_000
"""Of one input file; OpenAI takes 200 MB."""
_KNOWN_FROM_CALLS = 50
_MARGIN = 1.1


@dataclass(frozen=True)
class BatchOutcome:
    """What became of the requests."""

    answered: int
    missing: tuple[str, ...]
    """Hashes without an answer, in the order given: to be asked one by one."""
    reasons: dict[str, int]
    """Why requests of batches came back without an answer, and how many; `over_budget` were never
    sent."""


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
    """Bring as many answers into the ledger as the batch API gives; what the ledger has is not
    asked.

    Cancelled or killed it loses nothing: the batches go on at the service, and the next call takes
    them up. Raises `ConfigError` where the service has no batch API, or refuses the key.

    Args:
        server: which service answers, wherever it is reached: part of the ledger's keys.
        retries: of one HTTP request.
        affordable_usd: what may still be spent, batches under way included; None without a limit.
    """
    service = BatchService(client, account.role, retries=retries)
    unique = {request.request_hash: request for request in requests}
    store = BatchStore(ledger, account, server, unique)
    jobs = BatchJobs(service, store, settings, on_progress)
    unaffordable: list[Request] = []

    def plan(under_way: Set[str], usd: float | None) -> tuple[list[list[Request]], list[Request]]:
        """What to send, a batch per portion, and what there is no money for.

        That is what has no answer, is in no batch and was not tried before; the first ones where
        not all can be afforded.
        """
        settled = ledger.get_many(unique.keys()).keys() | under_way | jobs.tried
        left = [request for each, request in unique.items() if each not in settled]
        count = len(left)
        if usd is not None:
            known = ledger.mean_tokens(account.model, account.role)
            owed = (request for each, request in unique.items() if each in under_way)
            free_usd = usd - sum(batch_costs_usd(owed, account.price, known))
            costs_usd = itertools.accumulate(batch_costs_usd(left, account.price, known))
            count = sum(total_usd <= free_usd for total_usd in costs_usd)
        return list(chunks(left[:count], settings.max_requests)), left[count:]

    async with store.hold_locks():
        for _ in range(_ROUNDS):
            adopted = await jobs.adopt()
            under_way = {each for job in adopted for each in job.request_hashes}
            portions, unaffordable = await asyncio.to_thread(plan, under_way, affordable_usd())
            await jobs.run(adopted, unique.keys(), portions)
            if not unaffordable:
                break
    found = await asyncio.to_thread(ledger.get_many, unique.keys())
    missing = tuple(each for each in unique if each not in found)
    over_budget = sum(request.request_hash not in found for request in unaffordable)
    return BatchOutcome(len(found), missing, dict(store.reasons + Counter(over_budget=over_budget)))


def chunks(
    requests: Iterable[Request], max_requests: int, max_bytes: int = _MAX_BYTES
) -> Iterator[list[Request]]:
    """Consecutive portions, each of which one batch takes."""
    chunk: list[Request] = []
    size = 0
    for request in requests:
        length = len(request_line(request))
        if chunk and (len(chunk) == max_requests or size + length > max_bytes):
            yield chunk
            chunk, size = [], 0
        chunk.append(request)
        size += length
    if chunk:
        yield chunk


def batch_costs_usd(
    requests: Iterable[Request], price: Price, mean_tokens: tuple[float, float, int] | None
) -> Iterator[float]:
    """What each request will cost at the batch API's price, by the mean tokens of prompt and
    completion.

    Where those are known from few calls, the cost is that of the longest answer that the request
    allows.
    """
    if mean_tokens and mean_tokens[2] >= _KNOWN_FROM_CALLS:
        mean_usd = _MARGIN * price.batch_factor * cost_usd(price, mean_tokens[0], mean_tokens[1])
        return (mean_usd for _ in requests)
    return (price.batch_factor * most_usd(request, price) for request in requests)
