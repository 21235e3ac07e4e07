"""Backoff: delays between attempts."""

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.tasks import backoff
from penstock.kernel.tasks.backoff import Backoff, compute_delay

FIRST, MOST = timedelta(seconds=1), timedelta(seconds=60)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize("share", [0.0, 0.999_999])
def test_delays_grow_to_a_limit_and_stay_there(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """A delay doubles with each failure and never exceeds the limit, however many failures there were."""
    monkeypatch.setattr(backoff, "random", lambda: share)
    delays = [compute_delay(attempt, first=FIRST, limit=MOST) for attempt in range(1, 8)]
    assert delays == sorted(delays)
    assert delays[3] == pytest.approx(8 * SECOND * (1 + share) / 2, abs=timedelta(microseconds=1))
    assert [compute_delay(attempt, first=FIRST, limit=MOST) for attempt in (7, 51, 1000, 10**9)] == [delays[-1]] * 4


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_half_of_a_delay_is_random(attempt: int, first: int, most: int) -> None:
    """Every delay is between half of its maximum and its maximum."""
    full = min(first * 2 ** min(attempt - 1, 40), most)
    delay = compute_delay(attempt, first=timedelta(milliseconds=first), limit=timedelta(milliseconds=most))
    slack = timedelta(microseconds=1)
    assert timedelta(milliseconds=full / 2) - slack <= delay <= timedelta(milliseconds=full) + slack


def test_delays_of_several_clients_differ() -> None:
    """Clients that fail at the same time do not retry at the same time."""
    assert len({compute_delay(10) for _ in range(100)}) > 90


def test_a_backoff_remembers_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays grow from call to call, and start again after a reset."""
    monkeypatch.setattr(backoff, "random", lambda: 0.0)
    delays = Backoff(first=FIRST, limit=MOST)
    assert [delays.compute_next() for _ in range(3)] == [SECOND / 2, SECOND, SECOND * 2]
    delays.reset()
    assert delays.compute_next() == SECOND / 2
    assert all(delays.compute_next() <= MOST for _ in range(200))
