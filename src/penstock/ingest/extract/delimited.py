"""Delimited text: a columnar reader parses well-formed pieces; from the first stray quote, rows are parsed singly."""

import codecs
import csv
import io
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Literal, NamedTuple

import polars as pl

from penstock.ingest.contract import FailureCode
from penstock.ingest.extract.archives import ArchiveMember, make_unreadable_error
from penstock.ingest.extract.detect import detect_encoding, read_mark_encoding, strip_mark
from penstock.ingest.extract.tables import BATCH, CELLS, COLUMNS, HEAD, RowBatch, SourceTable, gather_batches
from penstock.ingest.model import RunFailed

if TYPE_CHECKING:
    from penstock.ingest.supplier import SupplierSource

PIECE = 2 << 20
_RECORD_LIMIT = 16 << 20
_FIELD_LIMIT = 1 << 20
_DELIMITERS = (";", "\t", ",", "|")
_SAMPLE_ROWS = 50
_MARK = 3  # bytes of the longest byte order mark
_RETURN = "\ue00d"  # replaces a carriage return inside a line, which the row reader does not support


class Dialect(NamedTuple):
    """The encoding, delimiter and quote of a text."""

    encoding: str
    delimiter: str
    quote: str
    is_mac: bool = False  # lines end with carriage returns


def open_table(member: ArchiveMember, source: "SupplierSource") -> SourceTable:
    """Return the table of a delimited text."""
    dialect, text = detect_dialect(member, source)
    head = list(islice(_parse_csv(_split_lines(text), dialect), HEAD + 1))
    # The last row of an incomplete head may be cut.
    head = head if len(head) == 1 or member.is_head_complete else head[:-1]
    width = max((len(row) for row in head), default=1)
    if width > COLUMNS:
        message = f"{member.name} has more than {COLUMNS:,} columns with the delimiter {dialect.delimiter!r}"
        raise RunFailed(FailureCode.FILE_TOO_LARGE, message, "set the right delimiter in `source.delimiter`")
    batches = _read_batches(member, dialect, width)
    return SourceTable(member.category, member.number, head[:HEAD], batches, is_delimited=True, file=member.name)


def detect_dialect(member: ArchiveMember, source: "SupplierSource") -> tuple[Dialect, str]:
    """Return the configured dialect, or the dialect of the head of the text; and the decoded head."""
    encoding = _choose_encoding(member, source)
    # Bytes that cannot be decoded are reported when the whole text is read.
    text = strip_mark(member.head).decode(encoding, errors="replace")
    is_mac = "\n" not in text and "\r" in text.rstrip("\r")
    text = text.replace("\r", "\n") if is_mac else text
    delimiter = _detect_delimiter(text, source.quote) if source.delimiter == "auto" else source.delimiter
    return Dialect(encoding, delimiter, source.quote, is_mac), text


def _choose_encoding(member: ArchiveMember, source: "SupplierSource") -> str:
    """Return the encoding of the byte order mark if there is one, else the configured or the detected encoding."""
    if (marked := read_mark_encoding(member.head)) is not None:
        return marked
    if source.encoding == "auto":
        return detect_encoding(member.head, is_all=member.is_head_complete)
    return "utf-16-le" if source.encoding == "utf-16" else source.encoding


def _detect_delimiter(text: str, quote: str) -> str:
    """Return the delimiter that splits the most rows into the same number of cells, at least two."""
    lines = list(_split_lines(text))
    sample = lines[:-1] if len(lines) > 1 else lines

    def score(delimiter: str) -> float:
        rows = islice(_parse_csv(iter(sample), Dialect("", delimiter, quote)), _SAMPLE_ROWS)
        widths = [len(row) for row in rows if any(row)]
        usual = max(set(widths), key=lambda width: (widths.count(width), width), default=1)
        return widths.count(usual) / len(widths) * (usual - 1) ** 0.5 if widths else 0.0

    best = max(_DELIMITERS, key=score)
    return best if score(best) > 0 else ","


def _read_batches(member: ArchiveMember, dialect: Dialect, width: int) -> Iterator[RowBatch]:
    with member.open() as content:
        pieces = _split_pieces(_decode(content, dialect, member.name), dialect, width)
        row = 1
        for piece, is_well_formed in pieces:
            if not is_well_formed:
                # Stray quotes hide the ends of records from the columnar reader, so the rest is parsed row by row.
                yield from _parse_rows(piece, (rest for rest, _ in pieces), dialect, width, row, member.name)
                return
            frame = _parse_columns(piece, dialect, _count_reachable_columns(piece, dialect, width), member.name)
            if frame.height:  # the piece may contain only a second byte order mark
                yield RowBatch(frame, row)
            row += frame.height


def _decode(content: IO[bytes], dialect: Dialect, name: str) -> Iterator[bytes]:
    """Yield the text in UTF-8, without a byte order mark, with line feeds as line ends."""
    encoding = dialect.encoding
    decoder = codecs.getincrementaldecoder(encoding)() if encoding != "utf-8" else None
    raw = content.read(max(PIECE, _MARK))
    piece = strip_mark(raw)
    while True:
        try:
            text = decoder.decode(piece, final=not raw).encode() if decoder else piece
        except UnicodeDecodeError as error:
            raise _make_encoding_error(name, encoding, error.reason) from error
        if text or not raw:
            yield text.replace(b"\r", b"\n") if dialect.is_mac else text
        if not raw:
            return
        piece = raw = content.read(PIECE)


def _split_pieces(texts: Iterator[bytes], dialect: Dialect, width: int) -> Iterator[tuple[bytes, bool]]:
    """Yield pieces of complete records, and whether the quotes in each are well-formed."""
    rest = b""
    for text in texts:
        rest += text
        cut = _find_record_end(rest, dialect.quote) if text else len(rest)
        if cut:
            piece, rest = rest[:cut], rest[cut:]
            yield from ((part, _is_well_formed(part, dialect)) for part in _split_piece(piece, dialect, width))
        elif len(rest) > _RECORD_LIMIT:
            yield rest, False
            rest = b""


def _split_piece(piece: bytes, dialect: Dialect, width: int) -> Iterator[bytes]:
    """Yield complete records of *piece*: all together, or in halves if they have too many cells."""
    lines = piece.count(b"\n") + 1
    if lines * (width + 1) <= CELLS or lines * (_count_reachable_columns(piece, dialect, width) + 1) <= CELLS:
        yield piece
        return
    middle = _find_middle(piece, dialect.quote)
    if middle == len(piece):  # the piece is a single record
        yield piece
        return
    yield from _split_piece(piece[:middle], dialect, width)
    yield from _split_piece(piece[middle:], dialect, width)


def _count_reachable_columns(piece: bytes, dialect: Dialect, width: int) -> int:
    """Return the highest possible number of columns, up to *width*, of the rows of *piece*."""
    return min(width, piece.count(dialect.delimiter.encode()) + 1)


def _find_middle(piece: bytes, quote: str) -> int:
    """Return the end of the record that ends nearest to the middle of *piece*, if possible before it."""
    half = len(piece) // 2
    if cut := _find_record_end(piece[:half], quote):
        return cut
    start, quotes = 0, 0
    while start < len(piece):
        end = piece.find(b"\n", max(start, half)) + 1 or len(piece)
        quotes += piece.count(quote.encode(), start, end) if quote else 0
        if quotes % 2 == 0:
            return end
        start = end
    return len(piece)


def _find_record_end(text: bytes, quote: str) -> int:
    """Return the index after the last line end outside quotes."""
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
    """Return whether every quote starts or ends a cell, or is doubled inside a cell."""
    if not dialect.quote:
        return True
    between = piece.split(dialect.quote.encode())
    if len(between) % 2 == 0:
        return False
    # The text outside quotes is empty, between the halves of a doubled quote, or whole cells.
    behind, before = (dialect.delimiter.encode(), b"\n", b"\r", b""), (dialect.delimiter.encode(), b"\n", b"")
    outside = between[::2]
    return all(text[:1] in behind for text in outside[1:]) and all(text[-1:] in before for text in outside[:-1])


def _parse_columns(piece: bytes, dialect: Dialect, width: int, name: str) -> pl.DataFrame:
    try:
        return pl.read_csv(
            io.BytesIO(piece),
            has_header=False,
            separator=dialect.delimiter,
            quote_char=dialect.quote or None,
            schema=_make_schema(width),
            extra_columns="ignore",
            missing_columns="insert",
            empty_string_is_null=False,
            infer_schema=False,
        )
    except pl.exceptions.PolarsError as error:
        hint = f"if its encoding is not {dialect.encoding}, set `source.encoding`"
        raise make_unreadable_error(name, str(error), hint) from error


def _parse_rows(
    piece: bytes, rest: Iterator[bytes], dialect: Dialect, width: int, first_row: int, name: str
) -> Iterator[RowBatch]:
    rows = _check_rows(_read_lines(chain([piece], rest), name), dialect)
    # A single cell beyond *width* is enough to report that the row is too long.
    cut = (row[: width + 1] for row in _number_errors(rows, first_row, name))
    for batch in gather_batches(cut, BATCH, list):
        for frame in _build_frames(batch):
            yield RowBatch(frame, first_row)
            first_row += frame.height


def _number_errors(rows: Iterator[list[str]], row: int, name: str) -> Iterator[list[str]]:
    """Yield *rows*, the first of which has the number *row*; an error names the number of its row."""
    try:
        for cells in rows:
            row += 1
            yield cells
    except csv.Error as error:
        hint = "if quotes have no meaning in this file, set `source.quote` to ''"
        raise make_unreadable_error(name, f"row {row}: {error}", hint) from error


def _check_rows(lines: Iterator[str], dialect: Dialect) -> Iterator[list[str]]:
    """Yield rows; csv.Error if a stray quote joins several lines, because these rows would be lost silently."""
    taken_lines: list[str] = []

    def take_lines() -> Iterator[str]:
        length = 0
        for line in lines:
            length = len(line) + (length if taken_lines else 0)
            if length > _RECORD_LIMIT:
                raise csv.Error(f"the record has more than {_RECORD_LIMIT:,} characters")
            taken_lines.append(line)
            yield line

    for row in _parse_csv(take_lines(), dialect):
        if len(taken_lines) > 1:
            deque(_parse_csv(iter(taken_lines), dialect, is_strict=True), maxlen=0)
        taken_lines.clear()
        yield row


def _read_lines(pieces: Iterator[bytes], name: str) -> Iterator[str]:
    left = b""
    for piece in pieces:
        *lines, left = (left + piece).split(b"\n")
        if len(left) > _RECORD_LIMIT + PIECE:
            raise make_unreadable_error(name, f"a line is longer than {_RECORD_LIMIT:,} bytes")
        yield from (_decode_line(line, name) + "\n" for line in lines)
    if left:
        yield _decode_line(left, name)


def _decode_line(line: bytes, name: str) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _make_encoding_error(name, "utf-8", error.reason) from error


def _make_encoding_error(name: str, encoding: str, reason: str) -> RunFailed:
    hint = "set the encoding of the file in `source.encoding`, or ask the supplier to send the file again"
    return make_unreadable_error(name, f"it is not {encoding}: {reason}", hint)


def _parse_csv(lines: Iterator[str], dialect: Dialect, *, is_strict: bool = False) -> Iterator[list[str]]:
    csv.field_size_limit(_FIELD_LIMIT)
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if dialect.quote else csv.QUOTE_NONE
    plain = (_protect_returns(line) if "\r" in line else line for line in lines)
    reader = csv.reader(
        plain, delimiter=dialect.delimiter, quotechar=dialect.quote or None, quoting=quoting, strict=is_strict
    )
    for row in reader:
        yield [cell.replace(_RETURN, "\r") for cell in row]


def _split_lines(text: str) -> Iterator[str]:
    """Split *text* at line feeds only; str.splitlines also splits at other characters."""
    return iter(io.StringIO(text, newline="\n"))


def _protect_returns(line: str) -> str:
    """Replace each carriage return of *line*, except at its end."""
    end = 2 if line.endswith("\r\n") else 1 if line.endswith(("\n", "\r")) else 0
    text = line[: len(line) - end]
    return text.replace("\r", _RETURN) + line[len(text) :]


def _build_frames(rows: list[list[str]]) -> Iterator[pl.DataFrame]:
    """Yield a frame of all *rows*, or several frames if it would have too many cells."""
    widest = max(1, *(len(row) for row in rows))
    if len(rows) > 1 and len(rows) * widest > CELLS:
        middle = len(rows) // 2
        yield from _build_frames(rows[:middle])
        yield from _build_frames(rows[middle:])
        return
    padded = [row + [""] * (widest - len(row)) for row in rows]
    yield pl.DataFrame(padded, schema=_make_schema(widest - 1), orient="row")


def _make_schema(width: int) -> dict[str, type[pl.String]]:
    return {str(number): pl.String for number in range(width + 1)}
