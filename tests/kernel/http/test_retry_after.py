"""The header Retry-After."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from penstock.kernel.clock import ManualClock
from penstock.kernel.http.retry_after import parse_retry_after

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)


def test_retry_after_is_seconds_or_a_date() -> None:
    """F13: both forms are parsed, and invalid values are ignored."""
    later = format_datetime(BEGIN + timedelta(seconds=90))
    assert parse_retry_after("1.5", BEGIN) == timedelta(seconds=1.5)
    assert parse_retry_after(later, BEGIN) == timedelta(seconds=90)
    assert parse_retry_after(format_datetime(BEGIN - timedelta(days=1)), BEGIN) == timedelta(0)
    assert [parse_retry_after(text, BEGIN) for text in (None, "", "soon", "-1", "9" * 40)] == [None] * 5


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-5", None),
        ("0", timedelta(0)),
        ("120", timedelta(minutes=2)),
        ("0.5", timedelta(seconds=0.5)),
        ("9" * 40, None),
        ("Thu, 01 Jan 2026 00:00:30 GMT", timedelta(seconds=30)),
        ("Thu, 01 Jan 2026 01:00:30 +0100", timedelta(seconds=30)),
        ("Thu, 01 Jan 2026 00:00:30 -0000", timedelta(seconds=30)),
        ("Wed, 31 Dec 2025 23:00:00 GMT", timedelta(0)),
    ],
)
def test_both_forms_of_retry_after(clock: ManualClock, header: str | None, expected: timedelta | None) -> None:
    """H15: seconds or a date are parsed; a past date means now, and an invalid value is ignored."""
    assert parse_retry_after(header, clock.now()) == expected
