"""JSON as a stream of events: records are read singly from a document of any size, up to a limit of depth."""

from collections.abc import Iterator
from typing import IO, Any

import ijson  # type: ignore[import-untyped]

DEPTH = 200
_NUMBER = 400  # digits; far longer numbers crash the parser and the process
_FIELDS = 100_000
LIMIT = 16 << 20  # bytes of a text and of a record
_PIECE = 1 << 20
_TOO_LONG = b"0" * _NUMBER
_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_ITEM = "item"
_STARTS = ("start_map", "start_array")
_ENDS = ("end_map", "end_array")
_BETWEEN = ("map_key", *_ENDS)
_SCALARS = ("null", "boolean", "number", "string")
_END_OF_LIST = ("end_array", None)
_END_OF_MAP = ("end_map", None)
Event = tuple[str, Any]
Path = list[str]


class ValueTooLong(ValueError):
    """A text or a record is larger than the limit."""


class JsonGuard:
    """A stream that limits the size of numbers, texts and records."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._before = b""
        self._escape = b""
        self._is_in_text = False
        self._text = 0  # bytes since the last quote
        self.record: int | None = None  # bytes since the start of the current record

    def read(self, size: int) -> bytes:
        # The parser rereads a text from its start with every piece, so a long text is read in larger pieces.
        piece = self._content.read(max(size, min(self._text, _PIECE)))
        self._check_number(piece)
        self._check_text(piece)
        if self.record is not None:
            self.record += len(piece)
            if self.record > LIMIT:
                raise ValueTooLong(f"a record is larger than {LIMIT:,} bytes")
        return piece

    def _check_number(self, piece: bytes) -> None:
        digits = self._before + piece.translate(_AS_ZEROS)
        if _TOO_LONG in digits:
            raise ValueError(f"a number has more than {_NUMBER} digits")
        self._before = digits[-_NUMBER:]

    def _check_text(self, piece: bytes) -> None:
        text = self._escape + piece
        if b"\\" in text:
            text = text.replace(b"\\\\", b"")
            self._escape = text[-1:] if text.endswith(b"\\") else b""
            text = text.replace(b'\\"', b"")
        else:
            self._escape = b""
        quotes = text.count(b'"')
        self._is_in_text ^= quotes % 2 == 1
        self._text = 0 if quotes or not self._is_in_text else self._text + len(piece)
        if self._text > LIMIT:
            raise ValueTooLong(f"a text is longer than {LIMIT:,} bytes")


def find_records(content: IO[bytes]) -> Path | None:
    """Return the path of the first list of objects; without a list, the document is a record itself."""
    path: Path = []
    before, is_record = "", False
    for event, value in ijson.basic_parse(JsonGuard(content)):
        if (event == "start_array" and not path) or (event == "start_map" and before == "start_array"):
            return path or [_ITEM]
        is_record = is_record or event in _SCALARS
        _update_path(path, event, value)
        before = event
    return [] if is_record else None


def iterate_objects(content: IO[bytes]) -> Iterator[Path]:
    """Yield the path of each object of a document."""
    path: Path = []
    for event, value in ijson.basic_parse(JsonGuard(content)):
        if event == "start_map":
            yield list(path)
        _update_path(path, event, value)


def parse_path(configured: str) -> Path:
    """Return the path of `source.records`, such as data.items."""
    return [*configured.split("."), _ITEM]


def iterate_items(content: IO[bytes], records: Path) -> Iterator[Any]:
    """Yield the items at *records*: an object as its values by dotted names, any other item as it is."""
    path: Path = []
    guard = JsonGuard(content)
    events = ijson.basic_parse(guard)
    for event, value in events:
        if path == records and event not in _BETWEEN:
            guard.record = 0
            yield _read_record(events) if event == "start_map" else _read_value(events, event, value, 1)
            guard.record = None
        else:
            _update_path(path, event, value)


def _update_path(path: Path, event: str, value: Any) -> None:
    """Update *path*, the path of the next value."""
    if event == "map_key":
        path[-1] = value
    elif event in _STARTS:
        _check_depth(len(path))
        path.append(_ITEM)
    elif event in _ENDS:
        path.pop()


def _read_record(events: Iterator[Event]) -> dict[str, Any]:
    """Return the object whose start was just read, with the values of inner objects under dotted names."""
    values: dict[str, Any] = {}
    outer: list[str] = []  # the prefixes of the open objects
    prefix = name = ""
    for event, value in events:
        if event == "map_key":
            name = prefix + value
        elif event == "start_map":
            _check_depth(len(outer))
            outer.append(prefix)
            prefix = f"{name}."
        elif event == "end_map":
            if not outer:
                break
            prefix = outer.pop()
        elif event != "null":
            values[name] = _read_value(events, event, value, 1) if event == "start_array" else value
            if len(values) > _FIELDS:
                raise ValueTooLong(f"a record has more than {_FIELDS:,} values")
    return values


def _read_value(events: Iterator[Event], event: str, value: Any, depth: int) -> Any:
    """Return the value whose first event is *event*."""
    _check_depth(depth)
    if event == "start_array":
        return [_read_value(events, *inner, depth + 1) for inner in iter(events.__next__, _END_OF_LIST)]
    if event == "start_map":
        keys = iter(events.__next__, _END_OF_MAP)
        return {key: _read_value(events, *next(events), depth + 1) for _, key in keys}
    return value


def _check_depth(depth: int) -> None:
    if depth > DEPTH:
        raise ValueError(f"it is nested more than {DEPTH} levels deep")
