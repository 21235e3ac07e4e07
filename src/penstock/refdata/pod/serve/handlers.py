"""R17, R31: the reads of one dictionary: an item, several items, all items in pages, the version."""

from datetime import UTC, datetime
from typing import NamedTuple
from uuid import uuid4

import orjson
import structlog

from penstock.kernel.db.page import decode_cursor, encode_cursor
from penstock.kernel.errors import Conflict, Invalid, NotFound, PenstockError
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.ipc import BarrierRequest, check_size
from penstock.refdata.pod.memory import layout
from penstock.refdata.pod.memory.layout import DictionaryHeader
from penstock.refdata.pod.memory.reader import MemoryView, PageCursor, StoredItem
from penstock.refdata.pod.serve import responses
from penstock.refdata.pod.serve.request import (
    MalformedRequest,
    PodRequest,
    RequestPath,
    ResourceGone,
    parse_keys,
    parse_version,
)

_DEFAULT_LIMIT, _MAX_LIMIT = 1_000, 10_000
_PAGE_SIZE = 4_000_000  # bytes; a page ends there even if it has fewer items than its limit


class HandlerResponse(NamedTuple):
    """A status, and the bytes of the response after its date."""

    status: int
    rest: bytes


class StreamResponse(NamedTuple):
    """A response that is sent in pieces: all items, or the changes after a version."""

    address: RequestPath
    media_type: bytes
    since: int | None = None
    min_version: int = 0


class ServedDictionary(NamedTuple):
    """A dictionary as it is served now, with the parts of its responses."""

    target: DictionaryKey
    tenant: str
    header: DictionaryHeader
    version: int
    age: float
    prefix: bytes  # of the stored keys of its items
    data_headers: bytes
    response_start: bytes  # of a successful read, up to the headers of the item


def read_dictionary(
    view: MemoryView, entry: ServedDictionary, address: RequestPath, request: PodRequest
) -> HandlerResponse | BarrierRequest | StreamResponse:
    """Return the response for *address*; errors contain the current version, too."""
    try:
        return _read(view, entry, address, request)
    except PenstockError as error:
        return make_refusal(
            error, responses.encode_version_headers(entry.header.mark, responses.MEMORY, entry.age), request
        )


def make_refusal(error: PenstockError, version_headers: bytes, request: PodRequest) -> HandlerResponse:
    """R21: return an error with the headers of a version."""
    return HandlerResponse(error.status, version_headers + responses.encode_problem(error, request.id))


def make_problem(error: PenstockError, request: PodRequest) -> HandlerResponse:
    """Return an error without a version."""
    headers = {"Allow": "GET, HEAD"} if error.status == 405 else {}
    return HandlerResponse(error.status, responses.encode_problem(error, request.id, headers.items()))


def make_internal_error(request: PodRequest) -> HandlerResponse:
    """Return the response to an unexpected exception: the client gets a request id, the log gets the traceback."""
    request_id = request.id or uuid4().hex
    structlog.get_logger().exception("request_crashed", request_id=request_id)
    error = PenstockError("INTERNAL", "internal error: see request_crashed with this request id in the log of the pod")
    return HandlerResponse(error.status, responses.encode_problem(error, request_id))


def _read(
    view: MemoryView, entry: ServedDictionary, address: RequestPath, request: PodRequest
) -> HandlerResponse | BarrierRequest | StreamResponse:
    if address.resource == "item":
        return make_item_response(
            entry.version, entry.data_headers, address.key, view.get(entry.header, address.key), request
        )
    if address.resource == "items":
        return _read_items(view, entry, parse_keys(address), request)
    if address.resource == "version":
        return make_version_response(entry.target, entry.version, entry.data_headers, entry.header)
    if address.resource == "changes":
        return StreamResponse(address, responses.EVENTS, _parse_since(address, request))
    if responses.NDJSON in request.headers.get(b"accept", b"").lower():
        return StreamResponse(address, responses.NDJSON, min_version=_read_min_version(request))
    return _read_page(view, entry, address, request)


def make_item_response(
    version: int, headers: bytes, key: bytes, response: bytes | None, request: PodRequest
) -> HandlerResponse:
    """Return one item from the stored *response*; NotFound if this version has no such item."""
    if response is None:
        shown = key[:100].decode(errors="replace")
        hint = None if version else "nothing is committed yet: check the tenant and the dictionary"
        raise NotFound("UNKNOWN_KEY", f"there is no item {shown!r} in version {version}", hint=hint)
    tag = layout.read_etag(response)
    if _matches_etag(request, tag):
        return HandlerResponse(304, headers + b"ETag: " + tag + b"\r\n\r\n")
    return HandlerResponse(200, headers + response)


def make_items_response(
    version: int, headers: bytes, payloads: dict[bytes, bytes], keys: list[bytes], request: PodRequest
) -> HandlerResponse:
    """Return several items of one version, and the requested keys that have no item."""
    tag = layout.hash_payloads([b"%d" % (key in payloads) + payloads.get(key, b"") for key in keys])
    if _matches_etag(request, tag):
        return HandlerResponse(304, headers + b"ETag: " + tag + b"\r\n\r\n")
    items = b",".join(orjson.dumps(key.decode()) + b":" + value for key, value in payloads.items())
    missing = orjson.dumps([key.decode() for key in keys if key not in payloads])
    body = b'{"version":%d,"items":{%b},"missing":%b}' % (version, items, missing)
    return HandlerResponse(200, responses.encode_body(headers + b"ETag: " + tag + b"\r\n", body))


def make_version_response(
    target: DictionaryKey, version: int, headers: bytes, header: DictionaryHeader | None = None
) -> HandlerResponse:
    """Return the version of a dictionary; from memory also the number of items and the time of the load."""
    body: dict[str, object] = {"tenantId": target.tenant_id, "dictCode": target.dict_code, "version": version}
    if header is not None:
        loaded = datetime.fromtimestamp(header.loaded_at, UTC).isoformat(timespec="milliseconds")
        body |= {"items": header.items, "loadedAt": loaded, "isPinned": header.is_pinned}
    return HandlerResponse(200, responses.encode_body(headers, orjson.dumps(body)))


def encode_line(item: StoredItem) -> bytes:
    """Return an item as an element of a page or a line of a stream."""
    stored_key, value = item
    key = orjson.dumps(layout.decode_key(stored_key, value).decode())
    return b'{"key":%b,"value":%b}' % (key, layout.read_body(layout.decode_response(stored_key, value)))


def _read_items(view: MemoryView, entry: ServedDictionary, keys: list[bytes], request: PodRequest) -> HandlerResponse:
    items = ((key, view.get(entry.header, key)) for key in keys)
    payloads = {key: layout.read_body(response) for key, response in items if response is not None}
    check_size(sum(map(len, payloads.values())))
    return make_items_response(entry.version, entry.data_headers, payloads, keys, request)


def _read_page(
    view: MemoryView, entry: ServedDictionary, address: RequestPath, request: PodRequest
) -> HandlerResponse | BarrierRequest:
    limit, cursor = _parse_limit(address.find_parameter("limit")), address.find_parameter("cursor")
    start = PageCursor(entry.header.mark) if cursor is None else _parse_cursor(cursor)
    if start.mark.version < _read_min_version(request):
        problem = f"the cursor belongs to version {start.mark.version}, which is below X-Min-Version"
        raise Conflict("CURSOR_TOO_OLD", problem, hint="start again without a cursor, or omit X-Min-Version")
    if start.mark.version > entry.version:  # the cursor comes from a pod that has loaded a later version
        return BarrierRequest(*address.target, start.mark.version, "all")
    page = view.read_page(address.target, start, limit, _PAGE_SIZE)
    if page is None:
        problem = f"version {start.mark.version} of {address.target.dict_code} has expired"
        raise ResourceGone("VERSION_EXPIRED", problem, hint="start again without a cursor")
    # A full page may be the last one: then the next page is empty.
    is_last = len(page) < limit and sum(len(stored_key) + len(value) for stored_key, value in page) < _PAGE_SIZE
    next_cursor = None if is_last else encode_cursor([*start.mark, page[-1][0].hex()])
    items = b",".join(map(encode_line, page))
    body = b'{"version":%d,"items":[%b],"next":%b}' % (start.mark.version, items, orjson.dumps(next_cursor))
    headers = responses.encode_data_headers(start.mark, responses.MEMORY, entry.age)
    return HandlerResponse(200, responses.encode_body(headers, body))


def _matches_etag(request: PodRequest, tag: bytes) -> bool:
    """R31: return whether the client already has this content."""
    known = request.headers.get(b"if-none-match")
    if known is None:
        return False
    return known.strip() == b"*" or tag.removeprefix(b"W/") in [
        candidate.strip().removeprefix(b"W/") for candidate in known.split(b",")
    ]


def _read_min_version(request: PodRequest) -> int:
    return parse_version(request.headers.get(b"x-min-version", b"0"))


def _parse_limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 9) or not 1 <= int(text) <= _MAX_LIMIT:
        raise MalformedRequest("BAD_LIMIT", f"limit must be a number from 1 to {_MAX_LIMIT}")
    return int(text)


def _parse_cursor(cursor: str) -> PageCursor:
    *mark, stored_key = decode_cursor(cursor, [int, int, bool, str])
    try:
        start = PageCursor(VersionStamp(*mark), bytes.fromhex(stored_key))
    except ValueError as error:
        raise _make_cursor_error() from error
    if start.mark.version < 0:
        raise _make_cursor_error()
    return start


def _make_cursor_error() -> Invalid:
    return Invalid("BAD_CURSOR", "the cursor is malformed", hint="send `next` of the previous page unchanged")


def _parse_since(address: RequestPath, request: PodRequest) -> int | None:
    """Return the version after which changes are sent: from Last-Event-ID after a reconnect, else from `since`."""
    since = (address.find_parameter("since") or "").encode(errors="replace")
    last = request.headers.get(b"last-event-id") or since
    return parse_version(last, "Last-Event-ID or since") if last else None
