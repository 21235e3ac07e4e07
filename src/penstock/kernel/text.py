"""Text that every store can keep: no NUL, no half of a surrogate pair."""

from datetime import timedelta

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def is_storable(text: str) -> bool:
    """Whether *text* can be kept as it is."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def storable(text: str, limit: int) -> str:
    """*text* as it can be kept: cut at *limit* characters, what no store takes replaced."""
    return text.encode(errors="replace").decode().replace("\0", REPLACEMENT)[:limit]


def in_words(span: timedelta) -> str:
    """*span* in its largest unit of which there are two."""
    seconds = max(0, int(span.total_seconds()))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}s"
    return f"{seconds} second{'' if seconds == 1 else 's'}"
