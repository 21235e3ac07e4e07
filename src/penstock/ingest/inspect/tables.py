"""The plan of the tables of a file: the tables that a single configuration can read, and their headers."""

from collections import Counter
from dataclasses import dataclass

import polars as pl

from penstock.ingest.inspect.fields import InspectedField, build_fields, build_numbered_fields
from penstock.ingest.inspect.headers import HeaderRows, find_header
from penstock.ingest.inspect.rows import SampleRows, sort_rows
from penstock.ingest.inspect.sample import ROW, SampleBuffer
from penstock.ingest.inspect.vocabulary import find_meaning
from penstock.ingest.transform.gate import normalize_name
from penstock.kernel.status import pluralize

_COMMON_SHARE = 0.5  # minimum share of the tables that have a common field
_SIMILAR_SHARE = 0.4  # minimum share of the common fields in a similar table
_MAX_WARNINGS = 40


@dataclass(frozen=True)
class ShapedTable:
    """A table with its header and its sorted rows."""

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

    def select_texts(self, column: int | None) -> pl.Series:
        """Return the cells of a column in the data rows; empty texts if the table lacks the column."""
        name = str(column)
        if name in self.rows.data.columns:
            return self.rows.data[name]
        return pl.repeat("", self.rows.data.height, dtype=pl.String, eager=True)


@dataclass(frozen=True)
class TablePlan:
    """The tables to read, their fields and the form of their headers; and the tables to skip."""

    tables: list[ShapedTable]
    skipped: list[ShapedTable]
    fields: list[InspectedField]
    header_rows: int
    has_header: bool
    warnings: list[str]


def plan_tables(samples: list[SampleBuffer]) -> TablePlan:
    """Return the plan that reads as many of the tables as possible."""
    shaped = [_shape_table(sample) for sample in samples]
    tables = [table for table in shaped if table.names]
    if not tables:
        return _plan_without_header(shaped)
    warnings = _warn_skipped([table for table in shaped if not table.names], "contains no table: it is skipped")
    similar = _select_similar(tables)
    warnings += _warn_skipped(
        _exclude(tables, similar), "has other columns than most sheets: it is skipped; read it with another supplier"
    )
    clear = _exclude(similar, _find_ambiguous(similar))
    warnings += _warn_skipped(_exclude(similar, clear), "has a column twice that other sheets have once: it is skipped")
    depth = _choose_depth(clear)
    selected = [table for table in clear if _fits_depth(table, depth)]
    warnings += _warn_skipped(
        _exclude(clear, selected),
        f"has no header of {pluralize(depth, 'row')} as the others: it is skipped; read it with another supplier",
    )
    has_numbers = all(table.sample.names is None for table in selected)
    fields, field_warnings = build_fields([table.names for table in selected], has_numbers=has_numbers)
    if not any(table.rows.data.height for table in selected):
        field_warnings.append("there are no rows below the header: types are guessed from the headers")
    return TablePlan(selected, _exclude(shaped, selected), fields, depth, True, warnings + field_warnings)


def _shape_table(sample: SampleBuffer) -> ShapedTable:
    header = None if sample.names is not None else find_header(sample.head)
    return ShapedTable(sample, header, sort_rows(sample, header))


def _find_ambiguous(tables: list[ShapedTable]) -> list[ShapedTable]:
    """Return the few tables that repeat a column which most tables have once."""
    counts = [Counter(normalize_name(name) for name in table.names if find_meaning(name).is_known) for table in tables]
    once = Counter(name for names in counts for name, count in names.items() if count == 1)
    twice = Counter(name for names in counts for name, count in names.items() if count > 1)
    return [
        table
        for table, names in zip(tables, counts, strict=True)
        if any(count > 1 and once[name] > twice[name] for name, count in names.items())
    ]


def _exclude(tables: list[ShapedTable], excluded: list[ShapedTable]) -> list[ShapedTable]:
    return [table for table in tables if not any(table is other for other in excluded)]


def _plan_without_header(shaped: list[ShapedTable]) -> TablePlan:
    """Return a plan that reads columns by their numbers."""
    filled = [table for table in shaped if table.rows.data.height]
    width = max((table.width for table in filled), default=0)
    fields = build_numbered_fields(width)
    used = [
        field for field in fields if any((table.select_texts((field.number or 1) - 1) != "").any() for table in filled)
    ]
    for field in used:
        field.columns = dict.fromkeys(range(len(filled)), (field.number or 1) - 1)
    warnings = ["no header was found: columns are read by their numbers"] if used else ["no table was found"]
    return TablePlan(filled, [table for table in shaped if not table.rows.data.height], used, 1, False, warnings)


def _choose_depth(tables: list[ShapedTable]) -> int:
    """Return the number of header rows with which the most data rows can be read."""
    depths = sorted({table.header.depth for table in tables if table.header}) or [1]
    return max(
        depths, key=lambda depth: sum(1 + table.rows.data.height for table in tables if _fits_depth(table, depth))
    )


def _fits_depth(table: ShapedTable, depth: int) -> bool:
    """Return whether the header has *depth* rows; blank rows above it count, because they do not change its names."""
    if table.header is None:
        return True
    more = depth - table.header.depth
    above = table.sample.head[max(0, table.header.above - more) : table.header.above] if more > 0 else []
    return more == 0 or (more > 0 and len(above) == more and not any(cell.strip() for row in above for cell in row))


def _select_similar(tables: list[ShapedTable]) -> list[ShapedTable]:
    """Return the tables that have enough of the common fields."""
    if len(tables) < 2:
        return tables
    fields, _ = build_fields([table.names for table in tables])
    common = [field for field in fields if len(field.columns) >= len(tables) * _COMMON_SHARE]
    shares = [sum(number in field.columns for field in common) / max(1, len(common)) for number in range(len(tables))]
    similar = [table for table, share in zip(tables, shares, strict=True) if share >= _SIMILAR_SHARE]
    return similar or [max(tables, key=lambda table: table.rows.data.height)]


def _warn_skipped(tables: list[ShapedTable], problem: str) -> list[str]:
    return [f"sheet {table.sample.name!r} {problem}" for table in tables[:_MAX_WARNINGS] if table.sample.name]
