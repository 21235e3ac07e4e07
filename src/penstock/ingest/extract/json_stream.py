"""JSON as a stream of events: records one by one, however large the document, and never deeper than is sane."""

from collections.abc import Iterator
from typing import IO, Any

import ijson  # type: ignore[import-untyped]

DEPTH = 200
_NUMBER = 400  # digits; of far longer ones the parser dies, and takes us with it
_FIELDS = 100_000
LIMIT = 16 << 20  # bytes of one text and of one record
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
    """A text or a record is larger than anybody means it to be."""


class JsonGuard:
    """A stream in which no number, no text and no record is endless."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._before = b""
        self._escape = b""
        self._is_in_text = False
        self._text = 0  # bytes since the last quote
        self.record: int | None = None  # bytes since a record began, while one is read

    def read(self, size: int) -> bytes:
        # The parser reads a text from its start again with every piece: of a long one, pieces are larger.
        piece = self._content.read(max(size, min(self._text, _PIECE)))
        self._check_number(piece)
        self._check_text(piece)
        if self.record is not None:
            self.record += len(piece)
            if self.record > LIMIT:
                raise ValueTooLong(f"a record is over {LIMIT} bytes; if it holds the records, set source.records")
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
            raise ValueTooLong(f"a text is over {LIMIT} bytes")


def place_of_records(content: IO[bytes]) -> Path | None:
    """Where the records of a document are: in the first list of objects; without any, it is a record itself."""
    path: Path = []
    before, is_record = "", False
    for event, value in ijson.basic_parse(JsonGuard(content)):
        if (event == "start_array" and not path) or (event == "start_map" and before == "start_array"):
            return path or [_ITEM]
        is_record = is_record or event in _SCALARS
        _step(path, event, value)
        before = event
    return [] if is_record else None


def objects(content: IO[bytes]) -> Iterator[Path]:
    """Where each object of a document begins."""
    path: Path = []
    for event, value in ijson.basic_parse(JsonGuard(content)):
        if event == "start_map":
            yield list(path)
        _step(path, event, value)


def path_of(place: str) -> Path:
    """A place as it is configured: data.items."""
    return [*place.split("."), _ITEM]


def items(content: IO[bytes], place: Path) -> Iterator[Any]:
    """What is at *place*: of an object its values by their dotted names, of anything else what it is."""
    path: Path = []
    sane = JsonGuard(content)
    events = ijson.basic_parse(sane)
    for event, value in events:
        if path == place and event not in _BETWEEN:
            sane.record = 0
            yield _record(events) if event == "start_map" else _value(events, event, value, 1)
            sane.record = None
        else:
            _step(path, event, value)


def _step(path: Path, event: str, value: Any) -> None:
    """Keep *path*, the way to the next value, up to date."""
    if event == "map_key":
        path[-1] = value
    elif event in _STARTS:
        _check(len(path))
        path.append(_ITEM)
    elif event in _ENDS:
        path.pop()


def _record(events: Iterator[Event]) -> dict[str, Any]:
    """The object that was just begun, without objects in it."""
    found: dict[str, Any] = {}
    around: list[str] = []  # the beginnings of the names of what is open
    before = name = ""
    for event, value in events:
        if event == "map_key":
            name = before + value
        elif event == "start_map":
            _check(len(around))
            around.append(before)
            before = f"{name}."
        elif event == "end_map":
            if not around:
                break
            before = around.pop()
        elif event != "null":
            found[name] = _value(events, event, value, 1) if event == "start_array" else value
            if len(found) > _FIELDS:
                raise ValueError(f"a record has more than {_FIELDS} values; set source.records")
    return found


def _value(events: Iterator[Event], event: str, value: Any, depth: int) -> Any:
    """A value whose first event is *event*."""
    _check(depth)
    if event == "start_array":
        return [_value(events, *inner, depth + 1) for inner in iter(events.__next__, _END_OF_LIST)]
    if event == "start_map":
        keys = iter(events.__next__, _END_OF_MAP)
        return {key: _value(events, *next(events), depth + 1) for _, key in keys}
    return value


def _check(depth: int) -> None:
    if depth > DEPTH:
        raise ValueError(f"it goes more than {DEPTH} levels deep")
