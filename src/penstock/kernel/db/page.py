"""Keyset paging: a page goes on where the last one ended, however the rows move meanwhile."""

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

# What listings take in their query, all of them.
Limit = Annotated[int, Field(ge=1, le=1000)]
Cursor = Annotated[str | None, Field(max_length=_LENGTH_LIMIT, description="`next` of the page before.")]


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some items, and the cursor that continues after them; None on the last page."""

    items: Sequence[T]
    next: str | None


def make_page(rows: Sequence[T], limit: int, key: Callable[[T], Sequence[Any]]) -> Page[T]:
    """Cut *rows*, read with `LIMIT limit + 1`, into a page; *key* gives the values they are ordered by."""
    items = rows[:limit]
    return Page(items, encode_cursor(key(items[-1])) if len(rows) > limit else None)


def encode_cursor(values: Sequence[Any]) -> str:
    """An opaque cursor for the values a row is ordered by."""
    return base64.urlsafe_b64encode(orjson.dumps(list(values))).decode().rstrip("=")


def start_after(cursor: str | None, types: Sequence[type], start: Sequence[Any]) -> tuple[Any, ...]:
    """Where a page goes on: after *cursor*, or at *start* when there is none. An empty one is made up, and refused."""
    return tuple(start) if cursor is None else decode_cursor(cursor, types)


def decode_cursor(cursor: str, types: Sequence[type]) -> tuple[Any, ...]:
    """The values of *cursor*, of just these *types*; anything else a caller made up is Invalid BAD_CURSOR."""
    try:
        values = _values(cursor)
        return tuple(_typed(value, kind) for value, kind in zip(values, types, strict=True))
    except (ValueError, TypeError, OverflowError, binascii.Error) as error:
        hint = "use `next` of the page before, unchanged, or none to begin"
        raise Invalid("BAD_CURSOR", "that is not a cursor of this listing", hint=hint) from error


def _values(cursor: str) -> list[Any]:
    if len(cursor) > _LENGTH_LIMIT:
        raise ValueError("too long")
    values = orjson.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    if not isinstance(values, list):
        raise TypeError("not a list")
    return values


def _typed(value: Any, kind: type) -> Any:
    """*value* as *kind*, if PostgreSQL can hold it: what it cannot hold would fail in the query, as our fault."""
    if kind is datetime:
        return _moment(datetime.fromisoformat(value))
    if kind is UUID and isinstance(value, str):
        return UUID(value)
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected")
    if (isinstance(value, int) and value not in _BIGINT) or (isinstance(value, str) and "\0" in value):
        raise ValueError("PostgreSQL has no such value")
    return value


def _moment(value: datetime) -> datetime:
    if value.tzinfo is not None:
        return value.astimezone(UTC)
    if value not in _INFINITIES:
        raise ValueError("no time zone")
    return value
