"""What goes into which batch, and what it will cost."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from qinglan.clients.batch_api.wire import request_line
from qinglan.clients.chat import TOKENS_PER_CHARACTER, Account, Request, cost_usd
from qinglan.config import Price
from qinglan.ledger import Ledger

MAX_BYTES = 190_000_000
"""Of one input file; OpenAI takes 200 MB."""
_KNOWN_FROM_CALLS = 50
_MARGIN = 1.1
_DEFAULT_COMPLETION_TOKENS = 1024


@dataclass(frozen=True)
class BatchPlan:
    """What is sent now, a batch per chunk, and what there is no money for."""

    chunks: list[list[Request]]
    unaffordable: list[Request]


def make_plan(
    requests: Mapping[str, Request],
    under_way: Set[str],
    tried: Set[str],
    ledger: Ledger,
    account: Account,
    affordable_usd: float | None,
    max_requests: int,
) -> BatchPlan:
    """What has no answer, is in no batch and was not tried before; the first ones where not all can be afforded.

    Args:
        requests: by hash.
        affordable_usd: batches under way are still to be taken off.
    """
    settled = ledger.get_many(requests.keys()).keys() | under_way | tried
    left = [request for each, request in requests.items() if each not in settled]
    count = len(left)
    if affordable_usd is not None:
        known = ledger.mean_tokens(account.model, account.role)
        owed = (request for each, request in requests.items() if each in under_way)
        usd = affordable_usd - sum(batch_costs_usd(owed, account.price, known))
        count = affordable(batch_costs_usd(left, account.price, known), usd)
    return BatchPlan(list(chunks(left[:count], max_requests)), left[count:])


def chunks(requests: Iterable[Request], max_requests: int, max_bytes: int = MAX_BYTES) -> Iterator[list[Request]]:
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
    """What each request will cost at the batch API's price.

    Args:
        mean_tokens: of prompt and completion over so many calls, where any are known; few calls say little, and
            then the longest answer that the request allows is reckoned with.
    """
    if mean_tokens and mean_tokens[2] >= _KNOWN_FROM_CALLS:
        mean_usd = _MARGIN * price.batch_factor * (
            price.input_per_million_usd * mean_tokens[0] + price.output_per_million_usd * mean_tokens[1]
        ) / 1e6  # fmt: skip
        yield from (mean_usd for _ in requests)
        return
    for request in requests:
        prompt = TOKENS_PER_CHARACTER * sum(len(message["content"]) for message in request.body["messages"])
        longest = request.body.get("max_completion_tokens") or request.body.get("max_tokens")
        yield price.batch_factor * cost_usd(price, round(prompt), longest or _DEFAULT_COMPLETION_TOKENS)


def affordable(costs_usd: Iterable[float], usd: float) -> int:
    """How many of the first requests can be paid for."""
    return sum(total <= usd for total in itertools.accumulate(costs_usd))
