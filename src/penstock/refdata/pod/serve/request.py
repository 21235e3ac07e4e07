"""The requests to a pod, and their paths."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from penstock.kernel.errors import Invalid, NotFound, PenstockError
from penstock.kernel.http.headers import is_request_id
from penstock.refdata.contract import KEY_LIMIT, NAME
from penstock.refdata.model import DictionaryKey

_NAME = re.compile(NAME[:-1] + r"\Z")
_BROKEN = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PREFIX = (b"", b"v1", b"tenants")
_DICTIONARIES = b"dictionaries"
KEYS_LIMIT = 1_000  # in one request
_MAX_VERSION = 2**63 - 1


class MalformedRequest(PenstockError):
    """The request is not valid HTTP, or a parameter is malformed."""

    status, exit_code, title = 400, 2, "Bad request"


class ResourceGone(PenstockError):
    """The requested version has expired."""

    status, exit_code, title = 410, 5, "Gone"


class MethodNotAllowed(PenstockError):
    """The method is not supported: a pod only serves reads."""

    status, exit_code, title = 405, 2, "Method not allowed"


class HeadTooLarge(PenstockError):
    """The headers of a request are too large."""

    status, exit_code, title = 431, 2, "Request header fields too large"


class RequestTimeout(PenstockError):
    """The request did not arrive in time."""

    status, exit_code, title = 408, 2, "Request timeout"


@dataclass(slots=True)
class PodRequest:
    """A request. Header names are in lower case; headers without a meaning for pods are left out."""

    method: bytes
    url: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)
    is_http_1_0: bool = False
    keeps_alive: bool = True
    header_bytes: bytes = b""  # the unparsed headers, if they can be remembered

    @property
    def is_head(self) -> bool:
        return self.method == b"HEAD"

    @property
    def id(self) -> str | None:
        """Return the X-Request-Id of the client; None if it is missing or malformed."""
        request_id = self.headers.get(b"x-request-id", b"").decode("latin-1")
        return request_id if is_request_id(request_id) else None


class RequestPath(NamedTuple):
    """R17: a dictionary and its resource: `item` with a key, `items`, `all`, `version`, `changes` or `audit`."""

    target: DictionaryKey
    resource: str
    key: bytes
    query: list[tuple[str, str]]

    def find_parameter(self, name: str) -> str | None:
        return next((value for parameter, value in self.query if parameter == name), None)


def parse_path(url: bytes) -> RequestPath:
    """Parse *url*; NotFound if it is no resource. It is split before decoding, so that %2F does not separate parts."""
    if b"%" in url and _BROKEN.search(url):
        raise MalformedRequest(
            "BAD_ENCODING", "a percent sign must be followed by two hexadecimal digits", hint="send % as %25"
        )
    path, _, query = url.partition(b"?")
    parts = path.split(b"/")
    if tuple(parts[:3]) != _PREFIX or len(parts) not in (7, 8) or parts[4] != _DICTIONARIES:
        raise _make_not_found_error(path)
    target = DictionaryKey(_decode_name(parts[3], path), _decode_name(parts[5], path))
    resource = parts[6].decode("latin-1")
    if len(parts) == 8:
        if resource != "items" or not parts[7]:
            raise _make_not_found_error(path)
        return RequestPath(target, "item", check_key(unquote_to_bytes(parts[7])), _parse_query(query))
    if resource not in ("items", "all", "version", "changes", "audit"):
        raise _make_not_found_error(path)
    return RequestPath(target, resource, b"", _parse_query(query))


def parse_keys(address: RequestPath) -> list[bytes]:
    """R17: return the distinct keys of `keys=a,b` and repeated `key=c`, in order."""
    keys = [key for name, value in address.query if name == "keys" for key in value.split(",") if key]
    keys += [value for name, value in address.query if name == "key" and value]
    if not keys:
        raise Invalid("NO_KEYS", "the request has no keys", hint="send ?keys=a,b or ?key=a&key=b")
    if len(keys) > KEYS_LIMIT:
        raise Invalid("TOO_MANY_KEYS", f"the request has {len(keys)} keys", hint=f"send at most {KEYS_LIMIT} keys")
    return [check_key(key.encode(errors="surrogateescape")) for key in dict.fromkeys(keys)]


def check_key(key: bytes) -> bytes:
    """Return *key* if it is valid."""
    try:
        text = key.decode()
    except UnicodeDecodeError as error:
        raise MalformedRequest("BAD_KEY", "the key is not percent-encoded UTF-8", hint="encode it as UTF-8") from error
    if len(text) > KEY_LIMIT or "\0" in text:
        raise MalformedRequest("BAD_KEY", f"a key must have at most {KEY_LIMIT} characters and no NUL")
    return key


def parse_version(text: bytes, name: str = "X-Min-Version") -> int:
    """R21: return the version in *text*; *name* is its header or parameter."""
    if not text.isdigit() or len(text) > 19 or int(text) > _MAX_VERSION:
        hint = "send the committedVersion of a write, or the X-Dict-Version of a response"
        raise MalformedRequest("BAD_VERSION", f"{name} is not a version number", hint=hint)
    return int(text)


def _parse_query(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, errors="surrogateescape", max_num_fields=2 * KEYS_LIMIT
        )
    except ValueError as error:
        raise MalformedRequest("BAD_QUERY", f"the query string is malformed: {error}") from error


def _decode_name(part: bytes, path: bytes) -> str:
    name = unquote_to_bytes(part).decode(errors="replace")
    if not _NAME.match(name):
        raise _make_not_found_error(path)
    return name


def _make_not_found_error(path: bytes) -> NotFound:
    shown = path[:200].decode(errors="replace")
    return NotFound("NOT_FOUND", f"there is no resource at {shown}", hint="/docs lists all paths")
