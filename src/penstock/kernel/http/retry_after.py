"""The Retry-After header of HTTP."""

import re
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,6})?")


def parse_retry_after(header: str | None, now: datetime) -> timedelta | None:
    """Return the time that a Retry-After header asks for, in seconds or as a date; None if it is absent or invalid."""
    if header is None:
        return None
    if _SECONDS.fullmatch(header):
        return timedelta(seconds=float(header))
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return None
    aware = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(timedelta(0), aware - now)
