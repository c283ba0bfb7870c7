"""The broker that Prefect's server is given drops nothing."""

import asyncio

from prefect.server.utilities.messaging import Message, StopConsumer, create_consumer
from prefect.server.utilities.messaging.memory import MemoryMessage, Topic
from prefect.settings import PREFECT_MESSAGING_BROKER, temporary_settings

MANY = 10_001
"""One more than Prefect's own holds."""


def test_a_reader_that_was_far_behind_gets_everything():
    seen = list[bytes | str]()

    async def read(message: Message) -> None:
        seen.append(message.data)
        if len(seen) == MANY:
            raise StopConsumer(ack=True)

    async def exchange() -> None:
        with temporary_settings({PREFECT_MESSAGING_BROKER: "qinglan.tasks.event_broker"}):
            consumer = create_consumer("far-behind", concurrency=1)  # refuses what is no broker
        for number in range(MANY):
            await Topic.by_name("far-behind").publish(MemoryMessage(str(number), {}))
        await consumer.run(read)
        await consumer.cleanup()

    asyncio.run(asyncio.wait_for(exchange(), 60))
    assert seen == [str(number) for number in range(MANY)]
