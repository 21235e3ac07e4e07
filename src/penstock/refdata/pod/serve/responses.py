"""Responses, ready to be sent."""

from collections.abc import Iterable
from http import HTTPStatus
from uuid import uuid4

import orjson

from penstock.kernel.errors import PenstockError
from penstock.kernel.http.problem_body import EXTRA_HEADERS, MEDIA_TYPE, as_problem
from penstock.refdata.model import VersionStamp

JSON = b"application/json"
NDJSON = b"application/x-ndjson"
EVENTS = b"text/event-stream"
MEMORY, FALLBACK = b"memory", b"postgres_fallback"
_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
_ALWAYS = b"X-Content-Type-Options: nosniff\r\nCache-Control: no-cache\r\n"  # who keeps a copy asks whether it is good


def line(status: int) -> bytes:
    return _LINES[status]


def version_headers(mark: VersionStamp, source: bytes, age: float = 0.0) -> bytes:
    """R21, R23: of which version an answer is, where from, and how old, once the primary is out of sight."""
    told = b"X-Dict-Version: %d\r\nX-Data-Source: %b\r\n" % (mark.version, source)
    told += b"X-Dict-Pinned: true\r\n" if mark.is_pinned else b""
    return told + (b"X-Data-Age: %d\r\n" % age if age else b"")


def data_head(mark: VersionStamp, source: bytes, age: float = 0.0, media_type: bytes = JSON) -> bytes:
    """What comes between the date and the length of an answer with data."""
    return b"Content-Type: " + media_type + b"\r\n" + _ALWAYS + version_headers(mark, source, age)


def document(media_type: str, body: bytes, headers: bytes = b"") -> bytes:
    """The rest of an answer that is of no dictionary, unless *headers* tell of which."""
    return lengthy(b"Content-Type: " + media_type.encode() + b"\r\n" + _ALWAYS + headers, body)


def lengthy(headers: bytes, body: bytes) -> bytes:
    """The rest of an answer whose length is known."""
    return b"%bContent-Length: %d\r\n\r\n%b" % (headers, len(body), body)


def problem(error: PenstockError, request_id: str | None, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """RFC 9457, as all our servers answer, from the content type on."""
    request_id = request_id or uuid4().hex
    body = orjson.dumps(as_problem(error, request_id))
    told = {**EXTRA_HEADERS.get(error.status, {}), **dict(headers), "X-Request-Id": request_id}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    return document(MEDIA_TYPE, body, lines.encode("latin-1"))
