"""JSON, NDJSON and XML: records are read singly, with nested values under dotted names."""

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
from penstock.ingest.extract.archives import ArchiveMember, make_unreadable_error
from penstock.ingest.extract.detect import detect_encoding, strip_mark
from penstock.ingest.extract.tables import (
    BATCH,
    COLUMNS,
    HEAD,
    MALFORMED,
    NUMERIC,
    RowBatch,
    SourceTable,
    count_batch_rows,
    gather_batches,
)
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import FileFormat

if TYPE_CHECKING:
    from penstock.ingest.supplier import SupplierSource

Record = dict[str, str]
_DIGITS = 400
_SHOWN = 200  # characters of a malformed record
_RECORDS_HINT = "set the path of the records in `source.records`, e.g. data.items"
_PIECE = 1 << 20
_LINE_LIMIT = 16 << 20


class _NumberText(str):
    """The text of a number that looks like 1.234, whose point could be a separator of thousands."""

    __slots__ = ()


def open_table(
    member: ArchiveMember, file_format: FileFormat, source: "SupplierSource", wanted: list[str] | None
) -> SourceTable:
    """Return the table of the records. Its columns are *wanted*, or all names of the first records."""
    records = _read_records(member, file_format, source)
    first = next(gather_batches(records, BATCH if wanted is None else HEAD, dict.values), [])
    present = {name: None for record in first for name in record if name != MALFORMED}
    names = list(dict.fromkeys(present if wanted is None else wanted))
    if len(names) > COLUMNS:
        message = f"the records of {member.name} have more than {COLUMNS:,} names"
        raise RunFailed(FailureCode.FILE_TOO_LARGE, message, "map the names that you need in `columns`")
    head = [[record.get(name, "") for name in names] for record in first[:HEAD]]
    # A name that no record has counts as a missing column, unless there are no records at all.
    absent = frozenset(names).difference(present) if first else frozenset()
    batches = _build_batches(chain(first, records), names)
    return SourceTable(member.category, member.number, head, batches, names=names, absent=absent, file=member.name)


def _build_batches(records: Iterator[Record], names: list[str]) -> Iterator[RowBatch]:
    row = 1
    for batch in gather_batches(records, count_batch_rows(len(names)), dict.values):
        columns = {str(n): [record.get(name, "") for record in batch] for n, name in enumerate(names)}
        numeric = {n: [cell.__class__ is _NumberText for cell in cells] for n, cells in columns.items()}
        columns[MALFORMED] = [record.get(MALFORMED, "") for record in batch]
        frame = pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))
        flags = [pl.Series(NUMERIC + n, cells) for n, cells in numeric.items() if any(cells)]
        yield RowBatch(frame.with_columns(flags), row)
        row += len(batch)


def _read_records(member: ArchiveMember, file_format: FileFormat, source: "SupplierSource") -> Iterator[Record]:
    readers = {FileFormat.JSON: _read_json, FileFormat.NDJSON: _read_ndjson, FileFormat.XML: _read_xml}
    with member.open() as content:
        yield from readers[file_format](content, member, source.records)


def _read_json(content: IO[bytes], member: ArchiveMember, records: str | None) -> Iterator[Record]:
    with _translate_parser_errors("JSON", member):
        path = json_stream.parse_path(records) if records else _find_records(member)
        for item in json_stream.iterate_items(_open_utf8(content, member), path):
            yield _format_record(item) if isinstance(item, dict) else _make_malformed(item)


def _find_records(member: ArchiveMember) -> json_stream.Path:
    with member.open() as content:
        path = json_stream.find_records(_open_utf8(content, member))
    if path is None:
        raise make_unreadable_error(member.name, "it contains no list of records", _RECORDS_HINT)
    return path


def _format_record(values: dict[str, Any]) -> Record:
    return {_replace_surrogates(name): _format_value(value) for name, value in values.items()}


def _make_malformed(item: Any) -> Record:
    return {MALFORMED: _replace_surrogates(str(item))[:_SHOWN]}


@contextmanager
def _translate_parser_errors(format_name: str, member: ArchiveMember) -> Iterator[None]:
    """Turn the errors of a parser into RunFailed FILE_UNREADABLE."""
    try:
        yield
    except json_stream.ValueTooLong as error:
        raise make_unreadable_error(member.name, str(error), _RECORDS_HINT) from error
    except (ijson.JSONError, etree.XMLSyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        raise make_unreadable_error(member.name, f"it is not valid {format_name}: {error}") from error


def _open_utf8(content: IO[bytes], member: ArchiveMember) -> IO[bytes]:
    """Return *content* in UTF-8, without a byte order mark."""
    encoding = detect_encoding(member.head)
    content.read(len(member.head) - len(strip_mark(member.head)))
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


def _read_ndjson(content: IO[bytes], member: ArchiveMember, _: str | None) -> Iterator[Record]:
    stream = _open_utf8(content, member)
    left = b""
    with _translate_parser_errors("NDJSON", member):
        while piece := stream.read(_PIECE):
            *lines, left = (left + piece).split(b"\n")
            if len(left) > _LINE_LIMIT:
                raise make_unreadable_error(member.name, f"a line is longer than {_LINE_LIMIT:,} bytes")
            yield from map(_parse_line, lines)
    if left:
        yield _parse_line(left)


def _parse_line(line: bytes) -> Record:
    """Return the record of *line*; a line that is not a JSON object becomes a bad row."""
    if not line.strip():
        return {}
    try:
        return _flatten_record(
            json.loads(line.decode(), parse_float=Decimal, parse_int=Decimal, parse_constant=_refuse_constant)
        )
    except (ValueError, ArithmeticError, RecursionError):
        return {MALFORMED: line[:_SHOWN].decode(errors="replace")}


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _flatten_record(item: Any) -> Record:
    if not isinstance(item, dict):
        return _make_malformed(item)
    record: Record = {}
    _flatten(item, "", record, 0)
    return record


def _flatten(value: Any, name: str, record: Record, depth: int) -> None:
    if isinstance(value, dict) and depth < json_stream.DEPTH:
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else key, record, depth + 1)
    elif value is not None:
        record[_replace_surrogates(name)] = _format_value(value)


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return _replace_surrogates(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        text = format(value, "f") if abs(value.adjusted()) < _DIGITS else str(value)
        return _NumberText(text) if text[-4:-3] == "." else text
    return (
        str(value)
        if isinstance(value, int)
        else _replace_surrogates(json.dumps(value, default=_format_value, ensure_ascii=False))
    )


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can escape but UTF-8 cannot encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _read_xml(content: IO[bytes], member: ArchiveMember, records: str | None) -> Iterator[Record]:
    with _translate_parser_errors("XML", member):
        for _, element in _parse_xml(content, records or _find_repeated_element(member)):
            record: Record = {}
            _collect_values(element, "", record, member)
            yield record
            _free_element(element)


def _parse_xml(
    content: IO[bytes], tag: str | None = None, events: tuple[str, ...] = ("end",)
) -> Iterator[tuple[str, Any]]:
    """Iterate over the elements, without entities, network access and huge trees: the input is not trusted."""
    return iter(
        etree.iterparse(
            content, events=events, tag=f"{{*}}{tag}" if tag else None, resolve_entities=False, no_network=True,
            load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True,
        )
    )  # fmt: skip


def _find_repeated_element(member: ArchiveMember) -> str:
    """Return the first element that occurs twice under a parent and has attributes or children."""
    seen: list[set[str]] = [set()]  # the names of the children of every open element
    with member.open() as content:
        for event, element in _parse_xml(content, events=("start", "end")):
            if event == "start":
                seen.append(set())
                continue
            has_values = bool(seen.pop() or element.attrib)
            if has_values and element.tag in seen[-1]:
                return str(etree.QName(element).localname)
            seen[-1].add(element.tag)
            _free_element(element)
    hint = "set `source.records` to the name of the element that is a record"
    raise make_unreadable_error(member.name, "no element occurs twice, so the records cannot be found", hint)


def _collect_values(element: Any, name: str, record: Record, member: ArchiveMember) -> None:
    """Add the values of *element* to *record*; of several values with the same name the first counts."""
    prefix = f"{name}." if name else ""
    for key, value in element.attrib.items():
        record.setdefault(f"{prefix}@{etree.QName(key).localname}", value)
    if element.text and element.text.strip():
        record.setdefault(name or ".", element.text)
    for inner in element:
        if not isinstance(inner.tag, str):
            raise make_unreadable_error(member.name, f"it uses the entity {inner.text}, and entities are not supported")
        _collect_values(inner, f"{prefix}{etree.QName(inner).localname}", record, member)


def _free_element(element: Any) -> None:
    """Free *element* and its earlier siblings at every level, so that memory stays bounded."""
    element.clear()
    while element is not None:
        while element.getprevious() is not None:
            del element.getparent()[0]
        element = element.getparent()
