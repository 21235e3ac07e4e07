"""JSON as a stream of events: records one by one, however large the document, and never deeper than is sane."""

from collections.abc import Iterator
from typing import IO, Any

import ijson  # type: ignore[import-untyped]

DEPTH = 200
_NUMBER = 400  # digits; of far longer ones the parser dies, and takes us with it
_FIELDS = 100_000
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


class Sane:
    """A stream in which no number is endless."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._before = b""

    def read(self, size: int = -1) -> bytes:
        piece = self._content.read(size)
        digits = self._before + piece.translate(_AS_ZEROS)
        if _TOO_LONG in digits:
            raise ValueError(f"a number has more than {_NUMBER} digits")
        self._before = digits[-_NUMBER:]
        return piece


def place_of_records(content: IO[bytes]) -> Path | None:
    """Where the records of a document are: in the first list of objects; without any, it is a record itself."""
    path: Path = []
    before, is_record = "", False
    for event, value in ijson.basic_parse(Sane(content)):
        if (event == "start_array" and not path) or (event == "start_map" and before == "start_array"):
            return path or [_ITEM]
        is_record = is_record or event in _SCALARS
        _step(path, event, value)
        before = event
    return [] if is_record else None


def objects(content: IO[bytes]) -> Iterator[Path]:
    """Where each object of a document begins."""
    path: Path = []
    for event, value in ijson.basic_parse(Sane(content)):
        if event == "start_map":
            yield list(path)
        _step(path, event, value)


def path_of(place: str) -> Path:
    """A place as it is configured: data.items."""
    return [*place.split("."), _ITEM]


def items(content: IO[bytes], place: Path) -> Iterator[Any]:
    """What is at *place*: of an object its values by their dotted names, of anything else what it is."""
    path: Path = []
    events = ijson.basic_parse(Sane(content))
    for event, value in events:
        if path == place and event not in _BETWEEN:
            yield _record(events) if event == "start_map" else _value(events, event, value, 1)
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
