"""A bounded sample of a file: its format, the path of its records in JSON or XML, and rows of each of its tables."""

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import ijson  # type: ignore[import-untyped]
import polars as pl
from lxml import etree

from penstock.ingest.extract import archives, delimited, detect, json_stream
from penstock.ingest.extract.archives import ArchiveMember
from penstock.ingest.extract.detect import detect_encoding, strip_mark
from penstock.ingest.extract.files import open_tables
from penstock.ingest.extract.tables import MALFORMED, ReadProgress, SourceTable
from penstock.ingest.supplier import WORKBOOKS, FileFormat, SupplierLimits, SupplierSource

ROW = "\x00row"  # the number of a row in its table, from 1
FIRST = 2_000  # rows from the start of a table
_LATER = 200  # and from each later batch, because later rows may have other formats
_MAX_ROWS = 4_000
_LAST = 30  # rows at the end, which are searched for totals and notes
_CHEAP = 50_000_000  # bytes; a smaller file is read completely
_CHEAP_PACKED = 8_000_000
_EVENTS = 1_000_000
_OBJECTS = 200_000
_ITEM = "item"  # the name of list items in ijson


def find_records(member: ArchiveMember, file_format: FileFormat) -> str | None:
    """Return the value of `source.records`; None if the extractor finds the records without it, or reports an error."""
    if file_format is FileFormat.JSON and detect_encoding(member.head) == "utf-8":
        return _find_in_json(member)
    return _find_in_xml(member) if file_format is FileFormat.XML else None


def _find_in_json(member: ArchiveMember) -> str | None:
    """Return the path of the longest list of objects that is not inside another list."""
    counts: Counter[str] = Counter()
    with member.open() as content:
        content.read(len(member.head) - len(strip_mark(member.head)))
        try:
            for path in islice(json_stream.iterate_objects(content), _OBJECTS):
                if path.count(_ITEM) == 1 and path[-1] == _ITEM:
                    counts[".".join(path)] += 1
        except (ijson.JSONError, ValueError):
            return None
    best = max(counts, key=lambda prefix: counts[prefix], default=_ITEM)
    return None if best == _ITEM else best.removesuffix(f".{_ITEM}")


def _find_in_xml(member: ArchiveMember) -> str | None:
    """Return the repeated element with the most attributes and children in total."""
    seen: Counter[str] = Counter()
    values: Counter[str] = Counter()
    with member.open() as content:
        # The input is not trusted: no entities, no network access, no huge trees.
        walk = etree.iterparse(
            content, events=("end",), resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False,
            remove_comments=True, remove_pis=True,
        )  # fmt: skip
        try:
            for _, element in islice(walk, _EVENTS):
                tag = str(etree.QName(element).localname)
                parent = element.getparent()
                if parent is not None:
                    seen[tag] += 1
                    values[tag] += len(element.attrib) + len(element)
                    _free_before(element)
        except etree.XMLSyntaxError:
            return None
    return max((tag for tag in seen if seen[tag] > 1 and values[tag]), key=lambda tag: values[tag], default=None)


def _free_before(element: "etree._Element") -> None:
    """Free the element before *element*, without removing it from the children that its parent counts."""
    before = element.getprevious()
    if before is not None and len(before):
        before.clear()


@dataclass(frozen=True)
class SampleBuffer:
    """Rows of a table. *beyond* has hashes of the rows after the first, for the columns that may be unique."""

    name: str
    head: list[list[str]]
    names: list[str] | None
    rows: pl.DataFrame
    last: pl.DataFrame
    beyond: pl.DataFrame
    total: int
    malformed: int
    is_whole: bool


@dataclass(frozen=True)
class FileSample:
    """The format of a file, and the samples of its tables."""

    format: FileFormat
    encoding: str | None
    delimiter: str | None
    records: str | None
    samples: list[SampleBuffer]


def read_sample(path: Path) -> FileSample:
    """Return samples of all tables of *path*; RunFailed if the file cannot be read."""
    file_format, encoding, delimiter, records = _detect_file(path)
    source = SupplierSource(records=records)
    is_cheap = file_format in WORKBOOKS or path.stat().st_size < (_CHEAP_PACKED if _is_packed(path) else _CHEAP)
    samples = [_sample_table(table, is_cheap=is_cheap) for table in open_tables(path, source, SupplierLimits())]
    return FileSample(file_format, encoding, delimiter, records, samples)


def _detect_file(path: Path) -> tuple[FileFormat, str | None, str | None, str | None]:
    """Return the format, encoding, delimiter and records of the first file in *path*."""
    for member in archives.open_members(path, SupplierLimits(), ReadProgress(0)):
        file_format = detect.detect_format(member)
        if file_format is FileFormat.CSV:
            dialect, _ = delimited.detect_dialect(member, SupplierSource())
            return file_format, dialect.encoding, dialect.delimiter, None
        if file_format in WORKBOOKS:
            return file_format, None, None, None
        return file_format, detect.detect_encoding(member.head), None, find_records(member, file_format)
    return FileFormat.AUTO, None, None, None


def _is_packed(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(2) in (b"\x1f\x8b", b"PK")


def _sample_table(table: SourceTable, *, is_cheap: bool) -> SampleBuffer:
    sampled: list[pl.DataFrame] = []
    beyond: list[pl.DataFrame] = []
    last, rows, total, malformed, is_whole = pl.DataFrame(), 0, 0, 0, True
    for batch in table.batches:
        cells = [pl.col(name).fill_null("").str.strip_chars() for name in batch.frame.columns if name.isdigit()]
        frame = batch.frame.select(*cells, pl.int_range(pl.len()).add(batch.first_row).alias(ROW))
        if MALFORMED in batch.frame.columns:
            malformed += int((batch.frame[MALFORMED] != "").sum())
        start = frame.head(max(0, FIRST - total))
        later = frame.tail(frame.height - start.height)
        sampled += [start, _thin_out(later, _MAX_ROWS - rows - start.height)]
        rows += start.height + sampled[-1].height
        beyond.append(_hash_candidates(later, sampled[0]))
        last = pl.concat([last, frame], how="diagonal").tail(_LAST) if last.width else frame.tail(_LAST)
        total += frame.height
        if not is_cheap and rows >= FIRST:
            is_whole = False
            break
    names = None if table.names is None else ["" if name == MALFORMED else name for name in table.names]
    return SampleBuffer(
        table.name, table.head, names, _join_frames(sampled), last, _join_frames(beyond), total, malformed, is_whole
    )  # fmt: skip


def _thin_out(frame: pl.DataFrame, limit: int) -> pl.DataFrame:
    if limit <= 0 or frame.is_empty():
        return frame.clear()
    return frame.gather_every(max(1, frame.height // _LATER)).head(limit)


def _hash_candidates(later: pl.DataFrame, first: pl.DataFrame) -> pl.DataFrame:
    """Return the hashes of the cells of the columns that may be unique by the first rows; null for empty cells."""
    names = [name for name in later.columns if name != ROW and name in first.columns and _is_various(first[name])]
    return later.select(pl.when(pl.col(name) != "").then(pl.col(name).hash()).alias(name) for name in names)


def _is_various(cells: pl.Series) -> bool:
    filled = cells.filter(cells != "")
    return len(filled) > len(cells) // 2 and filled.n_unique() >= len(filled) * 0.9


def _join_frames(frames: list[pl.DataFrame]) -> pl.DataFrame:
    filled = [frame for frame in frames if frame.height]
    return pl.concat(filled, how="diagonal") if filled else frames[0] if frames else pl.DataFrame()
