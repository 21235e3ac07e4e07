"""The kernel's own figures: leases, the bus on PostgreSQL and on Kafka, canonical JSON. Commits are durable."""

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import partial
from time import perf_counter

from benchmarks.harness import Bench, Group
from benchmarks.session import Session
from penstock.kernel import canonical
from penstock.kernel.bus import Bus, BusMessage, Subscription
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres
from penstock.kernel.machine import StateMachine, Transition
from penstock.kernel.tasks.outcome import Done
from penstock.tracking.lease import Lease, LeaseReport

BATCH = 1_000


@dataclass(frozen=True)
class Sizes:
    """Rows that are leased, by the size of a batch, messages, and rows that are hashed."""

    leased: dict[int, int]
    messages: int
    hashed: int


LEASE_TARGETS = {100: 20_000}
KAFKA = "PENSTOCK_BENCH_KAFKA"


class State(StrEnum):
    NEW = "new"
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"


MACHINE = StateMachine(
    "bench",
    State,
    initial=State.NEW,
    moves=[
        Transition("claim", (State.NEW,), State.CLAIMED),
        Transition("finish", (State.CLAIMED,), State.DONE),
        Transition("fail", (State.CLAIMED,), State.FAILED),
        Transition("retry", (State.CLAIMED, State.FAILED), State.NEW),
    ],
)
LEASE = Lease("bench", MACHINE, ready=State.NEW, claimed=State.CLAIMED, done=State.DONE, failed=State.FAILED)
TABLE = """
DROP TABLE IF EXISTS bench;
TRUNCATE journal;
CREATE TABLE bench (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status text NOT NULL DEFAULT 'new',
    fence bigint NOT NULL DEFAULT 0,
    attempts integer NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT '-infinity',
    worker text,
    lease_until timestamptz,
    moves bigint[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 70);
CREATE INDEX bench_ready ON bench (due_at, id) WHERE status = 'new';
CREATE INDEX bench_held ON bench (lease_until) WHERE status = 'held';
"""


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open everything to measure, on a PostgreSQL of its own with its usual, durable settings."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        db = await stack.enter_async_context(Database.open(url))
        await migrate.migrate(db, migrate.load("penstock.kernel"))
        found = [
            *(
                Bench(_lease(batch), "rows", partial(leases, db, batch, rows), LEASE_TARGETS.get(batch))
                for batch, rows in sizes.leased.items()
            ),
            Bench(_bus("PostgreSQL"), "messages", partial(messages, PostgresBus(db), sizes.messages), 10_000),
            Bench("canonical JSON + sha256", "rows", partial(hashes, sizes.hashed)),
        ]
        if bootstrap := os.environ.get(KAFKA):
            from penstock.kernel.bus.kafka import KafkaBus

            bus = KafkaBus(bootstrap, db=db)
            stack.push_async_callback(bus.close)
            found.append(Bench(_bus("Kafka"), "messages", partial(messages, bus, sizes.messages), 20_000))
        else:
            session.leave_out("Kafka", f"`make kafka`, then {KAFKA}=127.0.0.1:19092")
        yield found


GROUP = Group(
    benches,
    full=Sizes(leased={1: 1_000, 10: 5_000, 100: 20_000}, messages=20_000, hashed=200_000),
    smoke=Sizes(leased={1: 10, 10: 50, 100: 200}, messages=200, hashed=1_000),
)


def _lease(batch: int) -> str:
    return f"lease claim+settle, batches of {batch}"


def _bus(kind: str) -> str:
    return f"bus on {kind}, publish+settle"


async def leases(db: Database, batch: int, rows: int) -> float:
    """Return rows a second that one worker claims and settles, journal included."""
    await db.execute(TABLE)
    await db.execute("INSERT INTO bench (status) SELECT 'new' FROM generate_series(1, $1::int)", rows)
    await db.execute("VACUUM ANALYZE bench")
    began = perf_counter()
    while True:
        now = db.clock.now()
        async with db.connection() as connection:
            held = await LEASE.claim(connection, worker="bench", limit=batch, lease_for=timedelta(minutes=1), now=now)
        if not held:
            return rows / (perf_counter() - began)
        async with db.connection() as connection:
            reports = [LeaseReport(row.key, row.fence, State.DONE) for row in held]
            await LEASE.settle(connection, reports, now=now)


_topics = itertools.count()


async def messages(bus: Bus, count: int) -> float:
    """Return messages a second of one publisher and one worker at once, in batches, until the last is settled."""
    topic = f"bench-{os.getpid()}-{next(_topics)}"
    published = [BusMessage(topic, f"key-{n % 1000}", b"x" * 200) for n in range(count)]
    async with bus.subscribe(topic, worker="bench") as queue:
        began = perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(publish(bus, published))
            group.create_task(settle(queue, count))
        return count / (perf_counter() - began)


async def publish(bus: Bus, published: Sequence[BusMessage]) -> None:
    for start in range(0, len(published), BATCH):
        await bus.publish(published[start : start + BATCH])


async def settle(queue: Subscription, left: int) -> None:
    while left:
        taken = await queue.take(BATCH)
        if not taken:
            await queue.wait(1)
        await queue.settle([(delivery, Done()) for delivery in taken])
        left -= len(taken)


async def hashes(rows: int) -> float:
    """Return rows a second made canonical and hashed."""
    row = {"name": "Widget, large", "price": 129_900, "currency": "EUR", "stock": 17, "category": "tools", "note": None}
    began = perf_counter()
    for number in range(rows):
        row["stock"] = number
        hashlib.sha256(canonical.dumps(row)).hexdigest()
    return rows / (perf_counter() - began)
