"""A bounded look at a file: what it is, and a sample of each of its tables."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from penstock.ingest.extract import archives, delimited, detect
from penstock.ingest.extract.tables import MALFORMED, Batch, Gauge, Table, open_tables
from penstock.ingest.inspect.places import place_of_records
from penstock.ingest.supplier import WORKBOOKS, Format, Limits, Source

ROW = "\x00row"  # the number of a row in its table, from 1
FIRST = 2_000  # rows looked at from the beginning
_LATER = 200  # and of each batch behind them: what comes late may be written differently
_AT_MOST = 4_000
_LAST = 30  # rows in which totals and notes are looked for
_CHEAP = 50_000_000  # bytes of a file that is read to its end
_CHEAP_PACKED = 8_000_000


@dataclass(frozen=True)
class Sample:
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
class Read:
    """What a file is, and what is in it."""

    format: Format
    encoding: str | None
    delimiter: str | None
    records: str | None
    samples: list[Sample]


def read(path: Path) -> Read:
    """All tables of *path*, sampled; Failed when the extractor cannot read it."""
    form, encoding, delimiter, records = _known(path)
    source = Source(records=records)
    is_cheap = form in WORKBOOKS or path.stat().st_size < (_CHEAP_PACKED if _is_packed(path) else _CHEAP)
    samples = [_sampled(table, is_cheap=is_cheap) for table in open_tables(path, source, Limits())]
    return Read(form, encoding, delimiter, records, samples)


def _known(path: Path) -> tuple[Format, str | None, str | None, str | None]:
    """The format of the first file in *path*, with what else can be told of it before it is read."""
    for member in archives.members(path, Limits(), Gauge(0)):
        form = detect.detected(member)
        if form is Format.CSV:
            dialect, _ = delimited.dialect_of(member, Source())
            return form, dialect.encoding, dialect.delimiter, None
        if form in WORKBOOKS:
            return form, None, None, None
        return form, detect.encoding_of(member.head), None, place_of_records(member, form)
    return Format.AUTO, None, None, None


def _is_packed(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(2) in (b"\x1f\x8b", b"PK")


def _sampled(table: Table, *, is_cheap: bool) -> Sample:
    taken: list[pl.DataFrame] = []
    beyond: list[pl.DataFrame] = []
    last, rows, total, malformed, is_whole = pl.DataFrame(), 0, 0, 0, True
    for batch in table.batches:
        frame = _numbered(batch)
        malformed += _malformed(batch.frame)
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
    return Sample(
        table.name, table.head, names, _joined(taken), last, _joined(beyond), total, malformed, is_whole
    )  # fmt: skip


def _numbered(batch: Batch) -> pl.DataFrame:
    cells = [pl.col(name).fill_null("").str.strip_chars() for name in batch.frame.columns if name.isdigit()]
    return batch.frame.select(*cells, pl.int_range(pl.len()).add(batch.first_row).alias(ROW))


def _malformed(frame: pl.DataFrame) -> int:
    return int((frame[MALFORMED] != "").sum()) if MALFORMED in frame.columns else 0


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
