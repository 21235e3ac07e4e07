"""The bytes of responses."""

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
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}
_ALWAYS = b"X-Content-Type-Options: nosniff\r\nCache-Control: no-cache\r\n"  # caches must revalidate


def get_status_line(status: int) -> bytes:
    return _STATUS_LINES[status]


def encode_version_headers(mark: VersionStamp, source: bytes, age: float = 0.0) -> bytes:
    """R21, R23: return the headers with version and source, and with the age if the data may be old."""
    headers = b"X-Dict-Version: %d\r\nX-Data-Source: %b\r\n" % (mark.version, source)
    headers += b"X-Dict-Pinned: true\r\n" if mark.is_pinned else b""
    return headers + (b"X-Data-Age: %d\r\n" % age if age else b"")


def encode_data_headers(mark: VersionStamp, source: bytes, age: float = 0.0, media_type: bytes = JSON) -> bytes:
    """Return the headers of a response with data, between the date and the length."""
    return b"Content-Type: " + media_type + b"\r\n" + _ALWAYS + encode_version_headers(mark, source, age)


def encode_document(media_type: str, body: bytes, headers: bytes = b"") -> bytes:
    """Return a response after its date, with its content type; *headers* are added."""
    return encode_body(b"Content-Type: " + media_type.encode() + b"\r\n" + _ALWAYS + headers, body)


def encode_body(headers: bytes, body: bytes) -> bytes:
    """Return the end of a response, with its length."""
    return b"%bContent-Length: %d\r\n\r\n%b" % (headers, len(body), body)


def encode_problem(error: PenstockError, request_id: str | None, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return an RFC 9457 problem like those of all servers, from its content type on."""
    request_id = request_id or uuid4().hex
    body = orjson.dumps(as_problem(error, request_id))
    fields = {**EXTRA_HEADERS.get(error.status, {}), **dict(headers), "X-Request-Id": request_id}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return encode_document(MEDIA_TYPE, body, lines.encode("latin-1"))
