"""JSON, NDJSON and XML: records one by one, their nested values under dotted names."""

import json
from collections.abc import Iterable, Iterator
from decimal import Decimal
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Any

import ijson  # type: ignore[import-untyped]
import polars as pl
from lxml import etree

from penstock.ingest.extract import BATCH, HEAD, MALFORMED, Batch, Table
from penstock.ingest.extract.detect import encoding_of, without_mark
from penstock.ingest.extract.packing import Member, unreadable
from penstock.ingest.supplier import Format

if TYPE_CHECKING:
    from penstock.ingest.supplier import Source

Record = dict[str, str]
_DEPTH = 20
_LINE_LIMIT = 16 << 20


def table(member: Member, form: Format, source: "Source", wanted: list[str] | None) -> Table:
    """The one table the records make. Without *wanted*, its columns are what the first records have."""
    records = _records(member, form, source)
    first = list(islice(records, BATCH if wanted is None else HEAD))
    names = wanted if wanted is not None else list(dict.fromkeys(name for one in first for name in one))
    present = {name for one in first for name in one}
    head = [[one.get(name, "") for name in names] for one in first[:HEAD]]
    name = "" if member.is_alone else member.name
    # A name no record has is as good as a header that lacks it.
    shown = [one if one in present or not first else "" for one in names]
    return Table(name, member.number, head, _batches(chain(first, records), names), names=shown)


def _batches(records: Iterator[Record], names: list[str]) -> Iterator[Batch]:
    row = 1
    while batch := list(islice(records, BATCH)):
        columns = {str(n): [one.get(name, "") for one in batch] for n, name in enumerate(names)}
        columns[MALFORMED] = [one.get(MALFORMED, "") for one in batch]
        yield Batch(pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String)), row)
        row += len(batch)


def _records(member: Member, form: Format, source: "Source") -> Iterator[Record]:
    readers = {Format.JSON: _json, Format.NDJSON: _ndjson, Format.XML: _xml}
    with member.open() as content:
        yield from readers[form](content, member, source.records)


def _json(content: IO[bytes], member: Member, place: str | None) -> Iterator[Record]:
    prefix = f"{place}.item" if place else "item"
    if place is None and without_mark(member.head).lstrip()[:1] == b"{":
        prefix = _only_list(member)
    try:
        for item in ijson.items(_marked_out(content, member), prefix):
            yield _flat(item)
    except (ijson.JSONError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(member.name, f"not JSON: {error}") from error


def _only_list(member: Member) -> str:
    """Where the records of a document are: in the first list of objects."""
    try:
        with member.open() as content:
            for prefix, event, _ in ijson.parse(_marked_out(content, member)):
                if event == "start_map" and prefix.endswith("item"):
                    return str(prefix)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise unreadable(member.name, f"not JSON: {error}") from error
    raise unreadable(member.name, "there is no list of records in it; set source.records")


def _marked_out(content: IO[bytes], member: Member) -> IO[bytes]:
    """UTF-8, whatever it was, without a byte order mark."""
    encoding = encoding_of(member.head)
    content.read(len(member.head) - len(without_mark(member.head)))
    if encoding == "utf-8":
        return content
    return _Recoded(content, encoding)  # type: ignore[return-value]


class _Recoded:
    """A stream in another encoding, read as UTF-8."""

    def __init__(self, content: IO[bytes], encoding: str) -> None:
        import codecs

        self._content = content
        self._decode = codecs.getincrementaldecoder(encoding)().decode

    def read(self, size: int = -1) -> bytes:
        piece = self._content.read(size)
        text = self._decode(piece, not piece).encode()
        return text if text or not piece else self.read(size)


def _ndjson(content: IO[bytes], member: Member, _place: str | None) -> Iterator[Record]:
    stream = _marked_out(content, member)
    left = b""
    while piece := stream.read(1 << 20):
        *lines, left = (left + piece).split(b"\n")
        if len(left) > _LINE_LIMIT:
            raise unreadable(member.name, f"a line is over {_LINE_LIMIT} bytes")
        yield from (_line(line) for line in lines)
    if left:
        yield _line(left)


def _line(line: bytes) -> Record:
    """One bad line is one bad row."""
    if not line.strip():
        return {}
    try:
        item = json.loads(line, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError):
        item = None
    return _flat(item) if isinstance(item, dict) else {MALFORMED: line[:200].decode(errors="replace")}


def _flat(item: Any) -> Record:
    if not isinstance(item, dict):
        return {MALFORMED: str(item)[:200]}
    found: Record = {}
    _flatten(item, "", found, 0)
    return found


def _flatten(value: Any, name: str, found: Record, depth: int) -> None:
    if isinstance(value, dict) and depth < _DEPTH:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), found, depth + 1)
    elif value is not None:
        found[name] = _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return format(value, "f") if abs(value.adjusted()) < 400 else str(value)
    return str(value) if isinstance(value, int) else json.dumps(value, default=str, ensure_ascii=False)


def _xml(content: IO[bytes], member: Member, place: str | None) -> Iterator[Record]:
    tag = place or _repeated(member)
    try:
        for _, element in _walk(content, tag):
            yield _element(element)
            _forget(element)
    except etree.XMLSyntaxError as error:
        raise unreadable(member.name, f"not XML: {error}") from error


def _walk(content: IO[bytes], tag: str | None = None, events: Iterable[str] = ("end",)) -> Iterator[tuple[str, Any]]:
    """No entities, no network, nothing huge: what comes from outside is data, never a program."""
    return iter(
        etree.iterparse(
            content, events=tuple(events), tag=f"{{*}}{tag}" if tag else None, resolve_entities=False, no_network=True,
            load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True,
        )
    )  # fmt: skip


def _repeated(member: Member) -> str:
    """The element that comes twice under one parent first."""
    seen: set[tuple[int, str]] = set()
    try:
        with member.open() as content:
            for _, element in _walk(content):
                parent = element.getparent()
                place = (id(parent), element.tag)
                if parent is not None and place in seen and len(element):
                    return str(etree.QName(element).localname)
                seen.add(place)
    except etree.XMLSyntaxError as error:
        raise unreadable(member.name, f"not XML: {error}") from error
    raise unreadable(member.name, "no element comes twice; set source.records to the one that is a record")


def _element(element: Any) -> Record:
    found: Record = {}
    _gather(element, "", found)
    return found


def _gather(element: Any, name: str, found: Record) -> None:
    before = f"{name}." if name else ""
    for key, value in element.attrib.items():
        found[f"{before}@{key}"] = value
    if element.text and element.text.strip():
        found.setdefault(name or ".", element.text)
    for inner in element:
        _gather(inner, f"{before}{etree.QName(inner).localname}", found)


def _forget(element: Any) -> None:
    """Memory stays bounded only when what was read goes."""
    element.clear()
    while element.getprevious() is not None:
        del element.getparent()[0]
