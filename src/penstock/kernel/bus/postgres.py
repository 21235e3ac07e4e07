"""The bus on PostgreSQL: partitions are leased as a whole and read in order, and settled messages are deleted."""

import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from zlib import crc32

import structlog

from penstock.kernel.bus import (
    BusDelivery,
    BusMessage,
    DeadLetter,
    DeadLetterCount,
    DeliveryPolicy,
    validate_messages,
)
from penstock.kernel.bus.settlement import PartitionSettlement, settle
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection, Database
from penstock.kernel.db.listener import NotificationInbox, listen
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.outcome import Failed, Outcome

SQL = sql.load("penstock.kernel.bus", file="postgres.sql")
CHANNEL = "penstock_bus"
LANES = 8  # partitions that a worker claims at a time


class PostgresBus:
    """The bus of all processes that use the same database."""

    def __init__(self, db: Database, *, partitions: int = 16) -> None:
        self._db = db
        self._partitions = partitions
        self._declared: set[str] = set()

    async def publish(self, messages: Sequence[BusMessage], *, tx: Connection | None = None) -> None:
        if not messages:
            return
        for topic in {message.topic for message in validate_messages(messages)} - self._declared:
            await self._declare(topic)
        if tx is None:
            async with self._db.transaction() as own:
                await self.publish(messages, tx=own)
            return
        await tx.execute(
            SQL["publish"],
            [message.topic for message in messages],
            [crc32(message.key.encode()) % self._partitions for message in messages],
            [message.key for message in messages],
            [message.value for message in messages],
            [dict(message.headers) for message in messages],
        )

    async def relay(self) -> int:
        return 0

    @asynccontextmanager
    async def subscribe(
        self,
        topic: str,
        *,
        worker: str,
        policy: DeliveryPolicy = DeliveryPolicy(),  # noqa: B008 - frozen
    ) -> "AsyncIterator[PostgresSubscription]":
        await self._declare(topic)
        async with listen(self._db.dsn, CHANNEL) as wake:
            subscription = PostgresSubscription(self._db, wake, topic, worker, policy)
            try:
                yield subscription
            finally:
                await subscription.release()

    async def _declare(self, topic: str) -> None:
        """Create the partitions that this process publishes to; other processes may have another number."""
        await self._db.execute(SQL["declare"], topic, self._partitions)
        self._declared.add(topic)

    async def count_backlog(self, topic: str) -> int:
        return int(await self._db.fetchval(SQL["backlog"], topic))

    async def read_dead_letters(self, topic: str, *, limit: int = 100) -> list[DeadLetter]:
        rows = await self._db.fetch(SQL["dead_letters"], topic, limit)
        return [
            DeadLetter(
                BusMessage(row["topic"], row["key"], row["value"], row["headers"]),
                row["reason"],
                row["attempts"],
                row["died_at"],
            )
            for row in rows
        ]

    async def count_dead_letters(self, topic: str, since: datetime) -> DeadLetterCount:
        row = await self._db.fetchrow(SQL["count_dead_letters"], topic, since)
        return DeadLetterCount(*row) if row else DeadLetterCount()

    async def check(self) -> None:
        try:
            await self._db.check()
        except Transient as error:
            raise Transient("BUS_DOWN", error.message, hint=error.hint) from error

    async def close(self) -> None:
        """Do nothing: the database is closed where it was opened."""


class PostgresSubscription:
    """The subscription of one worker, which claims whole partitions for one batch."""

    def __init__(self, db: Database, wake: NotificationInbox, topic: str, worker: str, policy: DeliveryPolicy) -> None:
        self.name = topic
        self.lease_for = policy.lease_for
        self._db = db
        self._wake = wake
        self._worker = worker
        self._policy = policy
        self._out: dict[tuple[int, int], list[BusDelivery]] = defaultdict(list)

    async def take(self, limit: int) -> Sequence[BusDelivery]:
        while taken := await self._take(limit):
            killers = [delivery for delivery in taken if delivery.attempt > self._policy.max_attempts]
            if not killers:
                return taken
            await self._send_killers_to_dead_letters(killers)
            lost = {delivery.partition for delivery in killers}
            if rest := [delivery for delivery in taken if delivery.partition not in lost]:
                return rest
        return []

    async def wait(self, timeout: float) -> None:
        now = self._db.clock.now()
        due = await self._db.fetchval(SQL["next_due"], self.name, now)
        until_due = timeout if due is None else (due - now).total_seconds()
        await self._wake.wait(max(0.001, min(timeout, until_due)))

    async def extend(self, items: Sequence[BusDelivery]) -> None:
        claims = list({(item.partition, item.fence) for item in items})
        until = self._db.clock.now() + self.lease_for
        partitions, fences = [partition for partition, _ in claims], [fence for _, fence in claims]
        await self._db.execute(SQL["extend"], self.name, partitions, fences, until)

    async def settle(self, results: Sequence[tuple[BusDelivery, Outcome | None]]) -> int:
        now = self._db.clock.now()
        lanes = settle(results, self._policy, now)
        finished = [(lane.partition, position) for lane in lanes for position in lane.finished]
        dead = [(delivery, reason) for lane in lanes for delivery, reason in lane.dead]
        async with self._db.transaction() as tx:
            rows = await tx.fetch(
                SQL["settle"],
                self.name,
                *_make_columns(lanes),
                [partition for partition, _ in finished],
                [position for _, position in finished],
                [delivery.partition for delivery, _ in dead],
                [delivery.position for delivery, _ in dead],
                [reason for _, reason in dead],
                [delivery.attempt for delivery, _ in dead],
                now,
            )
            if any(outcome is None for _, outcome in results):
                await tx.execute(SQL["wake"], self.name)
        for delivery, _ in results:
            self._out.pop((delivery.partition, delivery.fence), None)
        freed = {row["partition"] for row in rows}
        self._policy.on_dead(sum(delivery.partition in freed for delivery, _ in dead))
        return sum(delivery.partition not in freed for delivery, _ in results)

    def find_lane(self, item: BusDelivery) -> Hashable:
        return item.partition

    async def release(self) -> None:
        """Release the unsettled messages; if the database is down, the end of the lease does it."""
        with contextlib.suppress(Transient):
            for deliveries in list(self._out.values()):
                await self.settle([(delivery, None) for delivery in deliveries])

    async def _take(self, limit: int) -> Sequence[BusDelivery]:
        now = self._db.clock.now()
        rows = await self._db.fetch(SQL["take"], self.name, limit, self._worker, now, now + self.lease_for, LANES)
        taken = [
            BusDelivery(
                BusMessage(self.name, row["key"], row["value"], row["headers"]),
                row["attempt"],
                row["partition"],
                row["id"],
                row["fence"],
            )
            for row in rows
        ]
        for delivery in taken:
            self._out[delivery.partition, delivery.fence].append(delivery)
        return taken

    async def _send_killers_to_dead_letters(self, killers: Sequence[BusDelivery]) -> None:
        """Dead-letter messages whose workers died in all attempts."""
        for delivery in killers:
            structlog.get_logger().error("poison_message_dead_lettered", topic=self.name, key=delivery.message.key)
        reason = Failed(f"its workers died or froze {self._policy.max_attempts} times")
        await self.settle([(delivery, reason) for delivery in killers])


def _make_columns(lanes: Sequence[PartitionSettlement]) -> tuple[list[object], ...]:
    return (
        [lane.partition for lane in lanes],
        [lane.fence for lane in lanes],
        [lane.head for lane in lanes],
        [lane.attempts for lane in lanes],
        [lane.due_at for lane in lanes],
    )
