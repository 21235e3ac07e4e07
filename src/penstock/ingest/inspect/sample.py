"""A bounded look at a file: its format, the place of its records in JSON or XML, and a sample of each of its tables."""

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
FIRST = 2_000  # rows looked at from the beginning
_LATER = 200  # and of each batch behind them: what comes late may be written differently
_AT_MOST = 4_000
_LAST = 30  # rows in which totals and notes are looked for
_CHEAP = 50_000_000  # bytes of a file that is read to its end
_CHEAP_PACKED = 8_000_000
_EVENTS = 1_000_000
_OBJECTS = 200_000
_ITEM = "item"  # what ijson calls what is in a list


def place_of_records(member: ArchiveMember, form: FileFormat) -> str | None:
    """What `source.records` should be; None when the extractor finds it by itself, or says that it cannot."""
    if form is FileFormat.JSON and detect_encoding(member.head) == "utf-8":
        return _in_json(member)
    return _in_xml(member) if form is FileFormat.XML else None


def _in_json(member: ArchiveMember) -> str | None:
    """The list of objects, not itself in a list, that has the most of them."""
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


def _in_xml(member: ArchiveMember) -> str | None:
    """The element with the most attributes and children in all, if it comes more than once."""
    seen: Counter[str] = Counter()
    held: Counter[str] = Counter()
    with member.open() as content:
        # As the extractor does: what comes from outside is data, never a program.
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
                    held[tag] += len(element.attrib) + len(element)
                    _forget_before(element)
        except etree.XMLSyntaxError:
            return None
    return max((tag for tag in seen if seen[tag] > 1 and held[tag]), key=lambda tag: held[tag], default=None)


def _forget_before(element: "etree._Element") -> None:
    """Empty what was read before *element*: its parent still has to be able to count it."""
    before = element.getprevious()
    if before is not None and len(before):
        before.clear()


@dataclass(frozen=True)
class SampleBuffer:
    """Some rows of a table. *beyond* has hashes of what is behind the first rows, of columns that may be unique."""

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
    """What a file is, and what is in it."""

    format: FileFormat
    encoding: str | None
    delimiter: str | None
    records: str | None
    samples: list[SampleBuffer]


def read(path: Path) -> FileSample:
    """All tables of *path*, sampled; Failed when the extractor cannot read it."""
    form, encoding, delimiter, records = _known(path)
    source = SupplierSource(records=records)
    is_cheap = form in WORKBOOKS or path.stat().st_size < (_CHEAP_PACKED if _is_packed(path) else _CHEAP)
    samples = [_sampled(table, is_cheap=is_cheap) for table in open_tables(path, source, SupplierLimits())]
    return FileSample(form, encoding, delimiter, records, samples)


def _known(path: Path) -> tuple[FileFormat, str | None, str | None, str | None]:
    """The format of the first file in *path*, with what else can be told of it before it is read."""
    for member in archives.open_members(path, SupplierLimits(), ReadProgress(0)):
        form = detect.detect_format(member)
        if form is FileFormat.CSV:
            dialect, _ = delimited.detect_dialect(member, SupplierSource())
            return form, dialect.encoding, dialect.delimiter, None
        if form in WORKBOOKS:
            return form, None, None, None
        return form, detect.detect_encoding(member.head), None, place_of_records(member, form)
    return FileFormat.AUTO, None, None, None


def _is_packed(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(2) in (b"\x1f\x8b", b"PK")


def _sampled(table: SourceTable, *, is_cheap: bool) -> SampleBuffer:
    taken: list[pl.DataFrame] = []
    beyond: list[pl.DataFrame] = []
    last, rows, total, malformed, is_whole = pl.DataFrame(), 0, 0, 0, True
    for batch in table.batches:
        cells = [pl.col(name).fill_null("").str.strip_chars() for name in batch.frame.columns if name.isdigit()]
        frame = batch.frame.select(*cells, pl.int_range(pl.len()).add(batch.first_row).alias(ROW))
        if MALFORMED in batch.frame.columns:
            malformed += int((batch.frame[MALFORMED] != "").sum())
        start = frame.head(max(0, FIRST - total))
        later = frame.tail(frame.height - start.height)
        taken += [start, _thinned(later, _AT_MOST - rows - start.height)]
        rows += start.height + taken[-1].height
        beyond.append(_hashed(later, taken[0]))
        last = pl.concat([last, frame], how="diagonal").tail(_LAST) if last.width else frame.tail(_LAST)
        total += frame.height
        if not is_cheap and rows >= FIRST:
            is_whole = False
            break
    names = None if table.names is None else ["" if name == MALFORMED else name for name in table.names]
    return SampleBuffer(
        table.name, table.head, names, _joined(taken), last, _joined(beyond), total, malformed, is_whole
    )  # fmt: skip


def _thinned(frame: pl.DataFrame, room: int) -> pl.DataFrame:
    if room <= 0 or frame.is_empty():
        return frame.clear()
    return frame.gather_every(max(1, frame.height // _LATER)).head(room)


def _hashed(later: pl.DataFrame, first: pl.DataFrame) -> pl.DataFrame:
    """Hashes of the cells of columns in which the first rows hardly repeat anything; null where nothing is."""
    names = [name for name in later.columns if name != ROW and name in first.columns and _is_various(first[name])]
    return later.select(pl.when(pl.col(name) != "").then(pl.col(name).hash()).alias(name) for name in names)


def _is_various(cells: pl.Series) -> bool:
    filled = cells.filter(cells != "")
    return len(filled) > len(cells) // 2 and filled.n_unique() >= len(filled) * 0.9


def _joined(frames: list[pl.DataFrame]) -> pl.DataFrame:
    kept = [frame for frame in frames if frame.height]
    return pl.concat(kept, how="diagonal") if kept else frames[0] if frames else pl.DataFrame()
