"""Text that every store accepts (no NUL, no half of a surrogate pair), and text without secrets."""

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HIDDEN = "***"
_SECRET_WORD = 8  # characters; a word of a secret that is this long is masked by itself, e.g. the token after a scheme


def is_storable(text: str) -> bool:
    """Return whether every store accepts *text* unchanged."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def make_storable(text: str, limit: int) -> str:
    """Return *text* cut at *limit* characters, with a replacement for each character that a store would refuse."""
    return text.encode(errors="replace").decode().replace("\0", REPLACEMENT)[:limit]


def format_duration(span: timedelta) -> str:
    """Return *span* as text in the largest unit of which it has at least two, e.g. `90 minutes` or `1 second`."""
    seconds = max(0, int(span.total_seconds()))
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}s"
    return f"{seconds} second{'' if seconds == 1 else 's'}"


def format_time(moment: datetime) -> str:
    """Return *moment* in UTC as text with a Z, the format of every document of Penstock."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


class SecretMask:
    """Replaces secrets with asterisks, both as they are and as JSON escapes them."""

    def __init__(self, secrets: Iterable[str]) -> None:
        whole = [*secrets]
        plain = {*whole, *(word for secret in whole for word in secret.split() if len(word) >= _SECRET_WORD)} - {""}
        escaped = {json.dumps(word, ensure_ascii=is_ascii)[1:-1] for word in plain for is_ascii in (True, False)}
        self._words = sorted(plain | escaped, key=len, reverse=True)  # the longest first: it may contain the others

    def mask_text(self, text: str) -> str:
        for word in self._words:
            text = text.replace(word, HIDDEN)
        return text

    def mask_bytes(self, content: bytes) -> bytes:
        for word in self._words:
            content = content.replace(word.encode(), HIDDEN.encode())
        return content

    def mask_json(self, value: Any) -> Any:
        """Return a JSON document with the secrets in its keys and values masked."""
        if isinstance(value, str):
            return self.mask_text(value)
        if isinstance(value, list):
            return [self.mask_json(item) for item in value]
        if isinstance(value, dict):
            return {self.mask_text(name): self.mask_json(item) for name, item in value.items()}
        return value
