"""Delimited text: well-formed pieces by a columnar reader, the rest of a file with stray quotes row by row."""

import codecs
import csv
import io
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

import polars as pl

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.archives import ArchiveMember, unreadable
from penstock.ingest.extract.detect import encoding_of, marked_encoding, without_mark
from penstock.ingest.extract.tables import BATCH, CELLS, COLUMNS, HEAD, RowBatch, SourceTable, gathered
from penstock.ingest.model import RunFailed

if TYPE_CHECKING:
    from penstock.ingest.supplier import SupplierSource

PIECE = 2 << 20
_RECORD_LIMIT = 16 << 20
_FIELD_LIMIT = 1 << 20
_DELIMITERS = (";", "\t", ",", "|")
_SAMPLE_ROWS = 50
_MARK = 3  # bytes of the longest byte order mark
_RETURN = "\ue00d"  # stands for a carriage return that ends no line, of which the row reader knows nothing


class Dialect(NamedTuple):
    """How a text is cut into cells."""

    encoding: str
    delimiter: str
    quote: str
    is_mac: bool = False  # lines are ended by carriage returns


def table(member: ArchiveMember, source: "SupplierSource") -> SourceTable:
    """The one table a delimited text is."""
    dialect, text = dialect_of(member, source)
    head = list(islice(_rows(_split(text), dialect), HEAD + 1))
    # The last row of a beginning may be cut.
    head = head if len(head) == 1 or member.is_all_in_head else head[:-1]
    width = max((len(row) for row in head), default=1)
    if width > COLUMNS:
        said = f"{member.name} has more than {COLUMNS} columns"
        raise RunFailed(
            FailureCode.FILE_TOO_LARGE, said, f"is {dialect.delimiter!r} what delimits it? source.delimiter"
        )
    batches = _batches(member, dialect, width)
    return SourceTable(member.category, member.number, head[:HEAD], batches, is_delimited=True, file=member.name)


def dialect_of(member: ArchiveMember, source: "SupplierSource") -> tuple[Dialect, str]:
    """What is configured, else what the beginning of the text looks like; and that beginning."""
    encoding = _encoding(member, source)
    # What cannot be read is told when it is reached; here it only must not be in the way.
    text = without_mark(member.head).decode(encoding, errors="replace")
    is_mac = "\n" not in text and "\r" in text.rstrip("\r")
    text = text.replace("\r", "\n") if is_mac else text
    delimiter = _delimiter(text, source.quote) if source.delimiter == "auto" else source.delimiter
    return Dialect(encoding, delimiter, source.quote, is_mac), text


def _encoding(member: ArchiveMember, source: "SupplierSource") -> str:
    """A byte order mark is never there by chance, whatever is configured."""
    if (marked := marked_encoding(member.head)) is not None:
        return marked
    if source.encoding == "auto":
        return encoding_of(member.head, is_all=member.is_all_in_head)
    return "utf-16-le" if source.encoding == "utf-16" else source.encoding


def _delimiter(text: str, quote: str) -> str:
    """The one that cuts the most rows into the same number of cells, more than one."""
    lines = list(_split(text))
    sample = lines[:-1] if len(lines) > 1 else lines

    def score(delimiter: str) -> float:
        rows = islice(_rows(iter(sample), Dialect("", delimiter, quote)), _SAMPLE_ROWS)
        widths = [len(row) for row in rows if any(row)]
        usual = max(set(widths), key=lambda width: (widths.count(width), width), default=1)
        return widths.count(usual) / len(widths) * (usual - 1) ** 0.5 if widths else 0.0

    best = max(_DELIMITERS, key=score)
    return best if score(best) > 0 else ","


def _batches(member: ArchiveMember, dialect: Dialect, width: int) -> Iterator[RowBatch]:
    with member.open() as content:
        pieces = _pieces(_decoded(content, dialect, member.name), dialect, width)
        row = 1
        for piece, is_well_formed in pieces:
            if not is_well_formed:
                # From here on row by row: where a record ends cannot be told from quotes that mean nothing.
                yield from _by_rows(piece, (rest for rest, _ in pieces), dialect, width, row, member.name)
                return
            frame = _by_columns(piece, dialect, _reached(piece, dialect, width), member.name)
            if frame.height:  # a second byte order mark may be all there is
                yield RowBatch(frame, row)
            row += frame.height


def _decoded(content: IO[bytes], dialect: Dialect, name: str) -> Iterator[bytes]:
    """The text in UTF-8, without a byte order mark, lines ended by a line feed."""
    encoding = dialect.encoding
    decoder = codecs.getincrementaldecoder(encoding)() if encoding != "utf-8" else None
    begun = content.read(max(PIECE, _MARK))
    piece = without_mark(begun)
    while True:
        try:
            text = decoder.decode(piece, final=not begun).encode() if decoder else piece
        except UnicodeDecodeError as error:
            raise unreadable(name, f"it is not {encoding}: {error.reason}; set source.encoding") from error
        if text or not begun:
            yield text.replace(b"\r", b"\n") if dialect.is_mac else text
        if not begun:
            return
        piece = begun = content.read(PIECE)


def _pieces(texts: Iterator[bytes], dialect: Dialect, width: int) -> Iterator[tuple[bytes, bool]]:
    """Whole records at a time, and whether the quotes in them are well-formed."""
    rest = b""
    for text in texts:
        rest += text
        cut = _cut(rest, dialect.quote) if text else len(rest)
        if cut:
            piece, rest = rest[:cut], rest[cut:]
            yield from ((part, _is_well_formed(part, dialect)) for part in _parts(piece, dialect, width))
        elif len(rest) > _RECORD_LIMIT:
            yield rest, False
            rest = b""


def _parts(piece: bytes, dialect: Dialect, width: int) -> Iterator[bytes]:
    """Whole records of *piece*: all of them, or when these would be too many cells, those of either half."""
    lines = piece.count(b"\n") + 1
    if lines * (width + 1) <= CELLS or lines * (_reached(piece, dialect, width) + 1) <= CELLS:
        yield piece
        return
    middle = _middle(piece, dialect.quote)
    if middle == len(piece):  # it is one record
        yield piece
        return
    yield from _parts(piece[:middle], dialect, width)
    yield from _parts(piece[middle:], dialect, width)


def _reached(piece: bytes, dialect: Dialect, width: int) -> int:
    """How many of *width* columns the rows of *piece* can have."""
    return min(width, piece.count(dialect.delimiter.encode()) + 1)


def _middle(piece: bytes, quote: str) -> int:
    """Behind the record that ends next to the middle of *piece*, before it if there is one."""
    half = len(piece) // 2
    if cut := _cut(piece[:half], quote):
        return cut
    begun, quotes = 0, 0
    while begun < len(piece):
        end = piece.find(b"\n", max(begun, half)) + 1 or len(piece)
        quotes += piece.count(quote.encode(), begun, end) if quote else 0
        if quotes % 2 == 0:
            return end
        begun = end
    return len(piece)


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
) -> Iterator[RowBatch]:
    rows = _whole_rows(_lines(chain([piece], rest), name), dialect)
    # Cells beyond the one behind *width* are not kept: that one tells that the row is too long.
    kept = (row[: width + 1] for row in _told(rows, first_row, name))
    for batch in gathered(kept, BATCH, list):
        for frame in _frames(batch):
            yield RowBatch(frame, first_row)
            first_row += frame.height


def _told(rows: Iterator[list[str]], row: int, name: str) -> Iterator[list[str]]:
    """*rows*, the first of which is number *row*; what is wrong with one is said with its number."""
    try:
        for cells in rows:
            row += 1
            yield cells
    except csv.Error as error:
        said = f"{error} in row {row}; if quotes mean nothing in it, set source.quote to ''"
        raise unreadable(name, said) from error


def _whole_rows(lines: Iterator[str], dialect: Dialect) -> Iterator[list[str]]:
    """A stray quote may be any text, but it must not make one row of several: those would be lost without a word."""
    taken: list[str] = []

    def noted() -> Iterator[str]:
        length = 0
        for line in lines:
            length = len(line) + (length if taken else 0)
            if length > _RECORD_LIMIT:
                raise csv.Error(f"more than {_RECORD_LIMIT} characters")
            taken.append(line)
            yield line

    for row in _rows(noted(), dialect):
        if len(taken) > 1:
            deque(_rows(iter(taken), dialect, is_strict=True), maxlen=0)
        taken.clear()
        yield row


def _lines(pieces: Iterator[bytes], name: str) -> Iterator[str]:
    left = b""
    for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        if len(left) > _RECORD_LIMIT + PIECE:
            raise unreadable(name, f"a line is over {_RECORD_LIMIT} bytes")
        yield from (_text(line, name) + "\n" for line in lines)
    if left:
        yield _text(left, name)


def _text(line: bytes, name: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise unreadable(name, f"it is not utf-8: {error.reason}; set source.encoding") from error


def _rows(lines: Iterator[str], dialect: Dialect, *, is_strict: bool = False) -> Iterator[list[str]]:
    csv.field_size_limit(_FIELD_LIMIT)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE
    plain = (_without_returns(line) if "\r" in line else line for line in lines)
    reader = csv.reader(
        plain, delimiter=dialect.delimiter, quotechar=dialect.quote or None, quoting=quoting, strict=is_strict
    )
    for row in reader:
        yield [cell.replace(_RETURN, "\r") for cell in row]


def _split(text: str) -> Iterator[str]:
    """By line feeds only: there are other characters Python would cut at."""
    return iter(io.StringIO(text, newline="\n"))


def _without_returns(line: str) -> str:
    """Where it ends the line, a carriage return stays one."""
    end = 2 if line.endswith("\r\n") else 1 if line.endswith(("\n", "\r")) else 0
    text = line[: len(line) - end]
    return text.replace("\r", _RETURN) + line[len(text) :]


def _frames(rows: list[list[str]]) -> Iterator[pl.DataFrame]:
    """One of them all, or when it would have too many cells, some of either half."""
    widest = max(1, *(len(row) for row in rows))
    if len(rows) > 1 and len(rows) * widest > CELLS:
        middle = len(rows) // 2
        yield from _frames(rows[:middle])
        yield from _frames(rows[middle:])
        return
    padded = [row + [""] * (widest - len(row)) for row in rows]
    yield pl.DataFrame(padded, schema=_schema(widest - 1), orient="row")


def _schema(width: int) -> dict[str, type[pl.String]]:
    return {str(number): pl.String for number in range(width + 1)}
