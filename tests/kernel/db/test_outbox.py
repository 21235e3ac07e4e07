"""The outbox: committed messages are relayed in order, at least once."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import asyncpg
import pytest

from penstock.kernel.db.database import Database
from penstock.kernel.db.outbox import Outbox
from penstock.kernel.errors import Transient
from tests.services.postgres import STOP_LOCK_HOLDERS

OUTBOX = Outbox("letter")
TABLE = """
CREATE TABLE letter (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    body text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    published boolean NOT NULL DEFAULT false
)
"""
WRITE = "INSERT INTO letter (body) SELECT unnest($1::text[])"


class FakeBroker:
    """A broker that stores the messages it received."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def publish(self, rows: Sequence[asyncpg.Record]) -> None:
        self.sent += [row["body"] for row in rows]


@pytest.fixture
async def letters(db: Database) -> Database:
    await db.execute(TABLE)
    return db


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


async def test_messages_are_relayed_once_and_in_order(letters: Database, broker: FakeBroker) -> None:
    """R15: a relay takes the oldest messages first, up to its limit, and no message twice."""
    await letters.execute(WRITE, list("abcde"))
    counts = [await OUTBOX.relay(letters, broker.publish, limit=2) for _ in range(4)]
    assert (counts, broker.sent) == ([2, 2, 1, 0], list("abcde"))
    assert await OUTBOX.count_unpublished(letters) == 0


async def test_a_rolled_back_message_is_not_relayed(letters: Database, broker: FakeBroker) -> None:
    """R15: a message exists only if the transaction that wrote it commits."""
    with pytest.raises(ZeroDivisionError):
        async with letters.transaction() as tx:
            await tx.execute(WRITE, ["never"])
            _ = 1 / 0
    assert await OUTBOX.relay(letters, broker.publish) == 0
    assert broker.sent == []


async def test_a_crash_after_publishing_repeats_and_loses_nothing(letters: Database, broker: FakeBroker) -> None:
    """R15: a connection that breaks between publishing and marking: all messages are published again."""
    await letters.execute(WRITE, list("abc"))

    async def publish_and_die(rows: Sequence[asyncpg.Record]) -> None:
        await broker.publish(rows)
        await letters.execute(STOP_LOCK_HOLDERS)

    with pytest.raises(Transient):
        await OUTBOX.relay(letters, publish_and_die)
    assert await OUTBOX.count_unpublished(letters) == 3
    await letters.execute(WRITE, ["d"])
    assert await OUTBOX.relay(letters, broker.publish) == 4
    assert broker.sent == list("abc") + list("abcd")


async def test_a_broker_that_refuses_loses_nothing(letters: Database, broker: FakeBroker) -> None:
    """R15: an unpublished message remains in the outbox, and the error is raised."""
    await letters.execute(WRITE, list("ab"))

    async def refuse(_: Sequence[asyncpg.Record]) -> None:
        raise Transient("BROKER_DOWN", "down")

    with pytest.raises(Transient, match="down"):
        await OUTBOX.relay(letters, refuse)
    assert await OUTBOX.relay(letters, broker.publish) == 2


async def test_a_late_commit_is_not_skipped(letters: Database, broker: FakeBroker) -> None:
    """R15: ids do not commit in order: a lower id that commits late is still relayed."""
    async with letters.transaction() as slow:
        await slow.execute(WRITE, ["first drawn"])
        await letters.execute(WRITE, ["first committed"])
        assert await OUTBOX.relay(letters, broker.publish) == 1
    assert await OUTBOX.relay(letters, broker.publish) == 1
    assert broker.sent == ["first committed", "first drawn"]


async def test_one_relay_runs_at_a_time(letters: Database, broker: FakeBroker) -> None:
    """R15: while a relay runs, others return 0 at once, so that the order is kept; other tables are not affected."""
    await letters.execute(WRITE, list("ab"))
    started, resume = asyncio.Event(), asyncio.Event()

    async def slowly(rows: Sequence[asyncpg.Record]) -> None:
        started.set()
        await resume.wait()
        await broker.publish(rows)

    relay = asyncio.create_task(OUTBOX.relay(letters, slowly))
    await started.wait()
    assert await OUTBOX.relay(letters, broker.publish) == 0
    await letters.execute("CREATE TABLE parcel (LIKE letter INCLUDING ALL); INSERT INTO parcel (body) VALUES ('p')")
    assert await Outbox("parcel").relay(letters, broker.publish) == 1
    resume.set()
    assert await relay == 2
    assert broker.sent == ["p", "a", "b"]


async def test_only_old_published_messages_are_deleted(letters: Database, broker: FakeBroker) -> None:
    """Pruning deletes the oldest published messages before a time, up to a limit, and never an unpublished one."""
    now = letters.clock.now()
    old = now - timedelta(days=2)
    await letters.execute(WRITE, list("abc"))
    await OUTBOX.relay(letters, broker.publish)
    await letters.execute("UPDATE letter SET created_at = $1", old)
    await letters.execute(WRITE, ["new"])
    await OUTBOX.relay(letters, broker.publish)
    await letters.execute("INSERT INTO letter (body, created_at) VALUES ('waits', $1)", old)
    day = now - timedelta(days=1)
    assert [await OUTBOX.prune(letters, day, limit=2) for _ in range(3)] == [2, 1, 0]
    left = await letters.fetch("SELECT body FROM letter ORDER BY id")
    assert [row["body"] for row in left] == ["new", "waits"]
