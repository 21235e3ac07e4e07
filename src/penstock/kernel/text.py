"""Text that every store can keep (no NUL, no half of a surrogate pair), and text without secrets."""

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HIDDEN = "***"
_TELLING = 8  # characters of a word that is a secret by itself, such as a token after its scheme


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


class SecretMask:
    """Puts something else where one of *secrets* stands: as it is, and as JSON spells it."""

    def __init__(self, secrets: Iterable[str]) -> None:
        whole = [*secrets]
        plain = {*whole, *(word for one in whole for word in one.split() if len(word) >= _TELLING)} - {""}
        spelt = plain | {json.dumps(one, ensure_ascii=is_ascii)[1:-1] for one in plain for is_ascii in (True, False)}
        self._words = sorted(spelt, key=len, reverse=True)  # the longest first: it may hold the others

    def text(self, text: str) -> str:
        for word in self._words:
            text = text.replace(word, HIDDEN)
        return text

    def raw(self, content: bytes) -> bytes:
        for word in self._words:
            content = content.replace(word.encode(), HIDDEN.encode())
        return content

    def document(self, value: Any) -> Any:
        """A document of JSON, however its texts were spelt."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.document(one) for one in value]
        if isinstance(value, dict):
            return {self.text(name): self.document(one) for name, one in value.items()}
        return value
