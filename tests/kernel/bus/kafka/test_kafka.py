"""Properties of the bus on Kafka only. The guarantees of every bus are in test_bus."""

import asyncio
from datetime import timedelta

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka import Message as Record

from penstock.kernel.bus import BusMessage, DeliveryPolicy
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.outcome import Failed
from tests.kernel.bus.backends import new_topic
from tests.kernel.bus.kafka.buses import WITHIN, bus_on, handle_all
from tests.services.kafka import Kafka, mock_cluster

SECOND = timedelta(seconds=1)


async def test_messages_of_other_producers_are_dead_lettered_byte_for_byte(broker: Kafka) -> None:
    """R10: keys and headers that are not text are decoded lossily for delivery, and dead-lettered unchanged."""
    topic = new_topic()
    async with bus_on(broker) as bus, bus.subscribe(topic, worker="w") as subscription:
        foreign = Producer({"bootstrap.servers": broker.bootstrap})
        foreign.produce(topic, key=b"\xff\xfe", value=None, headers=[("h", b"\x80"), ("none", None)])
        foreign.flush(10)
        async with asyncio.timeout(WITHIN):
            while not (taken := await subscription.take(10)):
                await subscription.wait(1)
        assert taken[0].message == BusMessage(topic, "��", b"", {"h": "�", "none": ""})
        await subscription.settle([(taken[0], Failed("no JSON"))])
        [dead_letter] = await bus.read_dead_letters(topic)
        assert (dead_letter.message, dead_letter.reason) == (taken[0].message, "no JSON")
    record = await asyncio.to_thread(first_record, broker, f"{topic}.dead")
    assert (record.key(), record.value()) == (b"\xff\xfe", None)
    headers = dict(record.headers() or [])
    assert (headers["h"], headers["none"]) == (b"\x80", None)
    assert (headers["penstock-reason"], headers["penstock-attempts"]) == (b"no JSON", b"1")
    assert headers["penstock-died-at"] == dead_letter.died_at.isoformat().encode()


async def test_dead_letters_are_counted_from_an_offset(broker: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: the broker finds the first dead letter since a time; that one and those after it are counted."""
    topic, starts = new_topic(), [0, 1, 2]

    class IndexedConsumer(Consumer):  # the mock cluster has no index of messages by time
        def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = 10) -> list[TopicPartition]:
            start = starts.pop(0)
            ends = [self.get_watermark_offsets(each, timeout=timeout)[1] for each in partitions]
            return [
                TopicPartition(each.topic, each.partition, start if start < end else -1)
                for each, end in zip(partitions, ends, strict=True)
            ]

    monkeypatch.setattr("penstock.kernel.bus.kafka.topics.Consumer", IndexedConsumer)
    async with bus_on(broker) as bus, bus.subscribe(topic, worker="w") as subscription:
        await bus.publish([BusMessage(topic, "key", b"1"), BusMessage(topic, "key", b"2")])
        async with asyncio.timeout(WITHIN):
            while len(taken := await subscription.take(10)) < 2:
                await subscription.wait(1)
        await subscription.settle([(delivery, Failed("no JSON")) for delivery in taken])
        first, second = await bus.read_dead_letters(topic)
        counts = [await bus.count_dead_letters(topic, first.died_at - SECOND) for _ in range(3)]
    assert [count.number for count in counts] == [2, 1, 0]
    for count, dead_letter in zip(counts, (first, second), strict=False):
        assert count.oldest is not None
        assert abs(count.oldest - dead_letter.died_at) < 60 * SECOND
    assert counts[2].oldest is None


def first_record(broker: Kafka, topic: str) -> Record:
    reader = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "test.reader"})
    try:
        numbers = reader.list_topics(topic).topics[topic].partitions
        reader.assign([TopicPartition(topic, number, 0) for number in numbers])
        record = reader.poll(10)
        assert record is not None
        return record
    finally:
        reader.close()


async def test_an_outage_of_the_broker_loses_no_message() -> None:
    """R8, R11: during the outage publishing fails in time and leaving does not hang; then every message is handled."""
    topic = new_topic()
    with mock_cluster() as cluster:
        async with bus_on(cluster.kafka, timeout=2 * SECOND) as bus:
            await bus.publish([BusMessage(topic, "a", str(n).encode()) for n in range(3)])
            lease = DeliveryPolicy(lease_for=2 * SECOND)
            async with bus.subscribe(topic, worker="unlucky", policy=lease) as subscription:
                async with asyncio.timeout(WITHIN):
                    while not await subscription.take(2):
                        await subscription.wait(1)
                cluster.go_down()
                with pytest.raises(Transient) as failure:
                    await bus.publish([BusMessage(topic, "a", b"lost")])
                assert failure.value.code == "BUS_DOWN"
            cluster.come_up()
            handled = await handle_all(bus, topic, 3)
    assert list(dict.fromkeys(handled)) == ["0", "1", "2"]
