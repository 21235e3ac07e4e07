"""Sending to Kafka, directly and through the outbox."""

from datetime import timedelta

import pytest

from penstock.kernel.bus import BusMessage
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Invalid, Transient
from tests.kernel.bus.backends import NOWHERE, new_topic
from tests.kernel.bus.kafka.buses import bus_on, handle_all
from tests.services.kafka import Kafka

SECOND = timedelta(seconds=1)


async def test_the_outbox_keeps_unsent_messages(broker: Kafka, db: Database) -> None:
    """R8: messages of a transaction are sent in order when Kafka is back, and once if nothing fails."""
    topic = new_topic()
    messages = [BusMessage(topic, "a", str(n).encode(), {"n": str(n)}) for n in range(3)]
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
        with pytest.raises(BadConfig, match="without a database"):
            await bus.relay()


async def test_a_message_is_measured_with_its_headers(broker: Kafka) -> None:
    """R8: a message that Kafka would refuse later, and that would block the outbox, is refused when published."""
    async with bus_on(broker) as bus:
        with pytest.raises(Invalid, match="with its key and headers"):
            await bus.publish([BusMessage(new_topic(), "a", b"", {"h": "x" * 1_000_000})])
