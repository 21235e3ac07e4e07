"""The notifier wakes waiters: in this process at once, in others by NOTIFY, and all of them when it is closed."""

import asyncio
from collections.abc import Callable

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.kernel.tasks.wait import wait_event

CHANNEL = "test_notifier"


async def test_a_notification_wakes_the_waiters_of_its_topic(db: Database) -> None:
    """T12: a waiter is woken by a notification of its topic, and by no other."""
    notifier = Notifier(db, CHANNEL)
    mine, other = notifier.get_next_event("mine"), notifier.get_next_event("other")
    notifier.notify("mine")
    assert mine.is_set()
    assert not other.is_set()
    assert not notifier.get_next_event("mine").is_set(), "a notification is for earlier waiters, not for later ones"


async def test_a_notification_reaches_other_processes(db: Database, database_url: str) -> None:
    """T12: a notification reaches the waiters of every process that uses the same database."""
    async with (
        Database.open(database_url) as other_db,
        Notifier.open(other_db, CHANNEL) as remote,
        Notifier.open(db, CHANNEL) as local,
    ):
        is_woken, wakeups = asyncio.Event(), 0

        async def wait_twice() -> None:
            nonlocal wakeups
            while wakeups < 2:  # the first wake-up may only mean that the listener has started
                await remote.get_next_event("work").wait()
                wakeups += 1
            is_woken.set()

        waiting = asyncio.create_task(wait_twice())
        async with asyncio.timeout(20):
            while not await wait_event(is_woken, 0.1):
                local.notify("work")
        await waiting


async def test_closing_wakes_all_waiters(db: Database) -> None:
    """T17: after a stop no waiter waits any longer, and none starts to wait."""
    notifier = Notifier(db, CHANNEL)
    waiting = notifier.get_next_event("work")
    notifier.close()
    assert waiting.is_set()
    assert notifier.get_next_event("work").is_set()


async def test_many_notifications_are_sent_once(db: Database) -> None:
    """A NOTIFY takes a lock of the whole server: a burst of notifications is sent as one, with each topic once."""
    notifier = Notifier(db, CHANNEL)
    for _ in range(100):
        notifier.notify("work", "moves")
    assert notifier._pending == {"work", "moves"}
    await notifier.flush()
    assert notifier._pending == set()


class Claims:
    """A claim function that returns nothing until it was called *needed* times, and calls *act* each time."""

    def __init__(self, needed: int, act: Callable[[], None] = lambda: None) -> None:
        self.needed, self.act, self.calls = needed, act, 0

    async def __call__(self) -> list[int]:
        self.calls += 1
        self.act()
        return [self.calls] if self.calls >= self.needed else []


async def test_a_notification_during_a_claim_is_not_lost(db: Database) -> None:
    """T12: work that arrives while a claim finds nothing is claimed at once, not after a second."""
    notifier = Notifier(db, CHANNEL)
    claims = Claims(1_000, lambda: notifier.notify("work"))
    async with asyncio.timeout(60):  # without the notification there is about one claim per second
        assert await notifier.claim("work", claims, wait=1_000) == [1_000]


async def test_a_claim_ends_at_its_timeout_with_its_caller_or_with_the_notifier(db: Database) -> None:
    """T12: without work a claim returns nothing at its timeout, when its caller has gone, or when the server stops."""
    notifier = Notifier(db, CHANNEL)
    assert await notifier.claim("work", Claims(2), wait=0) == []

    async def is_gone() -> bool:
        return True

    notifying = Claims(2, lambda: notifier.notify("work"))
    assert await notifier.claim("work", notifying, wait=1_000, is_gone=is_gone) == []
    closing = Claims(2, notifier.close)
    assert await notifier.claim("work", closing, wait=1_000) == []
    assert (notifying.calls, closing.calls) == (1, 1)
