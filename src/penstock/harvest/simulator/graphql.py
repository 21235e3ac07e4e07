"""GraphQL API of the simulator in the form of Nivoda. No parser: the text is searched for three root fields."""

import re
import secrets
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Annotated

import msgspec
import orjson

from penstock.harvest.simulator.dataset import Dataset, RecordFilter
from penstock.harvest.simulator.faults import Fault, FaultInjector
from penstock.harvest.simulator.rest import InvalidQuery, read_moment
from penstock.kernel.clock import Clock

MAX_PAGE_SIZE = 50
_FIELD = re.compile(r"\b(?:username_and_password|diamonds_by_query_count|diamonds_by_query)\b")


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    from_: int | None = msgspec.field(default=None, name="from")
    to: int | None = None


class _Moments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    after: str | None = None
    upto: str | None = None


class _Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dollar_value: _Value | None = None
    has_price: bool | None = None
    updated_at: _Moments | None = None


class _Variables(msgspec.Struct, frozen=True):
    username: str = ""
    password: str = ""
    token: str = ""
    query: _Query | None = None
    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE_SIZE)] = MAX_PAGE_SIZE


class _ParsedQuery(msgspec.Struct, frozen=True):
    query: str
    variables: _Variables | None = None


_decoder = msgspec.json.Decoder(_ParsedQuery)


class GraphqlError(Exception):
    """Error that GraphQL reports in an answer with status 200."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class AccessTokens:
    """Tokens of authenticated clients and their times of expiry."""

    def __init__(self, username: str, password: str, lifetime: timedelta, clock: Clock) -> None:
        self._known = (username, password)
        self._lifetime = lifetime
        self._clock = clock
        self._until: dict[str, datetime] = {}

    def give(self, username: str, password: str) -> str:
        if (username, password) != self._known:
            raise GraphqlError("UNAUTHENTICATED", "wrong username or password")
        token = secrets.token_hex(16)
        self._until[token] = self._clock.now() + self._lifetime
        return token

    def check(self, token: str) -> None:
        until = self._until.get(token)
        if until is None or until <= self._clock.now():
            self._until.pop(token, None)
            raise GraphqlError("UNAUTHENTICATED", "the token is unknown or has expired")

    def expire(self) -> int:
        """Expire all tokens and return their number."""
        expired = len(self._until)
        self._until.clear()
        return expired


def answer_request(
    dataset: Dataset, tokens: AccessTokens, injector: FaultInjector, body: bytes, fault: Fault | None
) -> tuple[str, bytes]:
    """Return the kind of the request and the answer, as JSON."""
    kind = "graphql"
    try:
        parsed = _decoder.decode(body)
        kind, variables = _find_kind(parsed.query), parsed.variables or _Variables()
        if kind == "authenticate":
            token = tokens.give(variables.username, variables.password)
            return kind, orjson.dumps({"data": {"authenticate": {"username_and_password": {"token": token}}}})
        tokens.check(variables.token)
        make = _count if kind == "count" else _make_page
        return kind, make(dataset, injector, variables, fault)
    except msgspec.ValidationError as error:
        return kind, _encode_errors("BAD_USER_INPUT", str(error))
    except msgspec.DecodeError as error:
        raise InvalidQuery("BAD_JSON", f"the body is not JSON: {error}") from error
    except GraphqlError as error:
        return kind, _encode_errors(error.code, str(error))


@lru_cache(maxsize=256)
def _find_kind(query: str) -> str:
    fields = set(_FIELD.findall(query))
    if len(fields) != 1:
        raise GraphqlError(
            "GRAPHQL_VALIDATION_FAILED",
            "the query must have one of authenticate, diamonds_by_query, diamonds_by_query_count",
        )
    field = fields.pop()
    kinds = {"username_and_password": "authenticate", "diamonds_by_query_count": "count", "diamonds_by_query": "page"}
    return kinds[field]


def _make_page(dataset: Dataset, injector: FaultInjector, variables: _Variables, fault: Fault | None) -> bytes:
    rows = dataset.select(_make_filter(variables.query))
    keys = rows.slice_keys(variables.offset, variables.limit)
    keys = keys[: injector.count_rows(len(keys), fault)]
    items = b",".join(dataset.encode_records(keys))
    return b'{"data":{"as":{"diamonds_by_query":{"items":[%b],"total_count":%d}}}}' % (items, rows.total)


def _count(dataset: Dataset, _dealer: FaultInjector, variables: _Variables, _fault: Fault | None) -> bytes:
    return b'{"data":{"as":{"diamonds_by_query_count":%d}}}' % dataset.select(_make_filter(variables.query)).total


def _make_filter(query: _Query | None) -> RecordFilter:
    if query is None:
        return RecordFilter()
    value, moments = query.dollar_value or _Value(), query.updated_at or _Moments()
    if query.has_price is False and (value.from_ is not None or value.to is not None):
        raise GraphqlError("BAD_USER_INPUT", "has_price: false and dollar_value exclude each other")
    upper = None if value.to is None else value.to + 1  # a GraphQL range includes both ends
    is_null = None if query.has_price is None else not query.has_price
    return RecordFilter(value.from_, upper, is_null, _parse_moment(moments.after), _parse_moment(moments.upto))


def _parse_moment(text: str | None) -> int | None:
    try:
        return None if text is None else read_moment(text)
    except ValueError as error:
        raise GraphqlError("BAD_USER_INPUT", f"{text!r} is not a time in ISO 8601 with a time zone") from error


def _encode_errors(code: str, message: str) -> bytes:
    return orjson.dumps({"errors": [{"message": message, "extensions": {"code": code}}]})
