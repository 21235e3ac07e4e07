"""A bell for those who wait for work: rung in this process at once, in the others by NOTIFY, a few times a second.

It is a hint. Whoever waits looks again now and then by itself; so a bell that is not heard costs time, never work.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from random import uniform
from time import monotonic
from typing import TypeVar

from penstock.kernel.db.database import Database
from penstock.kernel.db.listener import HeardNotification, NotificationInbox, listen
from penstock.kernel.tasks.periodic import repeating
from penstock.kernel.tasks.wait import ended, happens

T = TypeVar("T")
_POLL = 1.0  # seconds after which a waiting claim looks by itself
QUIET = timedelta(milliseconds=50)  # a NOTIFY takes a lock all commits of the server pass: never one per move


class Notifier:
    """One NOTIFY channel; its payloads are the topics something happened in."""

    def __init__(self, db: Database, channel: str) -> None:
        self._db = db
        self._channel = channel
        self._rung: dict[str, asyncio.Event] = {}
        self._to_tell: set[str] = set()
        self.is_closed = False

    @classmethod
    @asynccontextmanager
    async def hung(cls, db: Database, channel: str) -> "AsyncIterator[Notifier]":
        """A bell that hears the other processes and is heard by them."""
        bell = cls(db, channel)
        async with AsyncExitStack() as stack:
            inbox = await stack.enter_async_context(listen(db.dsn, channel))
            await stack.enter_async_context(repeating(f"bell {channel}", bell.tell, QUIET))
            hearing = asyncio.create_task(bell.hear(inbox), name=f"hear {channel}")
            stack.push_async_callback(ended, hearing)
            try:
                yield bell
            finally:
                bell.close()

    def ring(self, *topics: str) -> None:
        """Something happened in *topics*."""
        self._wake(topics)
        self._to_tell.update(topics)

    def next(self, topic: str) -> asyncio.Event:
        """Set at the next ring. Take it before looking for work, and no ring falls between."""
        event = self._rung.setdefault(topic, asyncio.Event())
        if self.is_closed:
            event.set()
        return event

    def close(self) -> None:
        """Wake everybody, for good."""
        self.is_closed = True
        self._wake(list(self._rung))

    async def tell(self) -> None:
        """Let the other processes know what was rung since the last time."""
        topics, self._to_tell = self._to_tell, set()
        if topics:
            query = "SELECT pg_notify($1, topic) FROM unnest($2::text[]) AS topic"
            await self._db.execute(query, self._channel, sorted(topics))

    async def hear(self, inbox: NotificationInbox) -> None:
        """Wake those who wait for what another process rang; for all, when some may have been missed."""
        while True:
            heard = await inbox.get()
            self._wake([heard.payload] if isinstance(heard, HeardNotification) else list(self._rung))

    async def claim(
        self,
        topic: str,
        claim: Callable[[], Awaitable[list[T]]],
        *,
        wait: float,
        is_gone: Callable[[], Awaitable[bool]] | None = None,
    ) -> list[T]:
        """Return the result of *claim*. While it is empty, claim again at every ring of *topic*, for *wait* seconds.

        Without a ring the next claim is made after about a second. The wait ends early when *is_gone* returns true.
        """
        deadline = monotonic() + wait
        while True:
            rung = self.next(topic)
            held = await claim()
            left = deadline - monotonic()
            if held or left <= 0 or self.is_closed:
                return held
            await happens(rung, min(left, _POLL * uniform(0.5, 1)))  # noqa: S311 - jitter, not secrecy
            if is_gone is not None and await is_gone():
                return []

    def _wake(self, topics: "list[str] | tuple[str, ...]") -> None:
        for topic in topics:
            if event := self._rung.pop(topic, None):
                event.set()
