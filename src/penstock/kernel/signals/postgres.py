"""Signals on LISTEN and NOTIFY of PostgreSQL."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from penstock.kernel.db import listener as notifications
from penstock.kernel.db.database import Database
from penstock.kernel.errors import BadConfig, Transient
from penstock.kernel.signals import Resync, Signal, validate_body
from penstock.kernel.signals.stream import SignalStream

CHANNEL_LIMIT = 63  # bytes of an identifier in PostgreSQL: a longer name is truncated, and would be another channel
_UNSWEPT_PAGES = 4  # pages that PostgreSQL keeps behind its slowest listener before it sweeps the queue
_QUEUE_PAGES = """
    SELECT ceil(pg_notification_queue_usage() * coalesce(current_setting('max_notify_queue_pages', true)::int, 1048576))
"""


class PostgresSignals:
    """A NOTIFY channel of one database."""

    def __init__(self, db: Database, channel: str) -> None:
        if not 1 <= len(channel.encode()) <= CHANNEL_LIMIT:
            problem = f"{channel!r} is not a channel: the name must have 1 to {CHANNEL_LIMIT} bytes"
            raise BadConfig("SIGNAL_CHANNEL", problem)
        self._db = db
        self._channel = channel

    async def announce(self, bodies: Sequence[str]) -> None:
        """Send all signals or none; equal bodies may be sent once."""
        valid = [validate_body(body) for body in bodies]
        with _translate_errors():
            await self._db.execute("SELECT pg_notify($1, body) FROM unnest($2::text[]) AS body", self._channel, valid)

    @asynccontextmanager
    async def listen(self, listener: str) -> AsyncIterator[AsyncIterator[Signal | Resync]]:  # noqa: ARG002
        """Receive all signals from now on; PostgreSQL identifies listeners by their connection, not by their name."""
        async with notifications.listen(self._db.dsn, self._channel) as inbox:
            yield SignalStream(inbox)

    async def measure_lag(self) -> int:
        """Return an estimate, normally 0: the pages of the server's queue that its slowest listener has not read.

        PostgreSQL does not count by channel or listener. A page contains one signal of the largest size, or many small
        ones, of all channels of all databases.
        """
        with _translate_errors():
            pages = int(await self._db.fetchval(_QUEUE_PAGES))
        return max(0, pages - _UNSWEPT_PAGES)

    async def check(self) -> None:
        """Raise Transient SIGNALS_DOWN unless the database answers."""
        with _translate_errors():
            await self._db.check()

    async def close(self) -> None:
        """Do nothing: the database is closed where it was opened."""


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except Transient as error:
        raise Transient("SIGNALS_DOWN", error.message, hint=error.hint) from error
