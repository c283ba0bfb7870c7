"""Prefect's server drops no event, and only some wait for the one before them."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from prefect.server.events.ordering import EventArrivedEarly
from prefect.server.events.schemas.events import ReceivedEvent, Resource
from prefect.server.utilities.messaging import Message, StopConsumer, create_consumer
from prefect.server.utilities.messaging.memory import MemoryMessage, Topic
from prefect.settings import PREFECT_MESSAGING_BROKER, temporary_settings

from qinglan.tasks import server_events
from qinglan.tasks.server_events import CausalOrdering

STARTED = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
MANY = 10_001
"""One event more than Prefect's own broker holds."""


def made_at(time: datetime) -> UUID:
    """A UUID of the seventh kind."""
    return UUID(int=int(time.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | 1)


def event(follows: UUID | None) -> ReceivedEvent:
    return ReceivedEvent(
        id=uuid4(),
        occurred=datetime.now(UTC),
        event="prefect.flow-run.Failed",
        resource=Resource({"prefect.resource.id": "prefect.flow-run.f"}),
        follows=follows,
    )


@pytest.fixture
def ordering(monkeypatch: pytest.MonkeyPatch) -> CausalOrdering:
    monkeypatch.setattr(server_events, "_started", STARTED)
    return CausalOrdering(scope=f"test {uuid4()}")


async def test_what_an_earlier_server_handled_is_not_waited_for(ordering: CausalOrdering):
    await ordering.wait_for_leader(event(made_at(STARTED - timedelta(milliseconds=1))))
    await ordering.wait_for_leader(event(None))


@pytest.mark.parametrize(
    "leader", [made_at(STARTED), made_at(STARTED + timedelta(minutes=1)), uuid4()]
)
async def test_what_is_under_way_is(ordering: CausalOrdering, leader: UUID):
    with pytest.raises(EventArrivedEarly):
        await ordering.wait_for_leader(event(leader))
    first = event(None).model_copy(update={"id": leader})
    await ordering.record_event_as_seen(first)
    await ordering.wait_for_leader(event(leader))


def test_a_reader_that_was_far_behind_gets_everything():
    received: list[bytes | str] = []

    async def read(message: Message) -> None:
        received.append(message.data)
        if len(received) == MANY:
            raise StopConsumer(ack=True)

    async def exchange() -> None:
        with temporary_settings({PREFECT_MESSAGING_BROKER: "qinglan.tasks.server_events"}):
            # It refuses what is no broker.
            consumer = create_consumer("far-behind", concurrency=1)
        for number in range(MANY):
            await Topic.by_name("far-behind").publish(MemoryMessage(str(number), {}))
        await consumer.run(read)
        await consumer.cleanup()

    asyncio.run(asyncio.wait_for(exchange(), 60))
    assert received == [str(number) for number in range(MANY)]
