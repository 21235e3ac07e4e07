"""Text that every store can keep: no NUL, no half of a surrogate pair."""

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
