"""Turns what a client sends into requests, within limits."""

from collections.abc import Callable

import httptools

from penstock.kernel.errors import PenstockError, TooLarge
from penstock.refdata.pod.serve.request import HeadTooLarge, MalformedRequest, PodRequest

HEAD_LIMIT = 32_768
BODY_LIMIT = 65_536  # nobody reads it; more is not waited for
_ONCE = (b"authorization", b"x-min-version", b"host")
_PLAIN = (*_ONCE, b"accept", b"connection")
_READ = frozenset(
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
    """Reads what one client sends; each request is given to *take*."""

    def __init__(self, take: Callable[[PodRequest], None]) -> None:
        self._take = take
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._size = self._head_size = self._body_size = 0
        self._piece = b""  # what is read now, if a request began with it
        self.is_between = True  # whether what was sent so far is whole requests
        self._is_in_head = True

    def feed(self, data: bytes) -> None:
        """Read on; PenstockError when that is no use any more."""
        self._piece = data if self.is_between else b""
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # it was answered as if nobody had asked for another protocol, and is the last
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, PenstockError):
                raise error.__context__ from None
            raise MalformedRequest("BAD_REQUEST", f"not HTTP: {error}") from error
        if self._size - self._body_size > HEAD_LIMIT:
            raise _head_too_large()

    def on_message_begin(self) -> None:
        self.is_between = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name, value)
        known = name.lower()
        if known not in _READ or not self._is_in_head:  # what comes behind a body decides nothing
            return
        if known in self._headers and known in _ONCE:
            raise MalformedRequest("DUPLICATE_HEADER", "Host, Authorization and X-Min-Version come once")
        if known == b"content-length" and (len(value) > 9 or int(value) > BODY_LIMIT):
            raise _body_too_large()
        self._headers[known] = value.strip(b" \t")

    def on_headers_complete(self) -> None:
        self._is_in_head = False

    def on_body(self, body: bytes) -> None:
        self._body_size += len(body)
        if self._body_size > BODY_LIMIT:
            raise _body_too_large()

    def on_message_complete(self) -> None:
        parser, headers = self._parser, self._headers
        is_old = parser.get_http_version() == "1.0"
        keeps = parser.should_keep_alive() and not parser.should_upgrade()
        path = self._url
        if path[:7].lower() == b"http://":  # some name the host with the path, as they do to a proxy
            path = b"/" + path[7:].partition(b"/")[2]
        request = PodRequest(parser.get_method(), path, headers, is_old, keeps)
        if keeps and not is_old and all(name in _PLAIN for name in headers):
            # The headers as they came, if they came in one piece, and nothing else with them.
            piece, self._piece = self._piece, b""
            is_whole = piece[:4] == b"GET " and piece[-4:] == b"\r\n\r\n" and piece.count(b"\r\n\r\n") == 1
            request.head = piece[piece.find(b"\r\n") :] if is_whole else b""
        self._url, self._headers, self.is_between, self._is_in_head = b"", {}, True, True
        self._size = self._head_size = self._body_size = 0
        self._take(request)

    def _count(self, *parts: bytes) -> None:
        self._head_size += sum(map(len, parts))
        if self._head_size > HEAD_LIMIT:
            raise _head_too_large()


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge("HEAD_TOO_LARGE", f"address and headers have at most {HEAD_LIMIT} bytes here")


def _body_too_large() -> TooLarge:
    return TooLarge("BODY_TOO_LARGE", f"a body has at most {BODY_LIMIT} bytes here", hint="a read needs none")
