"""Clocks: of the system, of the server, and of tests."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from penstock.kernel.clock import ManualClock, ServerClock, SystemClock

SECOND = timedelta(seconds=1)


class Mono:
    """The monotonic clock in a test's hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.seconds)


def test_a_server_clock_tells_the_servers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once aligned it tells what the server told, plus the time gone by since."""
    mono, clock, told = Mono(monkeypatch), ServerClock(), datetime(2030, 5, 5, tzinfo=UTC)
    clock.align(told)
    assert clock.now() == told
    mono.seconds += 90
    assert clock.now() == told + timedelta(seconds=90)
    clock.align(told)
    assert clock.now() == told


def test_a_server_clock_does_not_follow_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose wall clock jumps expires nothing: only the monotonic clock counts."""
    mono, clock = Mono(monkeypatch), ServerClock()
    before = clock.now()
    monkeypatch.setattr("penstock.kernel.clock.datetime", None)  # nobody can ask for the wall clock now
    mono.seconds += 1
    assert clock.now() - before == SECOND


def test_clocks_tell_utc() -> None:
    """Every clock's time carries its zone, which is UTC."""
    for clock in (SystemClock(), ServerClock(), ManualClock()):
        assert clock.now().utcoffset() == timedelta(0)


def test_a_manual_clock_moves_when_told() -> None:
    """Time in tests stands still until it is advanced."""
    clock = ManualClock()
    start = clock.now()
    assert clock.now() == start
    clock.advance(SECOND)
    assert clock.now() == start + SECOND
