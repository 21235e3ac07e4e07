"""Clocks: of the system, of a server, and for tests."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from penstock.kernel.clock import ManualClock, ServerClock, SystemClock

SECOND = timedelta(seconds=1)


class FakeMonotonicClock:
    """A monotonic clock that a test controls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)


def test_a_server_clock_has_the_time_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `align` it returns the time of the server plus the elapsed time."""
    monotonic, clock, server_now = FakeMonotonicClock(monkeypatch), ServerClock(), datetime(2030, 5, 5, tzinfo=UTC)
    clock.align(server_now)
    assert clock.now() == server_now
    monotonic.seconds += 90
    assert clock.now() == server_now + timedelta(seconds=90)
    clock.align(server_now)
    assert clock.now() == server_now


def test_a_server_clock_does_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose wall clock jumps expires no lease, because only the monotonic clock counts."""
    monotonic, clock = FakeMonotonicClock(monkeypatch), ServerClock()
    before = clock.now()
    monkeypatch.setattr("penstock.kernel.clock.datetime", None)  # the wall clock cannot be read any more
    monotonic.seconds += 1
    assert clock.now() - before == SECOND


def test_clocks_are_in_utc() -> None:
    """The time of every clock has a zone, which is UTC."""
    for clock in (SystemClock(), ServerClock(), ManualClock()):
        assert clock.now().utcoffset() == timedelta(0)


def test_a_manual_clock_moves_only_by_advance() -> None:
    """The time does not change until `advance` is called."""
    clock = ManualClock()
    start = clock.now()
    assert clock.now() == start
    clock.advance(SECOND)
    assert clock.now() == start + SECOND
