"""The bus on Kafka: what only Kafka has. The promises of every bus are in test_bus."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka import Message as Record
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.bus import Delivering, Message
from penstock.kernel.bus.kafka import KafkaBus
from penstock.kernel.bus.kafka.place import FULL_COUNT, Mark, Place, plan
from penstock.kernel.bus.kafka.topics import Topics
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Invalid, Transient
from penstock.kernel.tasks.outcome import Done, Failed
from tests.kernel.bus.backends import NOWHERE, new_topic
from tests.services.kafka import Kafka, kafka, mock_cluster

WITHIN = 40.0
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture(scope="module")
def broker() -> Iterator[Kafka]:
    with kafka() as service:
        yield service


@asynccontextmanager
async def bus_on(
    service: Kafka, db: Database | None = None, timeout: timedelta = timedelta(seconds=4)
) -> AsyncIterator[KafkaBus]:
    bus = KafkaBus(service.bootstrap, db=db, timeout=timeout, **service.options)
    try:
        yield bus
    finally:
        await bus.close()


async def handle_all(bus: KafkaBus, topic: str, count: int) -> list[str]:
    """Handle *count* different messages, come what may; what was handled, in order."""
    handled: list[str] = []
    async with bus.subscribe(topic, worker="w") as subscription, asyncio.timeout(WITHIN):
        while len(set(handled)) < count:
            taken = await subscription.take(10)
            handled += [delivery.message.value.decode() for delivery in taken]
            await subscription.settle([(delivery, Done()) for delivery in taken])
            await subscription.wait(0 if taken else 1)
    return handled


def test_a_topic_just_made_has_a_backlog(broker: Kafka) -> None:
    """R26: as long as its partitions have no leader the answer waits, and is no failure."""
    broker.needs_real("makes no topics when it is asked to")
    topics = Topics({"bootstrap.servers": broker.bootstrap}, timeout=WITHIN)
    for topic in [new_topic() for _ in range(15)]:
        assert topics.make(topic, 8)
        assert topics.backlog(topic, "nobody") == 0


async def test_what_others_wrote_is_shown_and_kept_byte_for_byte(broker: Kafka) -> None:
    """R10: keys, values and headers that are no text are delivered as far as they can be, and dead-lettered as is."""
    topic = new_topic()
    async with bus_on(broker) as bus, bus.subscribe(topic, worker="w") as subscription:
        foreign = Producer({"bootstrap.servers": broker.bootstrap})
        foreign.produce(topic, key=b"\xff\xfe", value=None, headers=[("h", b"\x80"), ("none", None)])
        foreign.flush(10)
        async with asyncio.timeout(WITHIN):
            while not (taken := await subscription.take(10)):
                await subscription.wait(1)
        assert taken[0].message == Message(topic, "��", b"", {"h": "�", "none": ""})
        await subscription.settle([(taken[0], Failed("no JSON"))])
        [letter] = await bus.dead_letters(topic)
        assert (letter.message, letter.reason) == (taken[0].message, "no JSON")
    record = await asyncio.to_thread(first_record, broker, f"{topic}.dead")
    assert (record.key(), record.value()) == (b"\xff\xfe", None)
    headers = dict(record.headers() or [])
    assert (headers["h"], headers["none"]) == (b"\x80", None)
    assert (headers["penstock-reason"], headers["penstock-attempts"]) == (b"no JSON", b"1")
    assert headers["penstock-died-at"] == letter.died_at.isoformat().encode()


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


async def test_the_outbox_keeps_what_could_not_be_sent(broker: Kafka, db: Database) -> None:
    """R8: what a transaction published is sent, in order, when Kafka is back; it is sent once while nothing fails."""
    topic = new_topic()
    messages = [Message(topic, "a", str(n).encode(), {"n": str(n)}) for n in range(3)]
    async with bus_on(Kafka(NOWHERE, is_real=False), db, timeout=SECOND) as bus:
        async with db.transaction() as tx:
            await bus.publish(messages, tx=tx)
        with pytest.raises(Transient, match="Kafka does not answer"):
            await bus.relay()
    async with bus_on(broker, db) as bus:
        assert await bus.relay() == 3
        assert await bus.relay() == 0
        assert await handle_all(bus, topic, 3) == ["0", "1", "2"]


async def test_a_bus_without_a_database_has_nothing_to_relay(broker: Kafka) -> None:
    async with bus_on(broker) as bus:
        with pytest.raises(BadConfig, match="no database"):
            await bus.relay()


async def test_a_message_is_measured_with_its_headers(broker: Kafka) -> None:
    """R8: what Kafka would refuse later, and block the outbox with, is refused when it is published."""
    async with bus_on(broker) as bus:
        with pytest.raises(Invalid, match="with its key and headers"):
            await bus.publish([Message(new_topic(), "a", b"", {"h": "x" * 1_000_000})])


async def test_a_broker_that_goes_and_comes_back_costs_nothing() -> None:
    """R8, R11: meanwhile publishing fails in time and leaving does not hang; afterwards every message is handled."""
    topic = new_topic()
    with mock_cluster() as cluster:
        async with bus_on(cluster.kafka, timeout=2 * SECOND) as bus:
            await bus.publish([Message(topic, "a", str(n).encode()) for n in range(3)])
            lease = Delivering(lease_for=2 * SECOND)
            async with bus.subscribe(topic, worker="unlucky", delivering=lease) as subscription:
                async with asyncio.timeout(WITHIN):
                    while not await subscription.take(2):
                        await subscription.wait(1)
                cluster.go_down()
                with pytest.raises(Transient) as failure:
                    await bus.publish([Message(topic, "a", b"lost")])
                assert failure.value.code == "BUS_DOWN"
            cluster.come_up()
            handled = await handle_all(bus, topic, 3)
    assert list(dict.fromkeys(handled)) == ["0", "1", "2"]


async def test_topics_are_made_with_the_partitions_asked_for(broker: Kafka) -> None:
    """R9: the first to publish or subscribe makes the topic, and its dead letters keep one order."""
    broker.needs_real("does not make topics on request")
    topic = new_topic()
    bus = KafkaBus(broker.bootstrap, partitions=5)
    async with bus.subscribe(topic, worker="w"):
        pass
    await bus.close()
    client = Producer({"bootstrap.servers": broker.bootstrap})
    topics = (await asyncio.to_thread(client.list_topics, timeout=10)).topics
    assert (len(topics[topic].partitions), len(topics[f"{topic}.dead"].partitions)) == (5, 1)


# The state of a partition, as pure code

offsets = st.none() | st.integers(0, 2**62)
marks = st.builds(
    Mark, st.integers(0, 2**62), st.integers(0, 100), offsets, offsets, st.none() | st.datetimes(timezones=st.just(UTC))
)


@given(marks)
def test_a_mark_is_read_as_it_was_written(mark: Mark) -> None:
    """What the next holder learns is what the last one knew; and it fits into what a broker keeps, 4096 bytes."""
    assert Mark.load(mark.dump()) == mark
    assert len(mark.dump()) < 4_096


@given(st.none() | st.text())
def test_a_mark_of_somebody_else_means_nothing(text: str | None) -> None:
    """Tools that move a group's position leave their own text; that is no death of a worker."""
    assert Mark.load(text) == Mark()


def place(partition: int, count: int, mark: Mark | None = None) -> Place:
    """A partition with *count* messages fetched, its last holder's mark at the first."""
    made = Place(partition)
    made.learn(0, (mark or Mark()).dump())
    for offset in range(count):
        made.add(Record(topic="t", partition=partition, offset=offset, key=b"k", value=b"v"))
    return made


def test_a_suspect_is_planned_alone() -> None:
    """A message that was out when its worker died goes alone when it has waited longest; until then it waits."""
    sound, suspect = place(0, 5), place(1, 5, Mark(out_upto=2))
    assert plan([sound, suspect], 10, NOW) == [(sound, 5)]
    sound.taken_at = 1.0
    assert plan([sound, suspect], 10, NOW) == [(suspect, 1)]


@given(st.lists(st.integers(1, 50), max_size=10), st.integers(1, 100))
def test_a_plan_shares_out_what_was_asked_for(counts: list[int], limit: int) -> None:
    """Nobody is given more than asked for, and nothing is left while there is room."""
    shares = plan([place(number, count) for number, count in enumerate(counts)], limit, NOW)
    taken = sum(share for _, share in shares)
    assert taken == min(limit, sum(counts))
    assert all(0 < share <= len(held.waiting) for held, share in shares)


def test_what_is_fetched_ahead_is_bounded() -> None:
    held = place(0, FULL_COUNT - 1)
    assert not held.is_full
    held.add(Record(offset=FULL_COUNT, value=b""))
    assert held.is_full
    assert not held.has_room
