"""The HTTP parser of a connection, with limits on the size of a request."""

from collections.abc import Callable

import httptools

from penstock.kernel.errors import PenstockError, TooLarge
from penstock.refdata.pod.serve.request import HeadTooLarge, MalformedRequest, PodRequest

HEAD_LIMIT = 32_768
BODY_LIMIT = 65_536  # bodies are ignored
_UNIQUE = (b"authorization", b"x-min-version", b"host")
_PLAIN = (*_UNIQUE, b"accept", b"connection")
_USED = frozenset(
    (
        *_PLAIN,
        b"content-length",
        b"if-none-match",
        b"last-event-id",
        b"sec-fetch-site",
        b"transfer-encoding",
        b"x-request-id",
        b"x-tenant-id",
    )
)


class RequestReader:
    """Parses the bytes of one client, and passes each request to *take*."""

    def __init__(self, take: Callable[[PodRequest], None]) -> None:
        self._take = take
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._size = self._head_size = self._body_size = 0
        self._piece = b""  # the data that is parsed now, if a request starts with it
        self.is_between = True  # whether all data so far are complete requests
        self._is_in_head = True

    def parse_data(self, data: bytes) -> None:
        """Parse more data; PenstockError if the connection cannot continue."""
        self._piece = data if self.is_between else b""
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # the request was served without the upgrade, as the last one of the connection
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, PenstockError):
                raise error.__context__ from None
            raise MalformedRequest("BAD_REQUEST", f"the request is not valid HTTP: {error}") from error
        if self._size - self._body_size > HEAD_LIMIT:
            raise _make_head_size_error()

    def on_message_begin(self) -> None:
        self.is_between = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name, value)
        name = name.lower()
        if name not in _USED or not self._is_in_head:  # trailers are ignored
            return
        if name in self._headers and name in _UNIQUE:
            raise MalformedRequest("DUPLICATE_HEADER", "Host, Authorization and X-Min-Version may be sent only once")
        if name == b"content-length" and (len(value) > 9 or int(value) > BODY_LIMIT):
            raise _make_body_size_error()
        self._headers[name] = value.strip(b" \t")

    def on_headers_complete(self) -> None:
        self._is_in_head = False

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > BODY_LIMIT:
            raise _make_body_size_error()

    def on_message_complete(self) -> None:
        parser, headers = self._parser, self._headers
        is_http_1_0 = parser.get_http_version() == "1.0"
        keeps_alive = parser.should_keep_alive() and not parser.should_upgrade()
        path = self._url
        if path[:7].lower() == b"http://":  # the absolute form, which is used for proxies
            path = b"/" + path[7:].partition(b"/")[2]
        request = PodRequest(parser.get_method(), path, headers, is_http_1_0, keeps_alive)
        if keeps_alive and not is_http_1_0 and all(name in _PLAIN for name in headers):
            # The unparsed headers, if the request arrived in one piece with nothing else.
            piece, self._piece = self._piece, b""
            is_whole = piece[:4] == b"GET " and piece[-4:] == b"\r\n\r\n" and piece.count(b"\r\n\r\n") == 1
            request.header_bytes = piece[piece.find(b"\r\n") :] if is_whole else b""
        self._url, self._headers, self.is_between, self._is_in_head = b"", {}, True, True
        self._size = self._head_size = self._body_size = 0
        self._take(request)

    def _count(self, *parts: bytes) -> None:
        self._head_size += sum(map(len, parts))
        if self._head_size > HEAD_LIMIT:
            raise _make_head_size_error()


def _make_head_size_error() -> HeadTooLarge:
    return HeadTooLarge("HEAD_TOO_LARGE", f"path and headers are larger than {HEAD_LIMIT} bytes")


def _make_body_size_error() -> TooLarge:
    return TooLarge(
        "BODY_TOO_LARGE", f"the body is larger than {BODY_LIMIT} bytes", hint="send no body: pods only serve reads"
    )
