"""Hears PostgreSQL's NOTIFY, and says so when some may have been missed."""

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
_PING_EVERY = 10.0


@dataclass(frozen=True, slots=True)
class HeardNotification:
    """A notification, with what it carried."""

    payload: str


@dataclass(frozen=True, slots=True)
class MissedNotifications:
    """From here on everything is heard; what came before may have been missed."""

    reason: str


class NotificationInbox:
    """What one listener has yet to read; it forgets rather than grow without bound, and says so."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[HeardNotification | MissedNotifications] = asyncio.Queue()

    def put(self, item: HeardNotification | MissedNotifications) -> None:
        if self._queue.qsize() >= INBOX_LIMIT:
            while not self._queue.empty():
                self._queue.get_nowait()
            item = MissedNotifications("the listener was too slow")
        self._queue.put_nowait(item)

    async def get(self) -> HeardNotification | MissedNotifications:
        return await self._queue.get()

    async def wait(self, timeout: float) -> bool:
        """Whether something came within *timeout* seconds; reads all that is there."""
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
    """An inbox for *channel* on a connection of its own, reopened whenever it is lost; first in it is Missed."""
    inbox = NotificationInbox()
    task = asyncio.create_task(_keep_listening(dsn, channel, inbox), name=f"listen {channel}")
    try:
        yield inbox
    finally:
        await cancel_and_wait(task)


async def _keep_listening(dsn: str, channel: str, inbox: NotificationInbox) -> None:
    log, backoff, reason = structlog.get_logger(), Backoff(), "the listener began"
    while True:
        try:
            with translate_errors(connecting=True):
                await _listen_until_lost(dsn, channel, inbox, reason, backoff)
        except Transient as error:
            log.warning("listen_lost", channel=channel, error=error.message)
        reason = "the connection was lost"
        await asyncio.sleep(backoff.next().total_seconds())


async def _listen_until_lost(dsn: str, channel: str, inbox: NotificationInbox, reason: str, backoff: Backoff) -> None:
    lost = asyncio.Event()
    connection = await asyncpg.connect(dsn, timeout=10, server_settings={"application_name": "penstock-listen"})
    try:
        connection.add_termination_listener(lambda _connection: lost.set())
        await connection.add_listener(channel, lambda *heard: inbox.put(HeardNotification(str(heard[3]))))
        inbox.put(MissedNotifications(reason))
        backoff.reset()
        while not await wait_event(lost, _PING_EVERY):
            await connection.fetchval("SELECT 1", timeout=_PING_EVERY)  # finds out when nobody said goodbye
    finally:
        connection.terminate()
