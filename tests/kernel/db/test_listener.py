"""LISTEN/NOTIFY: notifications arrive at once, and missed ones are marked."""

import asyncio

from penstock.kernel.db.database import Database
from penstock.kernel.db.listener import INBOX_LIMIT, MissedNotifications, Notification, NotificationInbox, listen

DISCONNECT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'penstock-listen' AND datname = current_database()
"""


async def test_notifications_arrive_in_order(db: Database) -> None:
    """R16: the first item marks that earlier notifications may have been missed, then all follow in order."""
    async with asyncio.timeout(10), listen(db.dsn, "c") as inbox:
        assert isinstance(await inbox.get(), MissedNotifications)
        for number in range(3):
            await db.execute("SELECT pg_notify('c', $1)", str(number))
        assert [await inbox.get() for _ in range(3)] == [
            Notification("0"),
            Notification("1"),
            Notification("2"),
        ]


async def test_a_lost_connection_is_reopened_and_marked(db: Database) -> None:
    """R22: after a lost connection there is a marker, and notifications arrive again."""
    async with asyncio.timeout(10), listen(db.dsn, "c") as inbox:
        await inbox.get()
        await db.execute(DISCONNECT)
        assert await inbox.get() == MissedNotifications("the connection was lost")
        await db.execute("SELECT pg_notify('c', 'again')")
        assert await inbox.get() == Notification("again")


def test_a_full_inbox_is_emptied_and_marked() -> None:
    """An inbox that reaches its limit is replaced by one marker."""
    inbox = NotificationInbox()
    for number in range(INBOX_LIMIT + 1):
        inbox.put(Notification(str(number)))
    assert inbox._queue.get_nowait() == MissedNotifications("the listener was too slow")
    assert inbox._queue.empty()


async def test_waiting_ends_with_the_first_notification(db: Database) -> None:
    """A notification wakes a worker that waits for work."""
    async with asyncio.timeout(10), listen(db.dsn, "c") as inbox:
        await inbox.get()
        assert not await inbox.wait(0.001)
        waiting = asyncio.create_task(inbox.wait(60))
        await db.execute("SELECT pg_notify('c', '')")
        assert await waiting
