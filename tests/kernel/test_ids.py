"""Identifiers and worker names."""

import os
import uuid
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.clock import ManualClock
from penstock.kernel.ids import make_id, make_worker_name


@settings(deadline=None)
@given(st.datetimes(datetime(1970, 1, 2), datetime(9999, 1, 1)))  # noqa: DTZ001 - hypothesis requires times without a zone
def test_an_id_is_a_uuid_of_version_7(at: datetime) -> None:
    """Version and variant are those of RFC 9562, and the first 48 bits are the milliseconds."""
    moment = at.replace(tzinfo=UTC)
    identifier = make_id(ManualClock(moment))
    assert (identifier.version, identifier.variant) == (7, uuid.RFC_4122)
    assert abs((identifier.int >> 80) - moment.timestamp() * 1000) <= 1


def test_ids_sort_by_their_time_of_creation() -> None:
    """A later id is greater, also as text, and all ids are different."""
    clock, ids = ManualClock(), []
    for _ in range(500):
        ids.append(make_id(clock))
        clock.advance(timedelta(milliseconds=1))
    assert ids == sorted(ids)
    assert [str(identifier) for identifier in ids] == sorted(str(identifier) for identifier in ids)
    assert len({make_id(clock) for _ in range(1000)}) == 1000


def test_a_worker_name_identifies_the_process() -> None:
    """The name contains role, host and process id."""
    role, _, address = make_worker_name("relay").partition("@")
    assert (role, address.rpartition(":")[2]) == ("relay", str(os.getpid()))
