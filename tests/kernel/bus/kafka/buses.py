"""Buses on a broker, for tests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from penstock.kernel.bus.kafka import KafkaBus
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.outcome import Done
from tests.services.kafka import Kafka

WITHIN = 40.0


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
    """Handle *count* different messages, with retries, and return them in order."""
    handled: list[str] = []
    async with bus.subscribe(topic, worker="w") as subscription, asyncio.timeout(WITHIN):
        while len(set(handled)) < count:
            taken = await subscription.take(10)
            handled += [delivery.message.value.decode() for delivery in taken]
            await subscription.settle([(delivery, Done()) for delivery in taken])
            await subscription.wait(0 if taken else 1)
    return handled
