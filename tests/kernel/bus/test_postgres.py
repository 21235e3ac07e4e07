"""Properties of the bus on PostgreSQL only. The guarantees of every bus are in test_bus."""

import asyncio

from penstock.kernel.bus import BusMessage, DeliveryPolicy
from penstock.kernel.bus.postgres import LANES, SQL, PostgresBus
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.outcome import Done
from tests.kernel.bus.backends import new_topic
from tests.services.postgres import LOCK_AWAITED

GATE = 4711


async def test_a_take_that_was_overtaken_delivers_no_settled_message(db: Database) -> None:
    """R11: messages that another worker took and settled after this take started are not delivered again."""
    bus, topic = PostgresBus(db), new_topic()
    await bus.publish([BusMessage(topic, "a", b"1")])
    async with bus.subscribe(topic, worker="quick") as quick, db.connection() as gate:
        await gate.execute("SELECT pg_advisory_lock($1)", GATE)
        overtaken = asyncio.create_task(take_after_gate(db, topic))
        await wait_for_a_blocked_take(db)
        [delivery] = await quick.take(1)
        assert await quick.settle([(delivery, Done())]) == 0
        await gate.execute("SELECT pg_advisory_unlock($1)", GATE)
        assert await overtaken == 0


async def take_after_gate(db: Database, topic: str) -> int:
    """Take, with a pause between the snapshot of the statement and its lock of a partition."""
    gated = f"(SELECT pg_advisory_xact_lock({GATE})) AS gate, bus_partition p"
    statement = SQL["take"].replace("bus_partition p\n", f"{gated}\n", 1).replace("FOR UPDATE", "FOR UPDATE OF p")
    assert gated in statement
    now = db.clock.now()
    return len(await db.fetch(statement, topic, 10, "slow", now, now + DeliveryPolicy().lease_for, LANES))


async def wait_for_a_blocked_take(db: Database) -> None:
    async with asyncio.timeout(10):
        while not await db.fetchval(LOCK_AWAITED):
            pass


async def test_a_take_respects_its_limit(db: Database) -> None:
    """The limit is smaller than the number of partitions with messages."""
    bus, topic = PostgresBus(db), new_topic()
    await bus.publish([BusMessage(topic, f"k{n}", b"") for n in range(50)])
    async with bus.subscribe(topic, worker="w") as subscription:
        assert len(await subscription.take(3)) == 3


async def test_workers_set_to_fewer_partitions_still_get_all(db: Database) -> None:
    """R9: while the number of partitions is changed, no message is left in a partition without a worker."""
    many, few, topic = PostgresBus(db, partitions=64), PostgresBus(db, partitions=2), new_topic()
    async with few.subscribe(topic, worker="w") as subscription:
        await many.publish([BusMessage(topic, f"k{n}", b"") for n in range(200)])
        left = 200
        async with asyncio.timeout(30):
            while left:
                taken = await subscription.take(100)
                await subscription.settle([(delivery, Done()) for delivery in taken])
                left -= len(taken)


async def test_a_heartbeat_under_an_old_fence_extends_nothing(db: Database) -> None:
    """R11: a worker that lost its partition cannot extend the lease of its new owner."""
    bus, topic = PostgresBus(db), new_topic()
    await bus.publish([BusMessage(topic, "a", b"1")])
    async with bus.subscribe(topic, worker="old") as old, bus.subscribe(topic, worker="new") as new:
        [lost] = await old.take(1)
        await db.execute("UPDATE bus_partition SET lease_until = now() - interval '1 s' WHERE topic = $1", topic)
        [claimed] = await new.take(1)
        before = await db.fetchval("SELECT max(lease_until) FROM bus_partition WHERE topic = $1", topic)
        await old.extend([lost])
        assert await db.fetchval("SELECT max(lease_until) FROM bus_partition WHERE topic = $1", topic) == before
        assert await new.settle([(claimed, Done())]) == 0
