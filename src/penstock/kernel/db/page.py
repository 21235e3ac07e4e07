"""Keyset paging: a page continues after the last row of the previous page, also if rows were changed meanwhile."""

import base64
import binascii
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

import orjson
from pydantic import Field

from penstock.kernel.errors import Invalid

T = TypeVar("T")
_LENGTH_LIMIT = 4_000
_BIGINT = range(-(2**63), 2**63)
_INFINITIES = (datetime.min, datetime.max)  # noqa: DTZ901 - as asyncpg reads -infinity and infinity: without a zone

# The query parameters of all listings.
Limit = Annotated[int, Field(ge=1, le=1000, description="Maximum number of items on the page.")]
Cursor = Annotated[
    str | None,
    Field(max_length=_LENGTH_LIMIT, description="Cursor of the page: `next` of the previous page; none for the first."),
]


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some items, and the cursor of the next page; None on the last page."""

    items: Sequence[T]
    next: str | None


def make_page(rows: Sequence[T], limit: int, key: Callable[[T], Sequence[Any]]) -> Page[T]:
    """Make a page of *rows*, read with `LIMIT limit + 1`; *key* returns the values that a row is ordered by."""
    items = rows[:limit]
    return Page(items, encode_cursor(key(items[-1])) if len(rows) > limit else None)


def encode_cursor(values: Sequence[Any]) -> str:
    """Return an opaque cursor for the values that a row is ordered by."""
    return base64.urlsafe_b64encode(orjson.dumps(list(values))).decode().rstrip("=")


def decode_start(cursor: str | None, types: Sequence[type], start: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values after which a page starts: those of *cursor*, or *start* if it is None."""
    return tuple(start) if cursor is None else decode_cursor(cursor, types)


def decode_cursor(cursor: str, types: Sequence[type]) -> tuple[Any, ...]:
    """Return the values of *cursor*, which must have these *types*, or raise Invalid BAD_CURSOR."""
    try:
        values = _parse_cursor(cursor)
        return tuple(_convert(value, kind) for value, kind in zip(values, types, strict=True))
    except (ValueError, TypeError, OverflowError, binascii.Error) as error:
        hint = "send `next` of the previous page unchanged, or no cursor for the first page"
        raise Invalid("BAD_CURSOR", "this is not a cursor of this listing", hint=hint) from error


def _parse_cursor(cursor: str) -> list[Any]:
    if len(cursor) > _LENGTH_LIMIT:
        raise ValueError("too long")
    values = orjson.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    if not isinstance(values, list):
        raise TypeError("not a list")
    return values


def _convert(value: Any, kind: type) -> Any:
    """Return *value* as *kind*; ValueError if PostgreSQL cannot store it, because the query would fail."""
    if kind is datetime:
        return _normalize_time(datetime.fromisoformat(value))
    if kind is UUID and isinstance(value, str):
        return UUID(value)
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    if (isinstance(value, int) and value not in _BIGINT) or (isinstance(value, str) and "\0" in value):
        raise ValueError("PostgreSQL has no such value")
    return value


def _normalize_time(value: datetime) -> datetime:
    if value.tzinfo is not None:
        return value.astimezone(UTC)
    if value not in _INFINITIES:
        raise ValueError("no time zone")
    return value
