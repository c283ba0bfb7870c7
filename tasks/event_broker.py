"""Prefect's in-memory broker without its limit of 10,000 events per reader, beyond which it drops them silently.

Prefect's server loads it by PREFECT_SERVER_EVENTS_MESSAGING_BROKER. Readers that are behind catch up later; until then
an event takes a few kilobytes of the server's memory.
"""

import asyncio
from typing import Any

from prefect.server.utilities.messaging.memory import (
    Consumer as _Consumer,
)
from prefect.server.utilities.messaging.memory import (
    MemoryMessage,
    Publisher,
    Subscription,
    Topic,
    break_topic,
    ephemeral_subscription,
)

__all__ = ["Consumer", "Publisher", "break_topic", "ephemeral_subscription"]


class Consumer(_Consumer):
    """Reads from a queue that is never full."""

    def __init__(self, topic: str, subscription: Subscription | None = None, concurrency: int = 2, **kwargs: Any):
        if subscription is None:
            subscription = Topic.by_name(topic).subscribe()
            subscription._queue = asyncio.Queue[MemoryMessage]()
        super().__init__(topic, subscription, concurrency, **kwargs)
