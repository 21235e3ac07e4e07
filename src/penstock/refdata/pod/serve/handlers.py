"""R17, R31: what is read of one dictionary: an item, several, all of them page by page, its version."""

from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

import orjson
import structlog

from penstock.kernel.db import page
from penstock.kernel.errors import Conflict, Invalid, NotFound, PenstockError
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.ipc import ReachRequest, check_size
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.layout import DictionaryHeader
from penstock.refdata.pod.memory.reader import Found, MemoryView, PageCursor
from penstock.refdata.pod.serve import responses
from penstock.refdata.pod.serve.request import (
    MalformedRequest,
    PodRequest,
    RequestPath,
    ResourceGone,
    keys_of,
    version_of,
)

_PAGE, _LARGEST_PAGE = 1_000, 10_000
_PAGE_SIZE = 4_000_000  # bytes; a page ends there, however many items were asked for


class HandlerResponse(NamedTuple):
    """A status, and the response from after its date on."""

    status: int
    rest: bytes


class StreamResponse(NamedTuple):
    """Something that is sent piece by piece: every item, or every change after a version."""

    address: RequestPath
    media_type: bytes
    since: int | None = None
    least: int = 0  # the version that all items must not be below


class ServedDictionary(NamedTuple):
    """A dictionary as it is served now."""

    target: DictionaryKey
    tenant: str
    shelf: DictionaryHeader
    version: int
    age: float
    prefix: bytes  # of the places of its items
    head: bytes
    opening: bytes  # how a good answer begins, up to what an item says of itself


def read(
    view: MemoryView, entry: ServedDictionary, address: RequestPath, request: PodRequest
) -> HandlerResponse | ReachRequest | StreamResponse:
    """What *address* names, or why it cannot be read, under the version there is."""
    try:
        return _read(view, entry, address, request)
    except PenstockError as error:
        return refusal(error, responses.version_headers(entry.shelf.mark, responses.MEMORY, entry.age), request)


def refusal(error: PenstockError, version_headers: bytes, request: PodRequest) -> HandlerResponse:
    """R21: also a refusal tells the version."""
    return HandlerResponse(error.status, version_headers + responses.problem(error, request.id))


def problem(error: PenstockError, request: PodRequest) -> HandlerResponse:
    """A refusal that is of no version."""
    headers = {"Allow": "GET, HEAD"} if error.status == 405 else {}
    return HandlerResponse(error.status, responses.problem(error, request.id, headers.items()))


def bug(request: PodRequest) -> HandlerResponse:
    """The answer when something unexpected was raised: the caller gets an id, the log gets the rest."""
    request_id = request.id or uuid4().hex
    structlog.get_logger().exception("request_crashed", request_id=request_id)
    error = PenstockError("INTERNAL", "something went wrong here; the log has it under the request id")
    return HandlerResponse(error.status, responses.problem(error, request_id))


def _read(
    view: MemoryView, entry: ServedDictionary, address: RequestPath, request: PodRequest
) -> HandlerResponse | ReachRequest | StreamResponse:
    if address.what == "item":
        return item_answer(entry.version, entry.head, address.key, view.get(entry.shelf, address.key), request)
    if address.what == "items":
        return _items(view, entry, keys_of(address), request)
    if address.what == "version":
        return version_answer(entry.target, entry.version, entry.head, entry.shelf)
    if address.what == "changes":
        return StreamResponse(address, responses.EVENTS, _since(address, request))
    if responses.NDJSON in request.headers.get(b"accept", b"").lower():
        return StreamResponse(address, responses.NDJSON, least=_least(request))
    return _page(view, entry, address, request)


def item_answer(version: int, head: bytes, key: bytes, response: bytes | None, request: PodRequest) -> HandlerResponse:
    """One item, as *response* has it; NotFound when there is none in this version."""
    if response is None:
        shown = key[:100].decode(errors="replace")
        raise NotFound("UNKNOWN_KEY", f"there is no item {shown!r} in version {version}")
    tag = layout.etag_of(response)
    if _has(request, tag):
        return HandlerResponse(304, head + b"ETag: " + tag + b"\r\n\r\n")
    return HandlerResponse(200, head + response)


def items_answer(
    version: int, head: bytes, found: dict[bytes, bytes], keys: list[bytes], request: PodRequest
) -> HandlerResponse:
    """Several items of one version, and which of those asked for there are not."""
    tag = layout.tag_over([b"%d" % (key in found) + found.get(key, b"") for key in keys])
    if _has(request, tag):
        return HandlerResponse(304, head + b"ETag: " + tag + b"\r\n\r\n")
    items = b",".join(orjson.dumps(key.decode()) + b":" + value for key, value in found.items())
    missing = orjson.dumps([key.decode() for key in keys if key not in found])
    body = b'{"version":%d,"items":{%b},"missing":%b}' % (version, items, missing)
    return HandlerResponse(200, responses.lengthy(head + b"ETag: " + tag + b"\r\n", body))


def version_answer(
    target: DictionaryKey, version: int, head: bytes, shelf: DictionaryHeader | None = None
) -> HandlerResponse:
    """A dictionary's version; from memory also how many items it has, and since when."""
    told: dict[str, object] = {"tenantId": target.tenant_id, "dictCode": target.dict_code, "version": version}
    if shelf is not None:
        loaded = datetime.fromtimestamp(shelf.loaded_at, UTC).isoformat(timespec="milliseconds")
        told |= {"items": shelf.items, "loadedAt": loaded, "isPinned": shelf.is_pinned}
    return HandlerResponse(200, responses.lengthy(head, orjson.dumps(told)))


def as_line(found: Found) -> bytes:
    """An item among others."""
    place, value = found
    key = orjson.dumps(layout.key_of(place, value).decode())
    return b'{"key":%b,"value":%b}' % (key, layout.body_of(layout.response_of(place, value)))


def _items(view: MemoryView, entry: ServedDictionary, keys: list[bytes], request: PodRequest) -> HandlerResponse:
    found = ((key, view.get(entry.shelf, key)) for key in keys)
    bodies = {key: layout.body_of(response) for key, response in found if response is not None}
    check_size(sum(map(len, bodies.values())))
    return items_answer(entry.version, entry.head, bodies, keys, request)


def _page(
    view: MemoryView, entry: ServedDictionary, address: RequestPath, request: PodRequest
) -> HandlerResponse | ReachRequest:
    limit, cursor = _limit(address.first("limit")), address.first("cursor")
    at = PageCursor(entry.shelf.mark) if cursor is None else _at(cursor)
    if at.mark.version < _least(request):
        said = f"the cursor is of version {at.mark.version}, which is below X-Min-Version"
        raise Conflict("CURSOR_TOO_OLD", said, hint="begin again without a cursor, or ask for no version")
    if at.mark.version > entry.version:  # another pod was quicker
        return ReachRequest(*address.target, at.mark.version, "all")
    found = view.page(address.target, at, limit, _PAGE_SIZE)
    if found is None:
        said = f"version {at.mark.version} of {address.target.dict_code} is not kept any more"
        raise ResourceGone("VERSION_EXPIRED", said, hint="begin again without a cursor")
    # When it is not known whether there is more, the next page tells: it may be empty.
    is_last = len(found) < limit and sum(len(place) + len(value) for place, value in found) < _PAGE_SIZE
    more = None if is_last else page.encode_cursor([*at.mark, found[-1][0].hex()])
    items = b",".join(map(as_line, found))
    body = b'{"version":%d,"items":[%b],"next":%b}' % (at.mark.version, items, orjson.dumps(more))
    head = responses.data_head(at.mark, responses.MEMORY, entry.age)
    return HandlerResponse(200, responses.lengthy(head, body))


def _has(request: PodRequest, tag: bytes) -> bool:
    """R31: whether the caller has this already."""
    given = request.headers.get(b"if-none-match")
    if given is None:
        return False
    return given.strip() == b"*" or tag.removeprefix(b"W/") in [
        one.strip().removeprefix(b"W/") for one in given.split(b",")
    ]


def _least(request: PodRequest) -> int:
    return version_of(request.headers.get(b"x-min-version", b"0"))


def _limit(given: str | None) -> int:
    if given is None:
        return _PAGE
    if not (given.isascii() and given.isdigit() and len(given) < 9) or not 1 <= int(given) <= _LARGEST_PAGE:
        raise MalformedRequest("BAD_LIMIT", f"limit is a number from 1 to {_LARGEST_PAGE}")
    return int(given)


def _at(cursor: str) -> PageCursor:
    *mark, place = page.decode_cursor(cursor, [int, int, bool, str])
    try:
        at = PageCursor(VersionStamp(*mark), bytes.fromhex(place))
    except ValueError as error:
        raise _bad_cursor() from error
    if at.mark.version < 0:
        raise _bad_cursor()
    return at


def _bad_cursor() -> Invalid:
    return Invalid("BAD_CURSOR", "that is not a cursor of this listing", hint="use `next`, unchanged")


def _since(address: RequestPath, request: PodRequest) -> int | None:
    """After which version changes are told: whoever lost the connection says where it was."""
    since = (address.first("since") or "").encode(errors="replace")
    last = request.headers.get(b"last-event-id") or since
    return version_of(last, "Last-Event-ID or since") if last else None
