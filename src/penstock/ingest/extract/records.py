"""JSON, NDJSON and XML: records one by one, their nested values under dotted names."""

import codecs
import json
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from itertools import chain
from typing import IO, TYPE_CHECKING, Any

import ijson  # type: ignore[import-untyped]
import polars as pl
from lxml import etree

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract import json_stream
from penstock.ingest.extract.archives import ArchiveMember, unreadable
from penstock.ingest.extract.detect import encoding_of, without_mark
from penstock.ingest.extract.tables import (
    BATCH,
    COLUMNS,
    FIGURES,
    HEAD,
    MALFORMED,
    RowBatch,
    SourceTable,
    gathered,
    rows_of,
)
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import FileFormat

if TYPE_CHECKING:
    from penstock.ingest.supplier import SupplierSource

Record = dict[str, str]
_DIGITS = 400
_SHOWN = 200  # characters of a record that is none
_PIECE = 1 << 20
_LINE_LIMIT = 16 << 20


class _NumberText(str):
    """The text of a number that looks like 1.234."""

    __slots__ = ()


def table(member: ArchiveMember, form: FileFormat, source: "SupplierSource", wanted: list[str] | None) -> SourceTable:
    """The one table the records make. Without *wanted*, its columns are what the first records have."""
    records = _records(member, form, source)
    first = next(gathered(records, BATCH if wanted is None else HEAD, dict.values), [])
    present = {name: None for one in first for name in one if name != MALFORMED}
    names = list(dict.fromkeys(present if wanted is None else wanted))
    if len(names) > COLUMNS:
        said = f"the records of {member.name} have more than {COLUMNS} names"
        raise RunFailed(FailureCode.FILE_TOO_LARGE, said, "map those that count: columns")
    head = [[one.get(name, "") for name in names] for one in first[:HEAD]]
    # A name no record has is as good as a header that lacks it; where there are no records, nobody can tell.
    absent = frozenset(names).difference(present) if first else frozenset()
    batches = _batches(chain(first, records), names)
    return SourceTable(member.category, member.number, head, batches, names=names, absent=absent, file=member.name)


def _batches(records: Iterator[Record], names: list[str]) -> Iterator[RowBatch]:
    row = 1
    for batch in gathered(records, rows_of(len(names)), dict.values):
        columns = {str(n): [one.get(name, "") for one in batch] for n, name in enumerate(names)}
        figures = {n: [cell.__class__ is _NumberText for cell in cells] for n, cells in columns.items()}
        columns[MALFORMED] = [one.get(MALFORMED, "") for one in batch]
        frame = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))
        told = [pl.Series(FIGURES + n, found) for n, found in figures.items() if any(found)]
        yield RowBatch(frame.with_columns(told), row)
        row += len(batch)


def _records(member: ArchiveMember, form: FileFormat, source: "SupplierSource") -> Iterator[Record]:
    readers = {FileFormat.JSON: _json, FileFormat.NDJSON: _ndjson, FileFormat.XML: _xml}
    with member.open() as content:
        yield from readers[form](content, member, source.records)


def _json(content: IO[bytes], member: ArchiveMember, place: str | None) -> Iterator[Record]:
    with _said("JSON", member):
        path = json_stream.path_of(place) if place else _place(member)
        for item in json_stream.items(_marked_out(content, member), path):
            yield _texts(item) if isinstance(item, dict) else _malformed(item)


def _place(member: ArchiveMember) -> json_stream.Path:
    with member.open() as content:
        found = json_stream.place_of_records(_marked_out(content, member))
    if found is None:
        raise unreadable(member.name, "there is no list of records in it; set source.records")
    return found


def _texts(values: dict[str, Any]) -> Record:
    return {_valid(name): _text(value) for name, value in values.items()}


def _malformed(item: Any) -> Record:
    return {MALFORMED: _valid(str(item))[:_SHOWN]}


@contextmanager
def _said(form: str, member: ArchiveMember) -> Iterator[None]:
    """What a parser does not like, in our words."""
    try:
        yield
    except json_stream.ValueTooLong as error:
        raise unreadable(member.name, str(error)) from error
    except (ijson.JSONError, etree.XMLSyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        raise unreadable(member.name, f"it is not {form}: {error}") from error


def _marked_out(content: IO[bytes], member: ArchiveMember) -> IO[bytes]:
    """UTF-8, whatever it was, without a byte order mark."""
    encoding = encoding_of(member.head)
    content.read(len(member.head) - len(without_mark(member.head)))
    if encoding == "utf-8":
        return content
    return _RecodedText(content, encoding)  # type: ignore[return-value]


class _RecodedText:
    """A stream in another encoding, read as UTF-8."""

    def __init__(self, content: IO[bytes], encoding: str) -> None:
        self._content = content
        self._decode = codecs.getincrementaldecoder(encoding)().decode

    def read(self, size: int = -1) -> bytes:
        while True:
            piece = self._content.read(size)
            text = self._decode(piece, not piece).encode()
            if text or not piece or not size:
                return text


def _ndjson(content: IO[bytes], member: ArchiveMember, _place: str | None) -> Iterator[Record]:
    stream = _marked_out(content, member)
    left = b""
    with _said("NDJSON", member):
        while piece := stream.read(_PIECE):
            *lines, left = (left + piece).split(b"\n")
            if len(left) > _LINE_LIMIT:
                raise unreadable(member.name, f"a line is over {_LINE_LIMIT} bytes")
            yield from map(_line, lines)
    if left:
        yield _line(left)


def _line(line: bytes) -> Record:
    """One bad line is one bad row."""
    if not line.strip():
        return {}
    try:
        return _flat(json.loads(line.decode(), parse_float=Decimal, parse_int=Decimal, parse_constant=_refused))
    except (ValueError, ArithmeticError, RecursionError):
        return {MALFORMED: line[:_SHOWN].decode(errors="replace")}


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _flat(item: Any) -> Record:
    if not isinstance(item, dict):
        return _malformed(item)
    found: Record = {}
    _flatten(item, "", found, 0)
    return found


def _flatten(value: Any, name: str, found: Record, depth: int) -> None:
    if isinstance(value, dict) and depth < json_stream.DEPTH:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else key, found, depth + 1)
    elif value is not None:
        found[_valid(name)] = _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return _valid(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        text = format(value, "f") if abs(value.adjusted()) < _DIGITS else str(value)
        return _NumberText(text) if text[-4:-3] == "." else text
    return str(value) if isinstance(value, int) else _valid(json.dumps(value, default=_text, ensure_ascii=False))


def _valid(text: str) -> str:
    """JSON can spell halves of characters, which no file can hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _xml(content: IO[bytes], member: ArchiveMember, place: str | None) -> Iterator[Record]:
    with _said("XML", member):
        for _, element in _walk(content, place or _repeated(member)):
            found: Record = {}
            _gather(element, "", found, member)
            yield found
            _forget(element)


def _walk(content: IO[bytes], tag: str | None = None, events: tuple[str, ...] = ("end",)) -> Iterator[tuple[str, Any]]:
    """No entities, no network, nothing huge: what comes from outside is data, never a program."""
    return iter(
        etree.iterparse(
            content, events=events, tag=f"{{*}}{tag}" if tag else None, resolve_entities=False, no_network=True,
            load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True,
        )
    )  # fmt: skip


def _repeated(member: ArchiveMember) -> str:
    """The element that comes twice under one parent first, and holds something but text."""
    seen: list[set[str]] = [set()]  # for every element that is open, the names in it
    with member.open() as content:
        for event, element in _walk(content, events=("start", "end")):
            if event == "start":
                seen.append(set())
                continue
            holds = bool(seen.pop() or element.attrib)
            if holds and element.tag in seen[-1]:
                return str(etree.QName(element).localname)
            seen[-1].add(element.tag)
            _forget(element)
    raise unreadable(member.name, "no element comes twice; set source.records to the one that is a record")


def _gather(element: Any, name: str, found: Record, member: ArchiveMember) -> None:
    """Of what comes more than once the first counts."""
    before = f"{name}." if name else ""
    for key, value in element.attrib.items():
        found.setdefault(f"{before}@{etree.QName(key).localname}", value)
    if element.text and element.text.strip():
        found.setdefault(name or ".", element.text)
    for inner in element:
        if not isinstance(inner.tag, str):
            raise unreadable(member.name, f"it defines {inner.text}, and what a file defines is not read")
        _gather(inner, f"{before}{etree.QName(inner).localname}", found, member)


def _forget(element: Any) -> None:
    """Memory stays bounded only when what was read goes, also from the elements around it."""
    element.clear()
    while element is not None:
        while element.getprevious() is not None:
            del element.getparent()[0]
        element = element.getparent()
