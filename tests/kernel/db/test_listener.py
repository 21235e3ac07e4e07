"""Hearing NOTIFY: at once, and honest about what may have been missed."""

import asyncio

from penstock.kernel.db.database import Database
from penstock.kernel.db.listener import INBOX_LIMIT, HeardNotification, MissedNotifications, NotificationInbox, listen

CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'penstock-listen' AND datname = current_database()
"""


async def test_what_is_notified_is_heard(db: Database) -> None:
    """R16: first the word that all before may have been missed, then every notification in order."""
    async with asyncio.timeout(10), listen(db.dsn, "c") as inbox:
        assert isinstance(await inbox.get(), MissedNotifications)
        for number in range(3):
            await db.execute("SELECT pg_notify('c', $1)", str(number))
        assert [await inbox.get() for _ in range(3)] == [
            HeardNotification("0"),
            HeardNotification("1"),
            HeardNotification("2"),
        ]


async def test_a_cut_connection_is_reopened_and_told(db: Database) -> None:
    """R22: after a loss the listener says so, and hears again."""
    async with asyncio.timeout(10), listen(db.dsn, "c") as inbox:
        await inbox.get()
        await db.execute(CUT)
        assert await inbox.get() == MissedNotifications("the connection was lost")
        await db.execute("SELECT pg_notify('c', 'again')")
        assert await inbox.get() == HeardNotification("again")


def test_a_slow_reader_is_told_rather_than_fed_without_end() -> None:
    """An inbox forgets at its limit, and says that it did."""
    inbox = NotificationInbox()
    for number in range(INBOX_LIMIT + 1):
        inbox.put(HeardNotification(str(number)))
    assert inbox._queue.get_nowait() == MissedNotifications("the listener was too slow")
    assert inbox._queue.empty()


async def test_waiting_ends_with_the_first_notification(db: Database) -> None:
    """A worker that waits for work is woken, not polled awake."""
    async with asyncio.timeout(10), listen(db.dsn, "c") as inbox:
        await inbox.get()
        assert not await inbox.wait(0.001)
        waiting = asyncio.create_task(inbox.wait(60))
        await db.execute("SELECT pg_notify('c', '')")
        assert await waiting
