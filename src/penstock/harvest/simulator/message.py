"""Requests, and what is answered to them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from penstock.kernel.errors import Invalid, PenstockError

JSON = b"application/json"
NDJSON = b"application/x-ndjson"
TEXT = b"text/plain; charset=utf-8"
_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
_LINES_AT_ONCE = 1_000


class BadRequest(Invalid):
    """What the caller sent is not what this API takes."""

    status, title = 400, "Bad request"


class WrongMethod(Invalid):
    """There is such a path, and nothing to be done with it this way."""

    status, title = 405, "Method not allowed"


@dataclass(frozen=True, slots=True)
class Request:
    """One request, read whole."""

    method: bytes
    path: bytes
    query: bytes
    body: bytes
    keeps_alive: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What is answered: a body, or lines that are sent a few at a time."""

    body: bytes = b""
    status: int = 200
    media_type: bytes = JSON
    headers: bytes = b""
    lines: Sequence[bytes] = ()

    def head(self, keeps_alive: bool) -> bytes:
        length = len(self.body) + sum(map(len, self.lines)) + len(self.lines)
        closing = b"" if keeps_alive else b"Connection: close\r\n"
        told = (_LINES[self.status], self.media_type, length, self.headers, closing)
        return b"%bContent-Type: %b\r\nContent-Length: %d\r\n%b%b\r\n" % told

    def pieces(self) -> Iterator[bytes]:
        """The lines, some at a time."""
        for start in range(0, len(self.lines), _LINES_AT_ONCE):
            yield b"\n".join((*self.lines[start : start + _LINES_AT_ONCE], b""))


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, in how many seconds it is sent, None for never, and whether it breaks off half-way."""

    answer: Answer
    delay: float | None = 0.0
    is_cut: bool = False


def told(data: Any, status: int = 200, headers: bytes = b"") -> Answer:
    """*data* as JSON."""
    return Answer(orjson.dumps(data), status, headers=headers)


def refusal(error: PenstockError) -> Answer:
    return told({"error": error.as_dict()}, error.status)
