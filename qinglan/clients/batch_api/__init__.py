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

from qinglan.clients.batch_api.jobs import BatchJobs, BatchProgress
from qinglan.clients.batch_api.service import BatchService, request_line
from qinglan.clients.batch_api.store import BatchStore
from qinglan.clients.completions import Account, Request, cost_usd, most_usd
from qinglan.config import BatchApi, Price
from qinglan.ledger import Ledger

_ROUNDS = 2
"""Under a budget the first round's real tokens show how much more can be afforded."""
_MAX_BYTES = 190_000_000
"""Size of one input file; OpenAI takes 200 MB."""
_KNOWN_FROM_CALLS = 50
"""Calls from which mean tokens are trusted."""
_MARGIN = 1.1


@dataclass(frozen=True)
class BatchOutcome:
    """The requests that got an answer, and those that did not."""

    answered: int
    missing: tuple[str, ...]
    """Hashes without an answer, in the order given: to be asked one by one."""
    reasons: dict[str, int]
    """Number of requests of batches that came back without an answer, by reason; `over_budget` were
    never sent."""


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

    def plan(
        hashes_under_way: Set[str], usd: float | None
    ) -> tuple[list[list[Request]], list[Request]]:
        """The requests to send, a batch per portion, and those that there is no money for.

        To be sent is what has no answer, is in no batch and was not tried before; the first ones
        where not all can be afforded.
        """
        settled = ledger.get_many(unique.keys()).keys() | hashes_under_way | jobs.tried
        open_requests = [request for key, request in unique.items() if key not in settled]
        count = len(open_requests)
        if usd is not None:
            mean_tokens = ledger.mean_tokens(account.model, account.role)
            under_way = [request for key, request in unique.items() if key in hashes_under_way]
            owed_usd = sum(batch_costs_usd(under_way, account.price, mean_tokens))
            costs_usd = batch_costs_usd(open_requests, account.price, mean_tokens)
            count = _affordable_count(costs_usd, usd - owed_usd)
        portions = list(chunks(open_requests[:count], settings.max_requests))
        return portions, open_requests[count:]

    async with store.hold_locks():
        for _ in range(_ROUNDS):
            adopted = await jobs.adopt()
            under_way = {request_hash for job in adopted for request_hash in job.request_hashes}
            portions, unaffordable = await asyncio.to_thread(plan, under_way, affordable_usd())
            await jobs.run(adopted, unique.keys(), portions)
            if not unaffordable:
                break
    answers = await asyncio.to_thread(ledger.get_many, unique.keys())
    missing_hashes = tuple(key for key in unique if key not in answers)
    over_budget = sum(request.request_hash not in answers for request in unaffordable)
    reasons = store.reasons + Counter(over_budget=over_budget)
    return BatchOutcome(len(answers), missing_hashes, dict(reasons))


def _affordable_count(costs_usd: Iterable[float], free_usd: float) -> int:
    """Number of requests, of the first ones, that cost no more than this together."""
    totals_usd = itertools.accumulate(costs_usd)
    return sum(total_usd <= free_usd for total_usd in totals_usd)


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
            chunk = []
            size = 0
        chunk.append(request)
        size += length
    if chunk:
        yield chunk


def batch_costs_usd(
    requests: Iterable[Request], price: Price, mean_tokens: tuple[float, float, int] | None
) -> Iterator[float]:
    """The cost of each request at the batch API's price, by the mean tokens of prompt and
    completion.

    Where those are known from few calls, the cost is that of the longest answer that the request
    allows.

    Args:
        mean_tokens: of prompts, of completions, and the number of calls that they are known from.
    """
    if mean_tokens:
        prompt_tokens, completion_tokens, calls = mean_tokens
        if calls >= _KNOWN_FROM_CALLS:
            full_usd = cost_usd(price, prompt_tokens, completion_tokens)
            mean_usd = _MARGIN * price.batch_factor * full_usd
            return (mean_usd for _ in requests)
    return (price.batch_factor * most_usd(request, price) for request in requests)
