"""The bus on Apache Kafka: a topic is a topic, its workers one consumer group, positions are committed by hand."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from penstock.kernel.bus import BusMessage, DeadLetter, DeadLetterCount, DeliveryPolicy, validate_messages
from penstock.kernel.bus.kafka.letters import dead_topic, exhume
from penstock.kernel.bus.kafka.sender import KafkaSender, OutgoingMessage
from penstock.kernel.bus.kafka.subscription import KafkaSubscription, consumer_settings
from penstock.kernel.bus.kafka.topics import Topics
from penstock.kernel.clock import SystemClock
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import BadConfig, Invalid, Transient

SQL = sql.load("penstock.kernel.bus.kafka")
OUTBOX = Outbox("bus_outbox")
MESSAGE_LIMIT = 950_000  # with key and headers; brokers take a million, and a dead letter carries its reason too


class KafkaBus:
    """Every process that knows the brokers shares the bus.

    *db* holds what is published in a transaction until `relay` sends it. *config* are librdkafka's own settings, for
    all clients (security, say), *consumer_config* for those of subscriptions only. Without *makes_topics* they must
    be there, or the cluster makes them on demand.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        db: Database | None = None,
        partitions: int = 16,
        group_prefix: str = "penstock",
        timeout: timedelta = timedelta(seconds=4),
        makes_topics: bool = True,
        config: Mapping[str, Any] | None = None,
        consumer_config: Mapping[str, Any] | None = None,
    ) -> None:
        # Back soon after the brokers are: librdkafka's own ten seconds would outlast our time-out.
        self._config = {"reconnect.backoff.max.ms": 1_000, **(config or {}), "bootstrap.servers": bootstrap}
        self._consumer_config = {**self._config, **(consumer_config or {})}
        self._db = db
        self._partitions = partitions
        self._group_prefix = group_prefix
        self._clock = db.clock if db else SystemClock()
        self._makes_topics = makes_topics
        self._known: set[str] = set()
        self._looks: dict[str, Future[None]] = {}
        self._looking = ThreadPoolExecutor(1, "kafka topics")
        self._sender = KafkaSender(self._config, timeout.total_seconds())
        self._topics = Topics(self._config, timeout.total_seconds())

    async def publish(self, messages: Sequence[BusMessage], *, tx: Connection | None = None) -> None:
        for message in validate_messages(messages):
            _check_size(message)
        if tx is None:
            await self._publish([_letter(message) for message in messages])
        elif messages:
            await tx.execute(
                SQL["keep"],
                [message.topic for message in messages],
                [message.key for message in messages],
                [message.value for message in messages],
                [dict(message.headers) for message in messages],
            )

    async def relay(self, *, limit: int = 500) -> int:
        """Send what transactions published, oldest first, at least once; returns how many. One relay at a time."""
        if self._db is None:
            raise BadConfig("BUS_DATABASE_MISSING", "this bus was given no database to relay from")

        async def send(rows: Sequence[asyncpg.Record]) -> None:
            messages = [BusMessage(row["topic"], row["key"], row["value"], row["headers"]) for row in rows]
            await self._publish([_letter(message) for message in messages])

        return await OUTBOX.relay(self._db, send, limit=limit)

    @asynccontextmanager
    async def subscribe(
        self,
        topic: str,
        *,
        worker: str,
        policy: DeliveryPolicy = DeliveryPolicy(),  # noqa: B008 - frozen
    ) -> AsyncIterator[KafkaSubscription]:
        await asyncio.to_thread(self._ensure, [topic])
        await asyncio.to_thread(self._ensure, [dead_topic(topic)], partitions=1)  # one, so that they keep their order
        settings = consumer_settings(
            self._consumer_config, group=self._group(topic), worker=worker, lease_for=policy.lease_for
        )
        subscription = KafkaSubscription(topic, policy, settings, self._clock, self._deliver)
        async with subscription.joined():
            yield subscription

    async def backlog(self, topic: str) -> int:
        return await asyncio.to_thread(self._topics.backlog, topic, self._group(topic))

    async def dead_letters(self, topic: str, *, limit: int = 100) -> list[DeadLetter]:
        records = await asyncio.to_thread(self._topics.oldest, dead_topic(topic), limit)
        letters = [exhume(topic, record) for record in records]
        return sorted(letters, key=lambda letter: letter.died_at)[:limit]

    async def count_dead_letters(self, topic: str, since: datetime) -> DeadLetterCount:
        # The broker knows the time at which a dead letter was sent, which is just after it died.
        count, oldest_ms = await asyncio.to_thread(
            self._topics.count_since, dead_topic(topic), int(since.timestamp() * 1000)
        )
        return DeadLetterCount(count, datetime.fromtimestamp(oldest_ms / 1000, UTC) if count else None)

    async def check(self) -> None:
        await asyncio.to_thread(self._sender.check)

    async def close(self) -> None:
        self._looking.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._sender.close)

    def _group(self, topic: str) -> str:
        return f"{self._group_prefix}.{topic}"

    async def _publish(self, letters: Sequence[OutgoingMessage]) -> None:
        if not letters:
            return
        topics = {letter.topic for letter in letters}
        try:
            await self._ensured(topics)
            await asyncio.wrap_future(await asyncio.to_thread(self._sender.send, letters))
        except Transient:
            self._known -= topics  # one of them may be gone
            raise

    async def _ensured(self, topics: Iterable[str]) -> None:
        """Have *topics* there; all who ask while brokers are silent wait for one answer, not each for its own."""
        for topic in set(topics) - self._known:
            look = self._looks.get(topic)
            if look is None or look.done():
                look = self._looks[topic] = self._looking.submit(self._ensure, [topic])
            await asyncio.shield(asyncio.wrap_future(look))

    def _deliver(self, letters: Sequence[OutgoingMessage]) -> None:
        self._sender.send(letters).result()

    def _ensure(self, topics: Iterable[str], *, partitions: int | None = None) -> None:
        """Have *topics* there; each is asked for once per process."""
        for topic in set(topics) - self._known:
            if not (self._makes_topics and self._topics.make(topic, partitions or self._partitions)):
                self._sender.find(topic)
            self._known.add(topic)


def _letter(message: BusMessage) -> OutgoingMessage:
    return OutgoingMessage(message.topic, message.key.encode(), message.value, list(message.headers.items()))


def _check_size(message: BusMessage) -> None:
    headers = sum(len(name.encode()) + len(value.encode()) for name, value in message.headers.items())
    size = len(message.key.encode()) + len(message.value) + headers
    if size > MESSAGE_LIMIT:
        raise Invalid(
            "BAD_MESSAGE",
            f"a message has at most {MESSAGE_LIMIT} bytes with its key and headers, this one has {size}",
            hint="send it in chunks",
        )
