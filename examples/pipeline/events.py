"""Events as lines of JSON, the shard each belongs to, and the row it becomes."""

import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")  # keeps a key free of what databases compare in ways of their own
_TEXT_LIMIT = 64
_BIGINT = range(-(2**63), 2**63)


class BadLine(ValueError):
    """A line that makes no sense; says which one and why."""


class Event(NamedTuple):
    """An event that can be handed to its shard; what else it says is not yet checked."""

    line: int
    event_id: str
    user_id: str
    fields: dict[str, Any]


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a file; raise BadLine for an invalid line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _event(number, line)
            except ValueError as error:
                raise BadLine(f"line {number} of {path.name}: {error}") from error


def shard_of(user_id: str, shards: int) -> int:
    """Return the shard of a user: equal on every machine and Python version, unlike `hash`."""
    return zlib.crc32(user_id.encode()) % shards


def line_of(fields: dict[str, Any]) -> bytes:
    """*fields* as a line of a file."""
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Yield the rows of a file that `row_of` created."""
    with path.open("rb") as file:
        return [orjson.loads(line) for line in file]


def row_of(event: Event) -> dict[str, Any]:
    """Return the event as the database stores it: integer cents, time in UTC; ValueError if it is invalid."""
    fields = event.fields
    return {
        "event_id": event.event_id,
        "user_id": event.user_id,
        "kind": _text(fields, "kind").strip().lower(),
        "amount_cents": _cents(fields.get("amount_cents")),
        "at": _utc(_text(fields, "at")),
    }


def _event(number: int, line: bytes) -> Event:
    fields = orjson.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("an event is a JSON object")  # noqa: TRY004 - one kind of error for all that is wrong
    event_id = _text(fields, "event_id")
    if not _NAME.fullmatch(event_id):
        raise ValueError("event_id is 1 to 64 of letters, digits, dot, colon, underscore and hyphen")
    return Event(number, event_id, _text(fields, "user_id"), fields)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not 0 < len(value.strip()) <= len(value) <= _TEXT_LIMIT:
        raise ValueError(f"{name} is a text of 1 to {_TEXT_LIMIT} characters")
    return value


def _cents(value: object) -> int:
    """Whole cents, as a number or as its text."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,19}", value):
        value = int(value)
    if type(value) is not int or value not in _BIGINT:
        raise ValueError(f"amount_cents is a whole number, not {value!r}")
    return value


def _utc(text: str) -> str:
    """Return a time in UTC as MySQL reads it."""
    try:
        moment = datetime.fromisoformat(text)
        in_utc = moment.astimezone(UTC) if moment.tzinfo else None
    except (ValueError, OverflowError):
        in_utc = None
    if in_utc is None:
        raise ValueError(f"at is a time with its zone, such as 2025-01-01T00:00:00Z, not {text!r}")
    return in_utc.isoformat(" ", "microseconds")[: -len("+00:00")]
