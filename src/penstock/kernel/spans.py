"""Spans of time as a person says them."""

from datetime import timedelta


def in_words(span: timedelta) -> str:
    """*span* in its largest unit of which there are two."""
    seconds = max(0, int(span.total_seconds()))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}s"
    return f"{seconds} second{'' if seconds == 1 else 's'}"
