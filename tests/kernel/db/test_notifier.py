"""The bell wakes those who wait: here at once, elsewhere by NOTIFY, and everybody when it is taken down."""

import asyncio
from collections.abc import Callable

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.tasks.wait import wait_event

CHANNEL = "test_bell"


async def test_a_ring_wakes_who_waits_for_its_topic(db: Database) -> None:
    """T12: whoever waits for a topic is woken by it, and by no other."""
    notifier = Notifier(db, CHANNEL)
    mine, other = notifier.next_event("mine"), notifier.next_event("other")
    notifier.notify("mine")
    assert mine.is_set()
    assert not other.is_set()
    assert not notifier.next_event("mine").is_set(), "a ring is for those who waited, not for those who come later"


async def test_another_process_hears_it(db: Database, database_url: str) -> None:
    """T12: a ring reaches the waiting of every process that serves the same database."""
    async with (
        Database.open(database_url) as theirs,
        Notifier.open(theirs, CHANNEL) as far,
        Notifier.open(db, CHANNEL) as near,
    ):
        heard, wakings = asyncio.Event(), 0

        async def wait_for_it() -> None:
            nonlocal wakings
            while wakings < 2:  # the first one may only say that the listener has begun
                await far.next_event("work").wait()
                wakings += 1
            heard.set()

        waiting = asyncio.create_task(wait_for_it())
        async with asyncio.timeout(20):
            while not await wait_event(heard, 0.1):
                near.notify("work")
        await waiting


async def test_taken_down_it_wakes_everybody_for_good(db: Database) -> None:
    """T17: at a stop nobody goes on waiting, nor begins to."""
    notifier = Notifier(db, CHANNEL)
    waiting = notifier.next_event("work")
    notifier.close()
    assert waiting.is_set()
    assert notifier.next_event("work").is_set()


async def test_many_rings_are_told_once(db: Database) -> None:
    """A NOTIFY passes a lock of the whole server: a burst of rings is one, with each topic once."""
    notifier = Notifier(db, CHANNEL)
    for _ in range(100):
        notifier.notify("work", "moves")
    assert notifier._pending == {"work", "moves"}
    await notifier.flush()
    assert notifier._pending == set()


class Claims:
    """Gives nothing until so many claims were made; acts at each of them."""

    def __init__(self, needed: int, act: Callable[[], None] = lambda: None) -> None:
        self.needed, self.act, self.made = needed, act, 0

    async def __call__(self) -> list[int]:
        self.made += 1
        self.act()
        return [self.made] if self.made >= self.needed else []


async def test_a_ring_during_a_claim_is_not_lost(db: Database) -> None:
    """T12: work that arrives while a claim finds nothing is claimed at once, not after a second."""
    notifier = Notifier(db, CHANNEL)
    claims = Claims(1_000, lambda: notifier.notify("work"))
    async with asyncio.timeout(60):  # without the ring a claim is tried about once a second
        assert await notifier.claim("work", claims, wait=1_000) == [1_000]


async def test_a_claim_ends_with_its_wait_its_caller_or_the_bell(db: Database) -> None:
    """T12: without work a claim gives nothing when its time is over, its caller is gone, or the server stops."""
    notifier = Notifier(db, CHANNEL)
    assert await notifier.claim("work", Claims(2), wait=0) == []

    async def is_gone() -> bool:
        return True

    ringing = Claims(2, lambda: notifier.notify("work"))
    assert await notifier.claim("work", ringing, wait=1_000, is_gone=is_gone) == []
    closing = Claims(2, notifier.close)
    assert await notifier.claim("work", closing, wait=1_000) == []
    assert (ringing.made, closing.made) == (1, 1)
