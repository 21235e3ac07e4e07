"""Time is given: whoever needs the hour is handed a clock."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Tells the time, always in UTC."""

    def now(self) -> datetime: ...


class SystemClock:
    """The time of this machine."""

    def now(self) -> datetime:
        return datetime.now(UTC)


class ServerClock:
    """The time of a server, kept by this machine's monotonic clock.

    Leases of many hosts are compared with each other, so they must all tell the database's time; and a host
    whose wall clock jumps must not expire anything.
    """

    def __init__(self) -> None:
        self._base = datetime.now(UTC)
        self._mark = time.monotonic()

    def now(self) -> datetime:
        return self._base + timedelta(seconds=time.monotonic() - self._mark)

    def align(self, server_now: datetime) -> None:
        """Take over the time the server told just now."""
        self._base, self._mark = server_now, time.monotonic()


class ManualClock:
    """A clock that moves when told to, for tests and replays."""

    def __init__(self, start: datetime | None = None) -> None:
        self._now = start or datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def advance(self, step: timedelta) -> None:
        self._now += step
