"""Signals over PostgreSQL's LISTEN and NOTIFY."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from penstock.kernel.db import listener as notifications
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.signals import Resync, Signal, checked_body
from penstock.kernel.signals.feed import SignalStream

CHANNEL_LIMIT = 63  # bytes in a PostgreSQL identifier: a longer one is cut, and would be another channel
_SWEPT_LATE = 4  # pages PostgreSQL leaves behind its slowest listener before it sweeps the queue
_QUEUE_PAGES = """
    SELECT ceil(pg_notification_queue_usage() * coalesce(current_setting('max_notify_queue_pages', true)::int, 1048576))
"""


class PostgresSignals:
    """One NOTIFY channel of one database."""

    def __init__(self, db: Database, channel: str) -> None:
        if not 1 <= len(channel.encode()) <= CHANNEL_LIMIT:
            raise BadConfig("SIGNAL_CHANNEL", f"a channel's name has 1 to {CHANNEL_LIMIT} bytes, not so {channel!r}")
        self._db = db
        self._channel = channel

    async def announce(self, bodies: Sequence[str]) -> None:
        """Tell all listeners, of all bodies or of none; equal bodies may be told once."""
        checked = [checked_body(body) for body in bodies]
        with _down():
            await self._db.execute("SELECT pg_notify($1, body) FROM unnest($2::text[]) AS body", self._channel, checked)

    @asynccontextmanager
    async def listen(self, listener: str) -> AsyncIterator[AsyncIterator[Signal | Resync]]:  # noqa: ARG002
        """Hear everything from now on; PostgreSQL knows listeners by their connection, not by their name."""
        async with notifications.listen(self._db.dsn, self._channel) as inbox:
            yield SignalStream(inbox)

    async def lag(self) -> int:
        """An estimate, and 0 in all health: the pages of the server's one queue that wait for its slowest listener.

        PostgreSQL does not count by channel or listener. A page holds one signal of the largest size, or many small
        ones, of every channel of every database.
        """
        with _down():
            pages = int(await self._db.fetchval(_QUEUE_PAGES))
        return max(0, pages - _SWEPT_LATE)

    async def check(self) -> None:
        """Raise Transient SIGNALS_DOWN unless the database answers."""
        with _down():
            await self._db.check()

    async def close(self) -> None:
        """Nothing to do: the database belongs to whoever opened it."""


@contextmanager
def _down() -> Iterator[None]:
    try:
        yield
    except Transient as error:
        raise Transient("SIGNALS_DOWN", error.message, hint=error.hint) from error
