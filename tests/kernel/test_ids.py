"""Identifiers and worker names."""

import os
import uuid
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.clock import ManualClock
from penstock.kernel.ids import new_id, worker_name


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
