"""The implementations of the bus port, with operations for tests."""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import asyncpg
import orjson

from penstock.kernel.bus import Bus
from penstock.kernel.bus.kafka import KafkaBus
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.clock import SystemClock
from penstock.kernel.db.database import Database
from tests.services.kafka import Kafka

NOWHERE = "127.0.0.1:1"
_numbers = itertools.count()
_RUN = os.urandom(4).hex()


class BusBackend(Protocol):
    """A bus, and a topic that no other test uses."""

    bus: Bus
    db: Database
    topic: str
    may_repeat: bool  # whether a change of workers may redeliver a message that a running worker handles

    async def relay(self) -> None:
        """Send the messages of committed transactions."""

    def address(self) -> "Address":
        """Return the address of the same bus for another process or event loop."""

    def dead(self) -> AbstractAsyncContextManager[Bus]:
        """A bus whose server does not answer."""


@dataclass(frozen=True)
class Address:
    """The address of a bus, which is passed to other processes as JSON."""

    dsn: str
    bootstrap: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def dump(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def load(cls, text: str) -> "Address":
        return cls(**orjson.loads(text))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Bus]:
        async with Database.open(self.dsn, size=4) as db:
            bus: Bus = KafkaBus(self.bootstrap, db=db, **self.options) if self.bootstrap else PostgresBus(db)
            try:
                yield bus
            finally:
                await bus.close()


class PostgresBusBackend:
    may_repeat = False

    def __init__(self, db: Database) -> None:
        self.db = db
        self.bus: Bus = PostgresBus(db)
        self.topic = new_topic()

    async def relay(self) -> None:
        """Do nothing: a commit is enough."""

    def address(self) -> Address:
        return Address(self.db.dsn)

    @asynccontextmanager
    async def dead(self) -> AsyncIterator[Bus]:
        dsn = f"postgresql://user@{NOWHERE}/none"
        async with asyncpg.create_pool(dsn, min_size=0) as pool:
            yield PostgresBus(Database(dsn, pool, SystemClock()))


class KafkaBusBackend:
    def __init__(self, db: Database, kafka: Kafka) -> None:
        self.db = db
        self.kafka = kafka
        self.may_repeat = not kafka.is_real  # the mock does not wait until all have joined again
        self._kafka_bus = KafkaBus(kafka.bootstrap, db=db, **kafka.options)
        self.bus: Bus = self._kafka_bus
        self.topic = new_topic()

    async def relay(self) -> None:
        while await self._kafka_bus.relay():
            pass

    def address(self) -> Address:
        return Address(self.db.dsn, self.kafka.bootstrap, dict(self.kafka.options))

    @asynccontextmanager
    async def dead(self) -> AsyncIterator[Bus]:
        bus = KafkaBus(NOWHERE, timeout=timedelta(seconds=1))
        try:
            yield bus
        finally:
            await bus.close()


def new_topic() -> str:
    return f"test.{_RUN}.{next(_numbers)}"
