"""The bus on Apache Kafka: a topic is a Kafka topic, its workers are one consumer group, offsets are committed."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from penstock.kernel.bus import BusMessage, DeadLetter, DeadLetterCount, DeliveryPolicy, validate_messages
from penstock.kernel.bus.kafka.dead_letters import name_dead_letter_topic, parse_dead_letter
from penstock.kernel.bus.kafka.sender import KafkaSender, OutgoingMessage
from penstock.kernel.bus.kafka.subscription import KafkaSubscription, make_consumer_settings
from penstock.kernel.bus.kafka.topics import Topics
from penstock.kernel.clock import SystemClock
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import BadConfig, Invalid, Transient

SQL = sql.load("penstock.kernel.bus.kafka")
OUTBOX = Outbox("bus_outbox")
MESSAGE_LIMIT = 950_000  # with key and headers; the limit of brokers is a million, and dead letters have more headers


class KafkaBus:
    """The bus of all processes that use the same brokers.

    *db* stores messages published in a transaction until `relay` sends them. *config* has properties of librdkafka for
    all clients, e.g. for security, and *consumer_config* those of subscriptions only. Without *creates_topics* topics
    must exist, or the cluster creates them on demand.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        db: Database | None = None,
        partitions: int = 16,
        group_prefix: str = "penstock",
        timeout: timedelta = timedelta(seconds=4),
        creates_topics: bool = True,
        config: Mapping[str, Any] | None = None,
        consumer_config: Mapping[str, Any] | None = None,
    ) -> None:
        # Reconnect soon after the brokers are back: the default of librdkafka, 10 s, is longer than our timeout.
        self._config = {"reconnect.backoff.max.ms": 1_000, **(config or {}), "bootstrap.servers": bootstrap}
        self._consumer_config = {**self._config, **(consumer_config or {})}
        self._db = db
        self._partitions = partitions
        self._group_prefix = group_prefix
        self._clock = db.clock if db else SystemClock()
        self._creates_topics = creates_topics
        self._existing: set[str] = set()
        self._checks: dict[str, Future[None]] = {}
        self._checker = ThreadPoolExecutor(1, "kafka topics")
        self._sender = KafkaSender(self._config, timeout.total_seconds())
        self._topics = Topics(self._config, timeout.total_seconds())

    async def publish(self, messages: Sequence[BusMessage], *, tx: Connection | None = None) -> None:
        for message in validate_messages(messages):
            _check_size(message)
        if tx is None:
            await self._publish([_convert_message(message) for message in messages])
        elif messages:
            await tx.execute(
                SQL["store"],
                [message.topic for message in messages],
                [message.key for message in messages],
                [message.value for message in messages],
                [dict(message.headers) for message in messages],
            )

    async def relay(self, *, limit: int = 500) -> int:
        """Send the messages of transactions, oldest first, at least once, and return their number; one relay runs."""
        if self._db is None:
            raise BadConfig("BUS_DATABASE_MISSING", "the bus was opened without a database to relay from")

        async def send(rows: Sequence[asyncpg.Record]) -> None:
            messages = [BusMessage(row["topic"], row["key"], row["value"], row["headers"]) for row in rows]
            await self._publish([_convert_message(message) for message in messages])

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
        await asyncio.to_thread(
            self._ensure, [name_dead_letter_topic(topic)], partitions=1
        )  # 1: dead letters stay in order
        settings = make_consumer_settings(
            self._consumer_config, group=self._name_group(topic), worker=worker, lease_for=policy.lease_for
        )
        subscription = KafkaSubscription(topic, policy, settings, self._clock, self._deliver)
        async with subscription.open():
            yield subscription

    async def count_backlog(self, topic: str) -> int:
        return await asyncio.to_thread(self._topics.count_backlog, topic, self._name_group(topic))

    async def read_dead_letters(self, topic: str, *, limit: int = 100) -> list[DeadLetter]:
        records = await asyncio.to_thread(self._topics.read_oldest, name_dead_letter_topic(topic), limit)
        letters = [parse_dead_letter(topic, record) for record in records]
        return sorted(letters, key=lambda letter: letter.died_at)[:limit]

    async def count_dead_letters(self, topic: str, since: datetime) -> DeadLetterCount:
        # The broker knows the time at which a dead letter was sent, which is just after it died.
        count, oldest_ms = await asyncio.to_thread(
            self._topics.count_since, name_dead_letter_topic(topic), int(since.timestamp() * 1000)
        )
        return DeadLetterCount(count, datetime.fromtimestamp(oldest_ms / 1000, UTC) if count else None)

    async def check(self) -> None:
        await asyncio.to_thread(self._sender.check)

    async def close(self) -> None:
        self._checker.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._sender.close)

    def _name_group(self, topic: str) -> str:
        return f"{self._group_prefix}.{topic}"

    async def _publish(self, messages: Sequence[OutgoingMessage]) -> None:
        if not messages:
            return
        topics = {message.topic for message in messages}
        try:
            await self._ensure_once(topics)
            await asyncio.wrap_future(await asyncio.to_thread(self._sender.send, messages))
        except Transient:
            self._existing -= topics  # a topic may have been deleted
            raise

    async def _ensure_once(self, topics: Iterable[str]) -> None:
        """Ensure that *topics* exist; while the brokers do not answer, all callers wait for the same check."""
        for topic in set(topics) - self._existing:
            check = self._checks.get(topic)
            if check is None or check.done():
                check = self._checks[topic] = self._checker.submit(self._ensure, [topic])
            await asyncio.shield(asyncio.wrap_future(check))

    def _deliver(self, messages: Sequence[OutgoingMessage]) -> None:
        self._sender.send(messages).result()

    def _ensure(self, topics: Iterable[str], *, partitions: int | None = None) -> None:
        """Ensure that *topics* exist; each is checked once per process."""
        for topic in set(topics) - self._existing:
            if not (self._creates_topics and self._topics.create(topic, partitions or self._partitions)):
                self._sender.require_topic(topic)
            self._existing.add(topic)


def _convert_message(message: BusMessage) -> OutgoingMessage:
    return OutgoingMessage(message.topic, message.key.encode(), message.value, list(message.headers.items()))


def _check_size(message: BusMessage) -> None:
    headers = sum(len(name.encode()) + len(value.encode()) for name, value in message.headers.items())
    size = len(message.key.encode()) + len(message.value) + headers
    if size > MESSAGE_LIMIT:
        raise Invalid(
            "BAD_MESSAGE",
            f"the message has {size} bytes with its key and headers; the limit is {MESSAGE_LIMIT}",
            hint="send it in chunks",
        )
