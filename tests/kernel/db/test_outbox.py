"""The outbox: what was committed goes out, in order, at least once."""

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


class Post:
    """A broker that keeps what it was given."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def publish(self, rows: Sequence[asyncpg.Record]) -> None:
        self.sent += [row["body"] for row in rows]


@pytest.fixture
async def letters(db: Database) -> Database:
    await db.execute(TABLE)
    return db


@pytest.fixture
def post() -> Post:
    return Post()


async def test_letters_go_out_once_and_in_order(letters: Database, post: Post) -> None:
    """R15: a relay takes the oldest first, up to its limit, and what went out does not go again."""
    await letters.execute(WRITE, list("abcde"))
    counts = [await OUTBOX.relay(letters, post.publish, limit=2) for _ in range(4)]
    assert (counts, post.sent) == ([2, 2, 1, 0], list("abcde"))
    assert await OUTBOX.waiting(letters) == 0


async def test_what_was_rolled_back_does_not_go_out(letters: Database, post: Post) -> None:
    """R15: a letter lives and dies with the transaction that wrote it."""
    with pytest.raises(ZeroDivisionError):
        async with letters.transaction() as tx:
            await tx.execute(WRITE, ["never"])
            _ = 1 / 0
    assert await OUTBOX.relay(letters, post.publish) == 0
    assert post.sent == []


async def test_a_crash_after_publishing_repeats_and_loses_nothing(letters: Database, post: Post) -> None:
    """R15: the relay's connection is cut between publishing and marking: everything goes out again."""
    await letters.execute(WRITE, list("abc"))

    async def publish_and_die(rows: Sequence[asyncpg.Record]) -> None:
        await post.publish(rows)
        await letters.execute(STOP_LOCK_HOLDERS)

    with pytest.raises(Transient):
        await OUTBOX.relay(letters, publish_and_die)
    assert await OUTBOX.waiting(letters) == 3
    await letters.execute(WRITE, ["d"])
    assert await OUTBOX.relay(letters, post.publish) == 4
    assert post.sent == list("abc") + list("abcd")


async def test_a_broker_that_refuses_loses_nothing(letters: Database, post: Post) -> None:
    """R15: what could not be published waits, and the failure is told."""
    await letters.execute(WRITE, list("ab"))

    async def refuse(_: Sequence[asyncpg.Record]) -> None:
        raise Transient("BROKER_DOWN", "down")

    with pytest.raises(Transient, match="down"):
        await OUTBOX.relay(letters, refuse)
    assert await OUTBOX.relay(letters, post.publish) == 2


async def test_a_late_commit_is_not_passed_over(letters: Database, post: Post) -> None:
    """R15: ids do not commit in order: a lower one that comes late still goes out."""
    async with letters.transaction() as slow:
        await slow.execute(WRITE, ["first drawn"])
        await letters.execute(WRITE, ["first committed"])
        assert await OUTBOX.relay(letters, post.publish) == 1
    assert await OUTBOX.relay(letters, post.publish) == 1
    assert post.sent == ["first committed", "first drawn"]


async def test_one_relay_works_at_a_time(letters: Database, post: Post) -> None:
    """R15: while one relay publishes the others get 0 at once, so that order holds; another table's does not wait."""
    await letters.execute(WRITE, list("ab"))
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(rows: Sequence[asyncpg.Record]) -> None:
        begun.set()
        await go_on.wait()
        await post.publish(rows)

    relay = asyncio.create_task(OUTBOX.relay(letters, slowly))
    await begun.wait()
    assert await OUTBOX.relay(letters, post.publish) == 0
    await letters.execute("CREATE TABLE parcel (LIKE letter INCLUDING ALL); INSERT INTO parcel (body) VALUES ('p')")
    assert await Outbox("parcel").relay(letters, post.publish) == 1
    go_on.set()
    assert await relay == 2
    assert post.sent == ["p", "a", "b"]


async def test_only_old_published_letters_are_removed(letters: Database, post: Post) -> None:
    """Pruning takes the oldest that went out before the day given, at most so many, and never one that waits."""
    now = letters.clock.now()
    old = now - timedelta(days=2)
    await letters.execute(WRITE, list("abc"))
    await OUTBOX.relay(letters, post.publish)
    await letters.execute("UPDATE letter SET created_at = $1", old)
    await letters.execute(WRITE, ["new"])
    await OUTBOX.relay(letters, post.publish)
    await letters.execute("INSERT INTO letter (body, created_at) VALUES ('waits', $1)", old)
    day = now - timedelta(days=1)
    assert [await OUTBOX.prune(letters, day, limit=2) for _ in range(3)] == [2, 1, 0]
    left = await letters.fetch("SELECT body FROM letter ORDER BY id")
    assert [row["body"] for row in left] == ["new", "waits"]
