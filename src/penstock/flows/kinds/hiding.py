"""Secrets stay out of what is kept: whoever was sent one may repeat it."""

import json
from collections.abc import Iterable
from typing import Any

HIDDEN = "***"
_TELLING = 8  # characters of a word that is a secret by itself, such as a token after its scheme


class Hiding:
    """Puts something else where one of *secrets* stands: as it is, and as JSON spells it."""

    def __init__(self, secrets: Iterable[str]) -> None:
        plain = {word for one in secrets for word in (one, *_telling(one)) if word}
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


def _telling(secret: str) -> list[str]:
    return [word for word in secret.split() if len(word) >= _TELLING]
