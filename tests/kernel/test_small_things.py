"""Small things everything stands on: delays, clocks, identifiers."""

import os
import time
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel import backoff
from penstock.kernel.backoff import Backoff, delay
from penstock.kernel.clock import ManualClock, ServerClock, SystemClock
from penstock.kernel.ids import new_id, worker_name

FIRST, MOST = timedelta(seconds=1), timedelta(seconds=60)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize("chance", [0.0, 0.999_999])
def test_delays_grow_to_a_limit_and_stay_there(monkeypatch: pytest.MonkeyPatch, chance: float) -> None:
    """A delay doubles with each failure and never exceeds the limit, however many failures there were."""
    monkeypatch.setattr(backoff, "random", lambda: chance)
    delays = [delay(attempt, first=FIRST, most=MOST) for attempt in range(1, 8)]
    assert delays == sorted(delays)
    assert delays[3] == pytest.approx(8 * SECOND * (1 + chance) / 2, abs=timedelta(microseconds=1))
    assert [delay(attempt, first=FIRST, most=MOST) for attempt in (7, 51, 1000, 10**9)] == [delays[-1]] * 4


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_half_of_a_delay_is_chance(attempt: int, first: int, most: int) -> None:
    """Every delay lies between half of what it could be and all of it, so that crowds part and nobody spins."""
    full = min(first * 2 ** min(attempt - 1, 40), most)
    waited = delay(attempt, first=timedelta(milliseconds=first), most=timedelta(milliseconds=most))
    slack = timedelta(microseconds=1)
    assert timedelta(milliseconds=full / 2) - slack <= waited <= timedelta(milliseconds=full) + slack


def test_crowds_part() -> None:
    """Two who fail at once do not come back at once."""
    assert len({delay(10) for _ in range(100)}) > 90


def test_a_backoff_remembers_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays grow from call to call; after a success they begin anew."""
    monkeypatch.setattr(backoff, "random", lambda: 0.0)
    waits = Backoff(first=FIRST, most=MOST)
    assert [waits.next() for _ in range(3)] == [SECOND / 2, SECOND, SECOND * 2]
    waits.reset()
    assert waits.next() == SECOND / 2
    assert all(waits.next() <= MOST for _ in range(200))


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


@settings(deadline=None)
@given(st.datetimes(datetime(1970, 1, 2), datetime(9999, 1, 1)))  # noqa: DTZ001 - hypothesis wants them bare
def test_an_id_is_a_uuid_of_version_7(at: datetime) -> None:
    """Version and variant are those of RFC 9562, and the first 48 bits are the milliseconds."""
    moment = at.replace(tzinfo=UTC)
    made = new_id(ManualClock(moment))
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert abs((made.int >> 80) - moment.timestamp() * 1000) <= 1


def test_ids_sort_by_the_time_they_were_made() -> None:
    """A later id is a greater one, as text as well, and no two are the same."""
    clock, made = ManualClock(), []
    for _ in range(500):
        made.append(new_id(clock))
        clock.advance(timedelta(milliseconds=1))
    assert made == sorted(made)
    assert [str(one) for one in made] == sorted(str(one) for one in made)
    assert len({new_id(clock) for _ in range(1000)}) == 1000


def test_a_worker_can_be_found_by_its_name() -> None:
    """The name tells role, host and process."""
    role, _, place = worker_name("relay").partition("@")
    assert (role, place.rpartition(":")[2]) == ("relay", str(os.getpid()))
