"""REST API of the simulator: `GET /records` and `GET /records/count`."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime
from functools import lru_cache
from urllib.parse import unquote_plus

from penstock.harvest.simulator.dataset import Dataset, RecordFilter, RecordOrder, convert_to_micros
from penstock.harvest.simulator.faults import Fault, FaultInjector
from penstock.kernel.errors import Invalid

DEFAULT_LIMIT, MAX_LIMIT = 30, 1_000
Parameters = dict[str, str]
_FILTERS = ("price_from", "price_below", "price_null", "updated_after", "updated_upto")
_PAGING = frozenset(("offset", "page", "cursor"))
_KNOWN = _PAGING.union(_FILTERS, ("limit",))
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_CURSOR = re.compile(r"(price|id):([0-9a-f]{1,20})")


class InvalidQuery(Invalid):
    """The request does not match the API."""

    status, title = 400, "Bad request"


def make_page(dataset: Dataset, injector: FaultInjector, query: bytes, fault: Fault | None) -> bytes:
    """Return a page of records with the cursor of the next page, as JSON."""
    parameters = _read(query)
    rows = dataset.select(_parse_filter(parameters))
    limit = _parse_whole_number(parameters, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    offset = _parse_offset(parameters, limit)
    if "cursor" in parameters:
        offset = rows.count_up_to(_decode_cursor(parameters["cursor"], dataset.order))
    keys = rows.slice_keys(offset, limit)
    keys = keys[: injector.count_rows(len(keys), fault)]
    has_more = bool(keys) and offset + len(keys) < rows.total
    cursor = b'"%b"' % _encode_cursor(keys[-1], dataset.order) if has_more else b"null"
    values = (b",".join(dataset.encode_records(keys)), rows.total, b"true" if has_more else b"false", cursor)
    return b'{"items":[%b],"total":%d,"hasMore":%b,"nextCursor":%b}' % values


def count(dataset: Dataset, query: bytes) -> bytes:
    """Return the number of records of a filter, as JSON; parameters of paging are ignored."""
    return b'{"total":%d}' % dataset.select(_parse_filter(_read(query))).total


def _read(query: bytes) -> Parameters:
    parameters: Parameters = {}
    for pair in query.decode("latin-1").split("&"):
        name, _, value = pair.partition("=")
        if not pair:
            continue
        if name not in _KNOWN:
            hint = f"parameters: {', '.join(sorted(_KNOWN))}"
            raise InvalidQuery("BAD_PARAMETER", f"unknown parameter {name}", hint=hint)
        if name in parameters:
            raise _make_query_error(name, "must be unique")
        parameters[name] = unquote_plus(value) if "%" in value or "+" in value else value
    return parameters


def _parse_filter(parameters: Parameters) -> RecordFilter:
    lower, upper = _parse_integer(parameters, "price_from"), _parse_integer(parameters, "price_below")
    is_null = _parse_truth(parameters, "price_null")
    if is_null and (lower is not None or upper is not None):
        raise _make_query_error("price_null", "and a range of prices exclude each other")
    return RecordFilter(
        lower, upper, is_null, _parse_moment(parameters, "updated_after"), _parse_moment(parameters, "updated_upto")
    )


def _parse_offset(parameters: Parameters, limit: int) -> int:
    if len(_PAGING & parameters.keys()) > 1:
        raise _make_query_error("offset", "excludes page and cursor, which exclude each other")
    if "page" in parameters:
        return (_parse_whole_number(parameters, "page", 1, 1) - 1) * limit
    return _parse_whole_number(parameters, "offset", 0, 0)


def _parse_integer(parameters: Parameters, name: str) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    if not _INTEGER.fullmatch(value):
        raise _make_query_error(name, "must be a whole number")
    return int(value)


def _parse_whole_number(
    parameters: Parameters, name: str, default: int, minimum: int, maximum: int | None = None
) -> int:
    number = _parse_integer(parameters, name)
    if number is None:
        return default
    if number < minimum or (maximum is not None and number > maximum):
        limits = f"at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
        raise _make_query_error(name, f"must be {limits}")
    return number


def _parse_truth(parameters: Parameters, name: str) -> bool | None:
    value = parameters.get(name)
    if value is None:
        return None
    if value not in ("true", "false"):
        raise _make_query_error(name, "must be true or false")
    return value == "true"


def _parse_moment(parameters: Parameters, name: str) -> int | None:
    value = parameters.get(name)
    try:
        return None if value is None else read_moment(value)
    except ValueError as error:
        raise _make_query_error(name, "must be a time in ISO 8601 with a time zone") from error


@lru_cache(maxsize=256)
def read_moment(text: str) -> int:
    """Return an ISO 8601 moment in microseconds; ValueError if invalid or without a zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no zone")
    return convert_to_micros(moment)


def _encode_cursor(key: int, order: RecordOrder) -> bytes:
    return urlsafe_b64encode(b"%b:%x" % (order.value.encode(), key)).rstrip(b"=")


def _decode_cursor(cursor: str, order: RecordOrder) -> int:
    """Return the key of the row that precedes the page."""
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except ValueError as error:
        raise _make_query_error("cursor", "is not a cursor of this API") from error
    match = _CURSOR.fullmatch(text)
    if match is None or match[1] != order.value:
        raise _make_query_error("cursor", "is not a cursor of this API")
    return int(match[2], 16)


def _make_query_error(name: str, problem: str) -> InvalidQuery:
    return InvalidQuery("BAD_PARAMETER", f"{name} {problem}")
