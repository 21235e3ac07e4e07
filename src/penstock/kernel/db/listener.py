"""LISTEN/NOTIFY: notifications, with a marker where some may have been missed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
import structlog

from penstock.kernel.db.database import translate_errors
from penstock.kernel.errors import Transient
from penstock.kernel.tasks.backoff import Backoff
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event

INBOX_LIMIT = 10_000
_PING_INTERVAL = 10.0


@dataclass(frozen=True, slots=True)
class Notification:
    """A notification with its payload."""

    payload: str


@dataclass(frozen=True, slots=True)
class MissedNotifications:
    """A marker: earlier notifications may have been missed, later ones are not."""

    reason: str


class NotificationInbox:
    """The unread notifications of one listener. A full inbox is emptied, and marked with MissedNotifications."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Notification | MissedNotifications] = asyncio.Queue()

    def put(self, item: Notification | MissedNotifications) -> None:
        if self._queue.qsize() >= INBOX_LIMIT:
            while not self._queue.empty():
                self._queue.get_nowait()
            item = MissedNotifications("the listener was too slow")
        self._queue.put_nowait(item)

    async def get(self) -> Notification | MissedNotifications:
        return await self._queue.get()

    async def wait(self, timeout: float) -> bool:
        """Return whether an item arrives within *timeout* seconds, and empty the inbox."""
        try:
            async with asyncio.timeout(timeout):
                await self._queue.get()
        except TimeoutError:
            return False
        while not self._queue.empty():
            self._queue.get_nowait()
        return True


@asynccontextmanager
async def listen(dsn: str, channel: str) -> AsyncIterator[NotificationInbox]:
    """Yield an inbox for *channel*. A lost connection is reopened, and each start begins with MissedNotifications."""
    inbox = NotificationInbox()
    task = asyncio.create_task(_keep_listening(dsn, channel, inbox), name=f"listen {channel}")
    try:
        yield inbox
    finally:
        await cancel_and_wait(task)


async def _keep_listening(dsn: str, channel: str, inbox: NotificationInbox) -> None:
    log, backoff, reason = structlog.get_logger(), Backoff(), "the listener has started"
    while True:
        try:
            with translate_errors(connecting=True):
                await _listen_until_lost(dsn, channel, inbox, reason, backoff)
        except Transient as error:
            log.warning("listener_disconnected", channel=channel, error=error.message)
        reason = "the connection was lost"
        await asyncio.sleep(backoff.compute_next().total_seconds())


async def _listen_until_lost(dsn: str, channel: str, inbox: NotificationInbox, reason: str, backoff: Backoff) -> None:
    lost = asyncio.Event()
    connection = await asyncpg.connect(dsn, timeout=10, server_settings={"application_name": "penstock-listen"})
    try:
        connection.add_termination_listener(lambda _connection: lost.set())
        await connection.add_listener(channel, lambda *arguments: inbox.put(Notification(str(arguments[3]))))
        inbox.put(MissedNotifications(reason))
        backoff.reset()
        while not await wait_event(lost, _PING_INTERVAL):
            await connection.fetchval("SELECT 1", timeout=_PING_INTERVAL)  # detects a connection that broke silently
    finally:
        connection.terminate()
