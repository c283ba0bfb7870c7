"""Prefect's server's handling of events: a broker that drops none, and an order that waits for none
of an earlier server.

Prefect's server loads it by PREFECT_SERVER_EVENTS_MESSAGING_BROKER and
PREFECT_SERVER_EVENTS_CAUSAL_ORDERING.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from prefect.server.events.ordering import memory as ordering
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.server.utilities.messaging import memory as messaging
from prefect.server.utilities.messaging.memory import Publisher, break_topic, ephemeral_subscription

__all__ = ["CausalOrdering", "Consumer", "Publisher", "break_topic", "ephemeral_subscription"]

_started = datetime.now(UTC)


class Consumer(messaging.Consumer):
    """Reads from a queue without limit.

    Prefect's own drops events silently while a reader is 10,000 of them behind. An event that waits
    takes a few kilobytes of the server's memory.
    """

    def __init__(
        self,
        topic: str,
        subscription: messaging.Subscription | None = None,
        concurrency: int = 2,
        **kwargs: Any,
    ):
        if subscription is None:
            subscription = messaging.Topic.by_name(topic).subscribe()
            subscription._queue = asyncio.Queue[messaging.MemoryMessage]()
        super().__init__(topic, subscription, concurrency, **kwargs)


class CausalOrdering(ordering.CausalOrdering):
    """Waits only for events that were made while this server ran.

    An event may name one that comes before it, and triggers wait up to 15 minutes for that one.
    Prefect keeps in memory which events came: after a restart, a failure would be reported, and a
    crash followed up, a quarter of an hour late.
    """

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        leader = event.follows
        if leader is None:
            return
        # The id of a Prefect event is a UUID of version 7: its first 48 bits are the time.
        leader_ms = leader.int >> 80
        started_ms = _started.timestamp() * 1000
        if leader.version != 7 or leader_ms >= started_ms:
            await super().wait_for_leader(event)
