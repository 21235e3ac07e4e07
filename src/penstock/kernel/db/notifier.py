"""Wake-ups for waiting claims and listeners: at once in this process, debounced over LISTEN/NOTIFY in the others.

A wake-up is a hint. Every waiter also polls, so a lost notification costs time and never work.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from random import uniform
from time import monotonic
from typing import TypeVar

from penstock.kernel.db.database import Database
from penstock.kernel.db.listener import Notification, NotificationInbox, listen
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.tasks.wait import cancel_and_wait, wait_event

T = TypeVar("T")
_POLL = 1.0  # seconds between two claims without a notification
FLUSH_INTERVAL = timedelta(milliseconds=50)  # a NOTIFY takes a lock that all commits pass: never one per move


class Notifier:
    """A NOTIFY channel, whose payloads are topics."""

    def __init__(self, db: Database, channel: str) -> None:
        self._db = db
        self._channel = channel
        self._events: dict[str, asyncio.Event] = {}
        self._pending: set[str] = set()
        self.is_closed = False

    @classmethod
    @asynccontextmanager
    async def open(cls, db: Database, channel: str) -> "AsyncIterator[Notifier]":
        """Return a notifier that is connected to the other processes."""
        notifier = cls(db, channel)
        async with AsyncExitStack() as stack:
            inbox = await stack.enter_async_context(listen(db.dsn, channel))
            await stack.enter_async_context(run_periodically(f"notify {channel}", notifier.flush, FLUSH_INTERVAL))
            listening = asyncio.create_task(notifier.listen(inbox), name=f"listen {channel}")
            stack.push_async_callback(cancel_and_wait, listening)
            try:
                yield notifier
            finally:
                notifier.close()

    def notify(self, *topics: str) -> None:
        """Wake the waiters of *topics* here now, and in the other processes with the next flush."""
        self._wake(topics)
        self._pending.update(topics)

    def get_next_event(self, topic: str) -> asyncio.Event:
        """Return an event that the next notification sets. Get it before looking for work, to miss none."""
        event = self._events.setdefault(topic, asyncio.Event())
        if self.is_closed:
            event.set()
        return event

    def close(self) -> None:
        """Wake all waiters; later waits return at once."""
        self.is_closed = True
        self._wake(list(self._events))

    async def flush(self) -> None:
        """Send the notifications since the last flush to the other processes."""
        topics, self._pending = self._pending, set()
        if topics:
            query = "SELECT pg_notify($1, topic) FROM unnest($2::text[]) AS topic"
            await self._db.execute(query, self._channel, sorted(topics))

    async def listen(self, inbox: NotificationInbox) -> None:
        """Wake the waiters of each topic that another process names; all of them if notifications were missed."""
        while True:
            item = await inbox.get()
            self._wake([item.payload] if isinstance(item, Notification) else list(self._events))

    async def claim(
        self,
        topic: str,
        claim: Callable[[], Awaitable[list[T]]],
        *,
        wait: float,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[T]:
        """Return the result of *claim*; while it is empty, claim again at every notification of *topic*.

        Without a notification the next claim is made after about a second. The wait ends after *wait* seconds, or
        early when *is_gone* returns true.
        """
        deadline = monotonic() + wait
        while True:
            event = self.get_next_event(topic)
            claimed = await claim()
            left = deadline - monotonic()
            if claimed or left <= 0 or self.is_closed:
                return claimed
            await wait_event(event, min(left, _POLL * uniform(0.5, 1)))  # noqa: S311 - jitter, not secrecy
            if is_gone is not None and await is_gone():
                return []

    def _wake(self, topics: "list[str] | tuple[str, ...]") -> None:
        for topic in topics:
            if event := self._events.pop(topic, None):
                event.set()
