"""Delimited text: well-formed pieces by a columnar reader, the rest of a file with stray quotes row by row."""

import codecs
import csv
import io
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, NamedTuple

import polars as pl

from penstock.ingest.extract import BATCH, HEAD, Batch, Table
from penstock.ingest.extract.detect import encoding_of, without_mark
from penstock.ingest.extract.packing import Member, unreadable

if TYPE_CHECKING:
    from penstock.ingest.supplier import Source

PIECE = 2 << 20
_RECORD_LIMIT = 16 << 20
_FIELD_LIMIT = 1 << 20
_DELIMITERS = (";", "\t", ",", "|")
_SAMPLE_ROWS = 50


class Dialect(NamedTuple):
    """How a text is cut into cells."""

    encoding: str
    delimiter: str
    quote: str


def table(member: Member, source: "Source") -> Table:
    """The one table a delimited text is."""
    dialect, text = dialect_of(member, source)
    head = list(_rows(iter(text.splitlines(keepends=True)), dialect, HEAD + 1))
    # The last row of a beginning may be cut.
    head = head[:-1] if len(head) > 1 and len(member.head) >= 1 << 16 else head
    name = "" if member.is_alone else member.name
    width = max((len(row) for row in head), default=1)
    return Table(name, member.number, head[:HEAD], _batches(member, dialect, width), is_delimited=True)


def dialect_of(member: Member, source: "Source") -> tuple[Dialect, str]:
    """What is configured, else what the beginning of the text looks like; and that beginning."""
    encoding = (
        encoding_of(member.head, is_all=len(member.head) < 1 << 16) if source.encoding == "auto" else source.encoding
    )
    if encoding == "utf-16":
        encoding = encoding_of(member.head) if member.head[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-16-le"
    # What cannot be read is told when it is reached; here it only must not be in the way.
    text = _lines_as_usual(without_mark(member.head).decode(encoding, errors="replace"))
    delimiter = _delimiter(text, source.quote) if source.delimiter == "auto" else source.delimiter
    return Dialect(encoding, delimiter, source.quote), text


def _delimiter(text: str, quote: str) -> str:
    """The one that cuts the most rows into the same number of cells, more than one."""
    lines = text.splitlines(keepends=True)
    sample = lines[:-1] if len(lines) > 1 else lines

    def score(delimiter: str) -> float:
        widths = [len(row) for row in _rows(iter(sample), Dialect("", delimiter, quote), _SAMPLE_ROWS) if any(row)]
        usual = max(set(widths), key=lambda width: (widths.count(width), width), default=1)
        return widths.count(usual) / len(widths) * (usual - 1) ** 0.5 if widths else 0.0

    best = max(_DELIMITERS, key=score)
    return best if score(best) > 0 else ","


def _batches(member: Member, dialect: Dialect, width: int) -> Iterator[Batch]:
    with member.open() as content:
        pieces = _pieces(_decoded(content, dialect.encoding, member.name), dialect)
        row = 1
        for piece, is_well_formed in pieces:
            if not is_well_formed:
                # From here on row by row: where a record ends cannot be told from quotes that mean nothing.
                yield from _by_rows(piece, (rest for rest, _ in pieces), dialect, width, row, member.name)
                return
            frame = _by_columns(piece, dialect, width, member.name)
            yield Batch(frame, row)
            row += frame.height


def _decoded(content: IO[bytes], encoding: str, name: str) -> Iterator[bytes]:
    """The text in UTF-8, without a byte order mark, lines ended by a line feed."""
    decoder = codecs.getincrementaldecoder(encoding)() if encoding != "utf-8" else None
    is_first = True
    while True:
        piece = content.read(PIECE)
        raw = without_mark(piece) if is_first else piece
        try:
            text = decoder.decode(raw, final=not piece).encode() if decoder else raw
        except UnicodeDecodeError as error:
            raise unreadable(name, f"it is not {encoding}: {error.reason}; set source.encoding") from error
        if is_first:
            is_mac = b"\n" not in text and b"\r" in text
            is_first = False
        yield text.replace(b"\r", b"\n") if is_mac else text
        if not piece:
            return


def _pieces(texts: Iterator[bytes], dialect: Dialect) -> Iterator[tuple[bytes, bool]]:
    """Whole records at a time, and whether the quotes in them are well-formed."""
    rest = b""
    for text in texts:
        rest += text
        cut = _cut(rest, dialect.quote) if text else len(rest)
        if cut:
            yield rest[:cut], _is_well_formed(rest[:cut], dialect)
            rest = rest[cut:]
        elif len(rest) > _RECORD_LIMIT:
            yield rest, False
            rest = b""


def _cut(text: bytes, quote: str) -> int:
    """Just behind the last line end that is not within quotes."""
    cut = text.rfind(b"\n") + 1
    if not quote:
        return cut
    mark = quote.encode()
    quotes = text.count(mark, 0, cut)
    while quotes % 2:
        before = text.rfind(b"\n", 0, cut - 1) + 1
        quotes -= text.count(mark, before, cut)
        cut = before
    return cut


def _is_well_formed(piece: bytes, dialect: Dialect) -> bool:
    """Whether every quote opens or ends a cell, or is doubled within one."""
    if not dialect.quote:
        return True
    between = piece.split(dialect.quote.encode())
    if len(between) % 2 == 0:
        return False
    # What is outside of quotes is nothing, between two halves of a doubled one, or whole cells.
    behind, before = (dialect.delimiter.encode(), b"\n", b"\r", b""), (dialect.delimiter.encode(), b"\n", b"")
    outside = between[::2]
    return all(text[:1] in behind for text in outside[1:]) and all(text[-1:] in before for text in outside[:-1])


def _by_columns(piece: bytes, dialect: Dialect, width: int, name: str) -> pl.DataFrame:
    if not piece.strip(b"\n\r"):
        return _frame([[""]] * piece.count(b"\n"), width)
    try:
        return pl.read_csv(
            io.BytesIO(piece),
            has_header=False,
            separator=dialect.delimiter,
            quote_char=dialect.quote or None,
            schema=_schema(width),
            extra_columns="ignore",
            missing_columns="insert",
            empty_string_is_null=False,
            infer_schema=False,
        )
    except pl.exceptions.PolarsError as error:
        raise unreadable(name, f"{error}; if it is not {dialect.encoding}, set source.encoding") from error


def _by_rows(
    piece: bytes, rest: Iterator[bytes], dialect: Dialect, width: int, first_row: int, name: str
) -> Iterator[Batch]:
    rows = _rows(_lines([piece], rest, name), dialect)
    while True:
        try:
            batch = [row for row, _ in zip(rows, range(BATCH), strict=False)]
        except csv.Error as error:
            raise unreadable(name, f"{error}, after row {first_row}") from error
        if not batch:
            return
        yield Batch(_frame(batch, width), first_row)
        first_row += len(batch)


def _lines(begun: list[bytes], rest: Iterator[bytes], name: str) -> Iterator[str]:
    left = b""
    for piece in (*begun, b""):
        for text in [piece] if piece else rest:
            *lines, left = (left + text).split(b"\n")
            yield from (_text(line, name) + "\n" for line in lines)
    if left:
        yield _text(left, name)


def _text(line: bytes, name: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise unreadable(name, f"it is not utf-8: {error.reason}; set source.encoding") from error


def _rows(lines: Iterator[str], dialect: Dialect, limit: int | None = None) -> Iterator[list[str]]:
    csv.field_size_limit(_FIELD_LIMIT)
    if dialect.quote:
        reader = csv.reader(lines, delimiter=dialect.delimiter, quotechar=dialect.quote)
    else:
        reader = csv.reader(lines, delimiter=dialect.delimiter, quoting=csv.QUOTE_NONE)
    for number, row in enumerate(reader, start=1):
        if limit is not None and number > limit:
            return
        yield row


def _frame(rows: list[list[str]], width: int) -> pl.DataFrame:
    """Cells beyond the one behind *width* are not kept: that one tells that the row is too long."""
    padded = [(row + [""] * (width + 1 - len(row)))[: width + 1] for row in rows]
    return pl.DataFrame(padded, schema=_schema(width), orient="row")


def _schema(width: int) -> dict[str, type[pl.String]]:
    return {str(number): pl.String for number in range(width + 1)}


def _lines_as_usual(text: str) -> str:
    return text.replace("\r", "\n") if "\n" not in text else text
