"""§16, the Emitter: rows become facts or bad rows, a whole batch at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import polars as pl

from penstock.ingest.contract import IngestReason
from penstock.ingest.extract.tables import MALFORMED, NUMERIC, RowBatch, SourceTable
from penstock.ingest.supplier import CATEGORY, Supplier
from penstock.ingest.transform import ndjson
from penstock.ingest.transform.gate import TableHeader
from penstock.ingest.transform.values import Check, any_of, read, reading

# No column of anybody's is called that.
_ROW, _ID, _PAYLOAD, _LINE, _BAD = "\x00row", "\x00id", "\x00payload", "\x00line", "\x00bad"
_RAW_LIMIT = 200
ROWS, CELLS = 32_768, 1 << 18  # judged together: what is made of them is held at once


@dataclass(frozen=True)
class EmittedRows:
    """What became of some rows. *index* has a row per fact; *held* one per bad row whose key is known."""

    facts: pl.Series
    bad: pl.Series
    index: pl.DataFrame
    held: pl.DataFrame
    reasons: dict[str, int]
    blank: int
    skipped: int


@dataclass(frozen=True)
class PreparedTable:
    """Rows that are judged together, and how many of their batch are not."""

    frame: pl.DataFrame
    blank: int = 0
    skipped: int = 0


class RecordEmitter:
    """Turns the batches of one table into lines of facts.ndjson and bad.ndjson."""

    def __init__(self, run_id: str, name: str, supplier: Supplier, header: TableHeader, table: SourceTable) -> None:
        self._supplier = supplier
        self._header = header
        self._table = table
        self._above: dict[str, tuple[Any, ...]] = {}
        self._start = ndjson.format_line_start(run_id, name, table.name)
        self._cells = list(dict.fromkeys(_column(field.index) for field in header.fields))
        self._readings = {
            one.name: reading(
                place,
                one.column,
                _column(one.index),
                is_required=one.column.required or one.name in supplier.key,
            )
            for place, one in enumerate(header.fields)
        }
        # By their places: to the library a column called * is all of them, and ^a$ a pattern.
        self._places = {name: f"={place}" for place, name in enumerate(self._readings)}
        self._values = [one.value.alias(self._places[name]) for name, one in self._readings.items()]
        # RFC 8785 sorts by UTF-16 code units.
        names = sorted(self._readings, key=lambda name: name.encode("utf-16-be"))
        fields = [pl.col(self._places[name]).alias(name) for name in names]
        self._payload = pl.struct(fields).struct.json_encode().alias(_PAYLOAD)
        key = [
            pl.lit(table.name) if name == CATEGORY else pl.col(self._places[name]).cast(pl.String).fill_null("")
            for name in supplier.key
        ]
        self._hashes = ndjson.hash_expressions(key, pl.col(_ID))

    def prepare(self, batch: RowBatch) -> Iterator[PreparedTable]:
        """The rows of *batch* that count; batches are prepared in their order."""
        lost = [pl.lit("").alias(name) for name in self._cells if name not in batch.frame.columns]
        frame = batch.frame.with_columns(pl.int_range(pl.len()).alias(_ROW) + batch.first_row, *lost)
        frame = frame.slice(max(0, self._header.rows + 1 - batch.first_row))
        kept = self._without_skipped(frame)
        rows = self._without_blank(kept)
        filled = self._filled_down(rows)
        together = max(1, min(ROWS, CELLS // len(self._readings)))
        yield PreparedTable(filled.head(together), blank=kept.height - rows.height, skipped=frame.height - kept.height)
        for begun in range(together, filled.height, together):
            yield PreparedTable(filled.slice(begun, together))

    def emit(self, prepared: PreparedTable) -> EmittedRows:
        """Judge every row; any number of batches may be judged at once."""
        torn = self._torn(prepared.frame)
        frame = read(prepared.frame, list(self._readings.values()))
        is_bad = any_of([check for check, _ in torn] + [one.is_bad for one in self._readings.values()])
        judged = frame.select(_ROW, *self._values, is_bad.alias(_BAD))
        facts = self._facts(judged.filter(~pl.col(_BAD)))
        bad = frame.filter(judged[_BAD])
        told = self._told(bad, torn)
        return EmittedRows(
            facts=facts[_LINE],
            bad=ndjson.build_bad_lines(self._start, told),
            index=facts.drop(_LINE),
            held=self._held(bad),
            reasons=dict(told["reason_code"].value_counts().iter_rows()),
            blank=prepared.blank,
            skipped=prepared.skipped,
        )

    def _torn(self, frame: pl.DataFrame) -> list[Check]:
        """What can be wrong with a row as such."""
        checks: list[Check] = []
        if MALFORMED in frame.columns:
            checks.append((pl.col(MALFORMED) != "", IngestReason.RECORD_MALFORMED))
        beyond = [name for name in frame.columns if name.isdigit() and int(name) >= self._header.width]
        if self._table.is_delimited and beyond:
            checks.append((any_of([~_is_blank(name) for name in beyond]), IngestReason.ROW_TOO_LONG))
        return checks

    def _without_skipped(self, frame: pl.DataFrame) -> pl.DataFrame:
        patterns = self._supplier.source.skip_rows
        if not patterns:
            return frame
        cells = [pl.col(name).str.strip_chars() for name in frame.columns if name.isdigit()]
        first = pl.coalesce([pl.when(cell != "").then(cell) for cell in cells])
        matches = pl.any_horizontal([first.str.contains(pattern) for pattern in patterns])
        return frame.filter(~matches.fill_null(value=False))

    def _without_blank(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Without rows that have nothing in any cell we read; a torn one has something, if we cannot read it."""
        # Few rows are blank, and one cell is enough to know which ones may be.
        if not frame.select(_is_blank(self._cells[0])).to_series().any():
            return frame
        is_blank = pl.all_horizontal([_is_blank(name) for name in self._cells])
        return frame.filter(~is_blank | any_of([check for check, _ in self._torn(frame)]))

    def _filled_down(self, frame: pl.DataFrame) -> pl.DataFrame:
        filled = {_column(bound.index) for bound in self._header.fields if bound.column.fill_down}
        for name in sorted(filled):
            cell = pl.col(name).str.strip_chars()
            told = {name: cell, **({} if self._table.is_delimited else {NUMERIC + name: _figures(frame, name)})}
            above = self._above.get(name, ("", False))
            below = [
                pl.when(cell != "").then(one).forward_fill().fill_null(last).alias(known)
                for (known, one), last in zip(told.items(), above, strict=False)
            ]
            frame = frame.with_columns(below)
            self._above[name] = frame.select(list(told)).row(-1) if frame.height else above
        return frame

    def _facts(self, good: pl.DataFrame) -> pl.DataFrame:
        """The lines of facts, and what the index has of them."""
        payload = good.select(self._payload).to_series()
        row_id = pl.Series(_ID, [sha256(text).hexdigest() for text in payload.cast(pl.Binary).to_list()], pl.String)
        line = ndjson.build_fact_lines(self._start, pl.col(_ID), pl.col(_ROW), pl.col(_PAYLOAD))
        return good.with_columns(payload, row_id).select(line.alias(_LINE), *self._hashes)

    def _held(self, bad: pl.DataFrame) -> pl.DataFrame:
        """I20: the keys of bad rows, as far as they have one."""
        wanted = bad if self._supplier.on_bad_row == "hold_last" else bad.clear()
        values = wanted.select(pl.lit("").alias(_ID), *self._values)
        key = [self._places[name] for name in self._supplier.key if name != CATEGORY]
        return (values.drop_nulls(key) if key else values).select(self._hashes)

    def _told(self, bad: pl.DataFrame, torn: list[Check]) -> pl.DataFrame:
        """I9: each bad row with the first thing that is wrong; for who wants to know, where, and what stood there."""
        readings = self._readings.items()
        reasons = [*torn, *(check for _, one in readings for check in one.checks)]
        reason = _first([(holds, pl.lit(reason.value)) for holds, reason in reasons])
        told = [pl.col(_ROW).alias("row_number"), reason.alias("reason_code")]
        if self._supplier.keep_raw:
            nowhere = (any_of([check for check, _ in torn]), pl.lit(None, pl.String))
            column = _first([nowhere, *((one.is_bad, pl.lit(name)) for name, one in readings)])
            cell = _first([nowhere, *((one.is_bad, one.cell.str.slice(0, _RAW_LIMIT)) for _, one in readings)])
            told += [column.alias("column"), cell.alias("raw_value")]
        return bad.select(told)


def _first(choices: list[tuple[pl.Expr, pl.Expr]]) -> pl.Expr:
    """What belongs to the first condition that holds."""
    found = pl.lit(None, pl.String)
    for holds, then in reversed(choices):
        found = pl.when(holds).then(then).otherwise(found)
    return found


def _figures(frame: pl.DataFrame, name: str) -> pl.Expr:
    """Which cells were numbers in the file."""
    return pl.col(NUMERIC + name) if NUMERIC + name in frame.columns else pl.lit(value=False)


def _is_blank(name: str) -> pl.Expr:
    return pl.col(name).str.strip_chars() == ""


def _column(index: int | None) -> str:
    return "none" if index is None else str(index)
