"""The broker that Prefect's server is given drops nothing."""

import asyncio

from prefect.server.utilities.messaging import BrokerModule, StopConsumer
from prefect.server.utilities.messaging.memory import MemoryMessage, Topic

from tasks import event_broker

MANY = 10_001
"""One more than Prefect's own holds."""


def test_a_reader_that_was_far_behind_gets_everything():
    module: BrokerModule = event_broker
    seen = list[bytes | str]()

    async def read(message: MemoryMessage) -> None:
        seen.append(message.data)
        if len(seen) == MANY:
            raise StopConsumer(ack=True)

    async def exchange() -> None:
        consumer = event_broker.Consumer("far-behind", concurrency=1)
        for number in range(MANY):
            await Topic.by_name("far-behind").publish(MemoryMessage(str(number), {}))
        await consumer.run(read)
        await consumer.cleanup()

    asyncio.run(asyncio.wait_for(exchange(), 60))
    assert module.Consumer is event_broker.Consumer
    assert seen == [str(number) for number in range(MANY)]
