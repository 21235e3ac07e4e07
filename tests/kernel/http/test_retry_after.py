"""The header Retry-After."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

from penstock.kernel.http.retry_after import retry_after

BEGIN = datetime(2026, 1, 5, tzinfo=UTC)


def test_retry_after_is_seconds_or_a_date() -> None:
    """F13: both forms, and rubbish is no wish."""
    later = format_datetime(BEGIN + timedelta(seconds=90))
    assert retry_after("1.5", BEGIN) == timedelta(seconds=1.5)
    assert retry_after(later, BEGIN) == timedelta(seconds=90)
    assert retry_after(format_datetime(BEGIN - timedelta(days=1)), BEGIN) == timedelta(0)
    assert [retry_after(text, BEGIN) for text in (None, "", "soon", "-1", "9" * 40)] == [None] * 5
