"""A request as a pod sees it, and the address it asks for."""

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
_BIGGEST_VERSION = 2**63 - 1


class MalformedRequest(PenstockError):
    """What came is not HTTP as it should be."""

    status, exit_code, title = 400, 2, "Bad request"


class ResourceGone(PenstockError):
    """It was there, and is no more."""

    status, exit_code, title = 410, 5, "Gone"


class MethodNotAllowed(PenstockError):
    """This is not done here."""

    status, exit_code, title = 405, 2, "Method not allowed"


class HeadTooLarge(PenstockError):
    """The head of a request is over the limit."""

    status, exit_code, title = 431, 2, "Request header fields too large"


class RequestTimeout(PenstockError):
    """The request did not come in time."""

    status, exit_code, title = 408, 2, "Request timeout"


@dataclass(slots=True)
class PodRequest:
    """What was asked. Header names are lower case; those that nobody here reads are left out."""

    method: bytes
    url: bytes
    headers: dict[bytes, bytes] = field(default_factory=dict)
    is_old: bool = False  # HTTP/1.0
    keeps_alive: bool = True
    head: bytes = b""  # the headers as they came, where it is worth remembering them

    @property
    def is_head(self) -> bool:
        return self.method == b"HEAD"

    @property
    def id(self) -> str | None:
        """The caller's own id for it, when it is a sane one."""
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        return given if is_request_id(given) else None


class RequestPath(NamedTuple):
    """R17: what is asked of which dictionary: `item` with its key, `items`, `all`, `version`, `changes` or `audit`."""

    target: DictionaryKey
    what: str
    key: bytes
    query: list[tuple[str, str]]

    def first(self, name: str) -> str | None:
        return next((value for given, value in self.query if given == name), None)


def address_of(url: bytes) -> RequestPath:
    """What *url* names: first parted, then decoded, so that an encoded slash parts nothing; NotFound when nothing."""
    if b"%" in url and _BROKEN.search(url):
        raise MalformedRequest("BAD_ENCODING", "a percent sign is followed by two hexadecimal digits", hint="send %25")
    path, _, query = url.partition(b"?")
    parts = path.split(b"/")
    if tuple(parts[:3]) != _PREFIX or len(parts) not in (7, 8) or parts[4] != _DICTIONARIES:
        raise _nothing(path)
    target = DictionaryKey(_name(parts[3], path), _name(parts[5], path))
    what = parts[6].decode("latin-1")
    if len(parts) == 8:
        if what != "items" or not parts[7]:
            raise _nothing(path)
        return RequestPath(target, "item", checked_key(unquote_to_bytes(parts[7])), _query(query))
    if what not in ("items", "all", "version", "changes", "audit"):
        raise _nothing(path)
    return RequestPath(target, what, b"", _query(query))


def keys_of(address: RequestPath) -> list[bytes]:
    """R17: the keys asked for by `keys=a,b` and repeated `key=c`, each once, in order."""
    asked = [key for name, value in address.query if name == "keys" for key in value.split(",") if key]
    asked += [value for name, value in address.query if name == "key" and value]
    if not asked:
        raise Invalid("NO_KEYS", "no keys are asked for", hint="?keys=a,b or ?key=a&key=b; `all` gives everything")
    if len(asked) > KEYS_LIMIT:
        raise Invalid("TOO_MANY_KEYS", f"{len(asked)} keys are asked for", hint=f"at most {KEYS_LIMIT} at once")
    return [checked_key(key.encode(errors="surrogateescape")) for key in dict.fromkeys(asked)]


def checked_key(key: bytes) -> bytes:
    """*key*, if it can be one."""
    try:
        text = key.decode()
    except UnicodeDecodeError as error:
        raise MalformedRequest("BAD_KEY", "a key is percent-encoded UTF-8", hint="encode it as UTF-8") from error
    if len(text) > KEY_LIMIT or "\0" in text:
        raise MalformedRequest("BAD_KEY", f"a key has at most {KEY_LIMIT} characters, none of them NUL")
    return key


def version_of(given: bytes, where: str = "X-Min-Version") -> int:
    """R21: the version that is named."""
    if not given.isdigit() or len(given) > 19 or int(given) > _BIGGEST_VERSION:
        hint = "send the committedVersion of a write, or the version of an answer"
        raise MalformedRequest("BAD_VERSION", f"{where} is not a version", hint=hint)
    return int(given)


def _query(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query.decode("latin-1"), keep_blank_values=True, errors="surrogateescape", max_num_fields=2 * KEYS_LIMIT
        )
    except ValueError as error:
        raise MalformedRequest("BAD_QUERY", f"the query cannot be read: {error}") from error


def _name(part: bytes, path: bytes) -> str:
    name = unquote_to_bytes(part).decode(errors="replace")
    if not _NAME.match(name):
        raise _nothing(path)
    return name


def _nothing(path: bytes) -> NotFound:
    shown = path[:200].decode(errors="replace")
    return NotFound("NOT_FOUND", f"nothing is at {shown}", hint="/docs shows what there is")
