"""Topics: created with the requested partitions, and their backlog."""

import asyncio

from confluent_kafka import Producer

from penstock.kernel.bus.kafka import KafkaBus
from penstock.kernel.bus.kafka.topics import Topics
from tests.kernel.bus.backends import new_topic
from tests.kernel.bus.kafka.buses import WITHIN
from tests.services.kafka import Kafka
from tests.support.wait import becomes


def test_a_new_topic_has_a_backlog(broker: Kafka) -> None:
    """R26: while its partitions have no leader the call waits, and does not fail."""
    broker.needs_real("makes no topics when it is asked to")
    topics = Topics({"bootstrap.servers": broker.bootstrap}, timeout=WITHIN)
    for topic in [new_topic() for _ in range(15)]:
        assert topics.create(topic, 8)
        assert topics.count_backlog(topic, "other") == 0


async def test_topics_are_created_with_the_requested_partitions(broker: Kafka) -> None:
    """R9: the first publisher or subscriber creates the topic, and its dead-letter topic has one partition."""
    broker.needs_real("does not make topics on request")
    topic = new_topic()
    bus = KafkaBus(broker.bootstrap, partitions=5)
    async with bus.subscribe(topic, worker="w"):
        pass
    await bus.close()
    client = Producer({"bootstrap.servers": broker.bootstrap})

    async def partitions() -> dict[str, int]:
        known = (await asyncio.to_thread(client.list_topics, timeout=10)).topics
        return {name: len(known[name].partitions) for name in (topic, f"{topic}.dead") if name in known}

    async def are_known() -> bool:
        return len(await partitions()) == 2

    # The controller has created the topics; another broker may know them a moment later.
    await becomes(are_known, "the broker knows both topics", WITHIN)
    assert await partitions() == {topic: 5, f"{topic}.dead": 1}
