"""Clocks, which are passed to all code that needs the time."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """A source of the time, always in UTC."""

    def now(self) -> datetime: ...


class SystemClock:
    """The time of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class ServerClock:
    """The time of a server, advanced by the monotonic clock of this machine.

    Leases of many hosts are compared with each other, so all hosts use the time of the database; and a host whose wall
    clock jumps must not expire a lease.
    """

    def __init__(self) -> None:
        self._base = datetime.now(UTC)
        self._mark = time.monotonic()

    def now(self) -> datetime:
        return self._base + timedelta(seconds=time.monotonic() - self._mark)

    def align(self, server_now: datetime) -> None:
        """Set the time to *server_now*, which the server has just returned."""
        self._base, self._mark = server_now, time.monotonic()


class ManualClock:
    """A clock that only `advance` moves, for tests and replays."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def advance(self, step: timedelta) -> None:
        self._now += step
