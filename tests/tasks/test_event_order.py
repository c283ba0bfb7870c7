"""Which events wait for the one before them."""

from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from prefect.server.events.ordering import EventArrivedEarly
from prefect.server.events.schemas.events import ReceivedEvent, Resource

from qinglan.tasks import event_order
from qinglan.tasks.event_order import CausalOrdering

STARTED = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)


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
    monkeypatch.setattr(event_order, "_started", STARTED)
    return CausalOrdering(scope=f"test {uuid4()}")


async def test_what_an_earlier_server_handled_is_not_waited_for(ordering: CausalOrdering):
    await ordering.wait_for_leader(event(made_at(STARTED - timedelta(milliseconds=1))))
    await ordering.wait_for_leader(event(None))


@pytest.mark.parametrize("leader", [made_at(STARTED), made_at(STARTED + timedelta(minutes=1)), uuid4()])
async def test_what_is_under_way_is(ordering: CausalOrdering, leader: UUID):
    with pytest.raises(EventArrivedEarly):
        await ordering.wait_for_leader(event(leader))
    first = event(None).model_copy(update={"id": leader})
    await ordering.record_event_as_seen(first)
    await ordering.wait_for_leader(event(leader))
