"""Prefect's order of events without the wait for those that an earlier server handled.

An event may name one that comes before it, and triggers wait up to 15 minutes for that one. Which events came, Prefect
keeps in memory: after a restart, the failure of a run that changed its state just before would be told, and a crash
followed up, a quarter of an hour late.

Prefect's server loads it by PREFECT_SERVER_EVENTS_CAUSAL_ORDERING.
"""

from datetime import UTC, datetime
from uuid import UUID

from prefect.server.events.ordering.memory import CausalOrdering as _CausalOrdering
from prefect.server.events.schemas.events import ReceivedEvent

__all__ = ["CausalOrdering"]

_started = datetime.now(UTC)


class CausalOrdering(_CausalOrdering):
    """Waits only for what was made while this server ran."""

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        """Wait until the event that comes before this one was handled.

        Raises:
            EventArrivedEarly: it has not come yet; when it does, this one is handled after it.
        """
        if event.follows is None or not _is_of_earlier_server(event.follows):
            await super().wait_for_leader(event)


def _is_of_earlier_server(event_id: UUID) -> bool:
    """By the time in its id, which Prefect makes of the seventh kind: milliseconds in the first 48 bits."""
    return event_id.version == 7 and event_id.int >> 80 < _started.timestamp() * 1000
