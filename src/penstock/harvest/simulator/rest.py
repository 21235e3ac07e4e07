"""REST API of the simulator: `GET /records` and `GET /records/count`."""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime
from functools import lru_cache
from urllib.parse import unquote_plus

from penstock.harvest.simulator.dataset import Dataset, RecordFilter, RecordOrder, micros
from penstock.harvest.simulator.faults import Fault, FaultInjector
from penstock.kernel.errors import Invalid

USUAL_LIMIT, MOST = 30, 1_000
Parameters = dict[str, str]
_FILTERS = ("price_from", "price_below", "price_null", "updated_after", "updated_upto")
_PLACES = frozenset(("offset", "page", "cursor"))
_KNOWN = _PLACES.union(_FILTERS, ("limit",))
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_CURSOR = re.compile(r"(price|id):([0-9a-f]{1,20})")


class InvalidQuery(Invalid):
    """The request does not match the API."""

    status, title = 400, "Bad request"


def page(dataset: Dataset, dealer: FaultInjector, query: bytes, fault: Fault | None) -> bytes:
    """Return a page of records with the cursor of the next page, as JSON."""
    parameters = _read(query)
    rows = dataset.select(_filter(parameters))
    limit = _whole(parameters, "limit", USUAL_LIMIT, 1, MOST)
    offset = _offset(parameters, limit)
    if "cursor" in parameters:
        offset = rows.after(_cursor_key(parameters["cursor"], dataset.order))
    keys = rows.some(offset, limit)
    keys = keys[: dealer.left_of(len(keys), fault)]
    has_more = bool(keys) and offset + len(keys) < rows.total
    cursor = b'"%b"' % _cursor(keys[-1], dataset.order) if has_more else b"null"
    values = (b",".join(dataset.bodies(keys)), rows.total, b"true" if has_more else b"false", cursor)
    return b'{"items":[%b],"total":%d,"hasMore":%b,"nextCursor":%b}' % values


def count(dataset: Dataset, query: bytes) -> bytes:
    """Return the number of records of a filter, as JSON; the place of a page is ignored."""
    return b'{"total":%d}' % dataset.select(_filter(_read(query))).total


def _read(query: bytes) -> Parameters:
    parameters: Parameters = {}
    for pair in query.decode("latin-1").split("&"):
        name, _, value = pair.partition("=")
        if not pair:
            continue
        if name not in _KNOWN:
            hint = f"there is {', '.join(sorted(_KNOWN))}"
            raise InvalidQuery("BAD_PARAMETER", f"{name} is not known here", hint=hint)
        if name in parameters:
            raise _bad(name, "comes once")
        parameters[name] = unquote_plus(value) if "%" in value or "+" in value else value
    return parameters


def _filter(parameters: Parameters) -> RecordFilter:
    lower, upper = _integer(parameters, "price_from"), _integer(parameters, "price_below")
    is_null = _truth(parameters, "price_null")
    if is_null and (lower is not None or upper is not None):
        raise _bad("price_null", "and a range of prices have no record in common")
    return RecordFilter(
        lower, upper, is_null, _moment(parameters, "updated_after"), _moment(parameters, "updated_upto")
    )


def _offset(parameters: Parameters, limit: int) -> int:
    if len(_PLACES & parameters.keys()) > 1:
        raise _bad("offset", "page and cursor exclude each other")
    if "page" in parameters:
        return (_whole(parameters, "page", 1, 1) - 1) * limit
    return _whole(parameters, "offset", 0, 0)


def _integer(parameters: Parameters, name: str) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    if not _INTEGER.fullmatch(value):
        raise _bad(name, "is a whole number")
    return int(value)


def _whole(parameters: Parameters, name: str, usual: int, least: int, most: int | None = None) -> int:
    number = _integer(parameters, name)
    if number is None:
        return usual
    if number < least or (most is not None and number > most):
        raise _bad(name, f"is at least {least}" + ("" if most is None else f", at most {most}"))
    return number


def _truth(parameters: Parameters, name: str) -> bool | None:
    value = parameters.get(name)
    if value is None:
        return None
    if value not in ("true", "false"):
        raise _bad(name, "is true or false")
    return value == "true"


def _moment(parameters: Parameters, name: str) -> int | None:
    value = parameters.get(name)
    try:
        return None if value is None else read_moment(value)
    except ValueError as error:
        raise _bad(name, "is a moment in ISO 8601, with a zone") from error


@lru_cache(maxsize=256)
def read_moment(text: str) -> int:
    """Return an ISO 8601 moment in microseconds; ValueError if invalid or without a zone."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError("no zone")
    return micros(moment)


def _cursor(key: int, order: RecordOrder) -> bytes:
    return urlsafe_b64encode(b"%b:%x" % (order.value.encode(), key)).rstrip(b"=")


def _cursor_key(cursor: str, order: RecordOrder) -> int:
    """Return the key of the row that precedes the page."""
    try:
        text = urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except ValueError as error:
        raise _bad("cursor", "is none of ours") from error
    found = _CURSOR.fullmatch(text)
    if found is None or found[1] != order.value:
        raise _bad("cursor", "is none of ours")
    return int(found[2], 16)


def _bad(name: str, what: str) -> InvalidQuery:
    return InvalidQuery("BAD_PARAMETER", f"{name} {what}")
