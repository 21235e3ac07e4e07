"""Which of a file's tables can be read with one configuration, and how their headers are found."""

from collections import Counter
from dataclasses import dataclass

import polars as pl

from penstock.ingest.inspect.fields import InspectedField, fields_of, numbered_fields
from penstock.ingest.inspect.headers import HeaderRows, header_of
from penstock.ingest.inspect.rows import SampleRows, sorted_rows
from penstock.ingest.inspect.sample import ROW, SampleBuffer
from penstock.ingest.inspect.vocabulary import meaning_of
from penstock.ingest.transform.gate import normalize_name

_COMMON = 0.5  # of tables that have a field, for it to be one all should have
_ALIKE = 0.4  # of such fields, for a table to be one of them
_MOST_SKIPPED = 40


@dataclass(frozen=True)
class ShapedTable:
    """A table with its header and its rows told apart."""

    sample: SampleBuffer
    header: HeaderRows | None
    rows: SampleRows

    @property
    def names(self) -> list[str]:
        if self.sample.names is not None:
            return self.sample.names
        return self.header.names if self.header else []

    @property
    def width(self) -> int:
        return len(self.sample.rows.columns) - (ROW in self.sample.rows.columns)

    def texts(self, column: int | None) -> pl.Series:
        """The cells of a column, in rows that are data; empty where there is no such column."""
        name = str(column)
        if name in self.rows.data.columns:
            return self.rows.data[name]
        return pl.repeat("", self.rows.data.height, dtype=pl.String, eager=True)


@dataclass(frozen=True)
class TablePlan:
    """The tables that are read and their fields; those that are skipped; how headers are found."""

    tables: list[ShapedTable]
    skipped: list[ShapedTable]
    fields: list[InspectedField]
    header_rows: int
    has_header: bool
    warnings: list[str]


def planned(samples: list[SampleBuffer]) -> TablePlan:
    """One way to read as many of the tables as possible."""
    shaped = [_shaped(sample) for sample in samples]
    tables = [one for one in shaped if one.names]
    if not tables:
        return _without_header(shaped)
    warnings = _skipped_told([one for one in shaped if not one.names], "has no table and is skipped")
    alike = _alike(tables)
    warnings += _skipped_told(_but(tables, alike), "has hardly any column of the others and is skipped")
    clear = _but(alike, _ambiguous(alike))
    warnings += _skipped_told(_but(alike, clear), "has a column twice that others have once and is skipped")
    depth = _depth(clear)
    kept = [one for one in clear if _fits(one, depth)]
    warnings += _skipped_told(
        _but(clear, kept), f"has no header of {depth} rows as others have and is skipped: it needs its own supplier"
    )
    has_numbers = all(one.sample.names is None for one in kept)
    fields, told = fields_of([one.names for one in kept], has_numbers=has_numbers)
    if not any(one.rows.data.height for one in kept):
        told.append("there are no rows below the header: types are guessed by names")
    return TablePlan(kept, _but(shaped, kept), fields, depth, True, warnings + told)


def _shaped(sample: SampleBuffer) -> ShapedTable:
    header = None if sample.names is not None else header_of(sample.head)
    return ShapedTable(sample, header, sorted_rows(sample, header))


def _ambiguous(tables: list[ShapedTable]) -> list[ShapedTable]:
    """The few tables that have a column twice, when it is one that matters to all."""
    counts = [Counter(normalize_name(name) for name in table.names if meaning_of(name).is_known) for table in tables]
    once = Counter(name for found in counts for name, count in found.items() if count == 1)
    twice = Counter(name for found in counts for name, count in found.items() if count > 1)
    return [
        one
        for one, found in zip(tables, counts, strict=True)
        if any(count > 1 and once[name] > twice[name] for name, count in found.items())
    ]


def _but(tables: list[ShapedTable], kept: list[ShapedTable]) -> list[ShapedTable]:
    return [table for table in tables if not any(table is other for other in kept)]


def _without_header(shaped: list[ShapedTable]) -> TablePlan:
    """Columns by their numbers, when no table says what they are."""
    filled = [one for one in shaped if one.rows.data.height]
    width = max((one.width for one in filled), default=0)
    fields = numbered_fields(width)
    used = [field for field in fields if any((table.texts((field.number or 1) - 1) != "").any() for table in filled)]
    for one in used:
        one.columns = dict.fromkeys(range(len(filled)), (one.number or 1) - 1)
    warnings = ["no table was found"] if not used else ["no header was found: columns are known by their numbers"]
    return TablePlan(filled, [one for one in shaped if not one.rows.data.height], used, 1, False, warnings)


def _depth(tables: list[ShapedTable]) -> int:
    """The number of header rows with which the most rows can be read."""
    depths = sorted({table.header.depth for table in tables if table.header}) or [1]
    return max(depths, key=lambda depth: sum(1 + table.rows.data.height for table in tables if _fits(table, depth)))


def _fits(table: ShapedTable, depth: int) -> bool:
    """Blank rows above a header may be taken for its first ones: they add nothing to its names."""
    if table.header is None:
        return True
    more = depth - table.header.depth
    above = table.sample.head[max(0, table.header.above - more) : table.header.above] if more > 0 else []
    return more == 0 or (more > 0 and len(above) == more and not any(cell.strip() for row in above for cell in row))


def _alike(tables: list[ShapedTable]) -> list[ShapedTable]:
    """The tables that have some of the fields most of them have."""
    if len(tables) < 2:
        return tables
    fields, _ = fields_of([one.names for one in tables])
    common = [field for field in fields if len(field.columns) >= len(tables) * _COMMON]
    shares = [sum(table in one.columns for one in common) / max(1, len(common)) for table in range(len(tables))]
    kept = [one for one, share in zip(tables, shares, strict=True) if share >= _ALIKE]
    return kept or [max(tables, key=lambda one: one.rows.data.height)]


def _skipped_told(tables: list[ShapedTable], why: str) -> list[str]:
    return [f"sheet {table.sample.name!r} {why}" for table in tables[:_MOST_SKIPPED] if table.sample.name]
