"""§16, the Emitter: turns rows into facts or bad rows, a batch at a time."""

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
from penstock.ingest.transform.values import Check, combine_checks, plan_value, read_values

# Names that no column of a file can have.
_ROW, _ID, _PAYLOAD, _LINE, _BAD = "\x00row", "\x00id", "\x00payload", "\x00line", "\x00bad"
_RAW_LIMIT = 200
ROWS, CELLS = 32_768, 1 << 18  # limits of the rows that are validated together, and so are in memory together


@dataclass(frozen=True)
class EmittedRows:
    """The results for a batch of rows. *index* has a row for each fact, *held* for each bad row with a known key."""

    facts: pl.Series
    bad: pl.Series
    index: pl.DataFrame
    held: pl.DataFrame
    reasons: dict[str, int]
    blank: int
    skipped: int


@dataclass(frozen=True)
class PreparedTable:
    """The rows that are validated together, and the number of blank and of skipped rows of their batch."""

    frame: pl.DataFrame
    blank: int = 0
    skipped: int = 0


class RecordEmitter:
    """Converter of the batches of a table into lines of facts.ndjson and bad.ndjson."""

    def __init__(self, run_id: str, name: str, supplier: Supplier, header: TableHeader, table: SourceTable) -> None:
        self._supplier = supplier
        self._header = header
        self._table = table
        self._above: dict[str, tuple[Any, ...]] = {}
        self._start = ndjson.format_line_start(run_id, name, table.name)
        self._cells = list(dict.fromkeys(_name_column(field.index) for field in header.fields))
        self._plans = {
            field.name: plan_value(
                position,
                field.column,
                _name_column(field.index),
                is_required=field.column.required or field.name in supplier.key,
            )
            for position, field in enumerate(header.fields)
        }
        # Columns are named by their position, because polars expands the names * and ^a$.
        self._names = {name: f"={position}" for position, name in enumerate(self._plans)}
        self._values = [plan.value.alias(self._names[name]) for name, plan in self._plans.items()]
        # RFC 8785 sorts by UTF-16 code units.
        names = sorted(self._plans, key=lambda name: name.encode("utf-16-be"))
        fields = [pl.col(self._names[name]).alias(name) for name in names]
        self._payload = pl.struct(fields).struct.json_encode().alias(_PAYLOAD)
        key = [
            pl.lit(table.name) if name == CATEGORY else pl.col(self._names[name]).cast(pl.String).fill_null("")
            for name in supplier.key
        ]
        self._hashes = ndjson.hash_expressions(key, pl.col(_ID))

    def prepare(self, batch: RowBatch) -> Iterator[PreparedTable]:
        """Yield the rows of *batch* that are validated; batches must be prepared in their order."""
        missing = [pl.lit("").alias(name) for name in self._cells if name not in batch.frame.columns]
        frame = batch.frame.with_columns(pl.int_range(pl.len()).alias(_ROW) + batch.first_row, *missing)
        frame = frame.slice(max(0, self._header.rows + 1 - batch.first_row))
        wanted = self._drop_skipped(frame)
        rows = self._drop_blank(wanted)
        filled = self._fill_down(rows)
        together = max(1, min(ROWS, CELLS // len(self._plans)))
        yield PreparedTable(
            filled.head(together), blank=wanted.height - rows.height, skipped=frame.height - wanted.height
        )
        for start in range(together, filled.height, together):
            yield PreparedTable(filled.slice(start, together))

    def emit(self, prepared: PreparedTable) -> EmittedRows:
        """Validate every row; several threads may validate batches at the same time."""
        row_checks = self._check_rows(prepared.frame)
        frame = read_values(prepared.frame, list(self._plans.values()))
        is_bad = combine_checks([check for check, _ in row_checks] + [plan.is_bad for plan in self._plans.values()])
        validated = frame.select(_ROW, *self._values, is_bad.alias(_BAD))
        facts = self._build_facts(validated.filter(~pl.col(_BAD)))
        bad = frame.filter(validated[_BAD])
        bad_rows = self._build_bad_rows(bad, row_checks)
        return EmittedRows(
            facts=facts[_LINE],
            bad=ndjson.build_bad_lines(self._start, bad_rows),
            index=facts.drop(_LINE),
            held=self._hash_held(bad),
            reasons=dict(bad_rows["reason_code"].value_counts().iter_rows()),
            blank=prepared.blank,
            skipped=prepared.skipped,
        )

    def _check_rows(self, frame: pl.DataFrame) -> list[Check]:
        """Return the checks of whole rows."""
        checks: list[Check] = []
        if MALFORMED in frame.columns:
            checks.append((pl.col(MALFORMED) != "", IngestReason.RECORD_MALFORMED))
        beyond = [name for name in frame.columns if name.isdigit() and int(name) >= self._header.width]
        if self._table.is_delimited and beyond:
            checks.append((combine_checks([~_is_blank(name) for name in beyond]), IngestReason.ROW_TOO_LONG))
        return checks

    def _drop_skipped(self, frame: pl.DataFrame) -> pl.DataFrame:
        patterns = self._supplier.source.skip_rows
        if not patterns:
            return frame
        cells = [pl.col(name).str.strip_chars() for name in frame.columns if name.isdigit()]
        first = pl.coalesce([pl.when(cell != "").then(cell) for cell in cells])
        matches = pl.any_horizontal([first.str.contains(pattern) for pattern in patterns])
        return frame.filter(~matches.fill_null(value=False))

    def _drop_blank(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return *frame* without the rows in which all mapped cells are blank; damaged rows are not blank."""
        # Few rows are blank, and the first cell is enough to rule out most of them.
        if not frame.select(_is_blank(self._cells[0])).to_series().any():
            return frame
        is_blank = pl.all_horizontal([_is_blank(name) for name in self._cells])
        return frame.filter(~is_blank | combine_checks([check for check, _ in self._check_rows(frame)]))

    def _fill_down(self, frame: pl.DataFrame) -> pl.DataFrame:
        filled = {_name_column(bound.index) for bound in self._header.fields if bound.column.fill_down}
        for name in sorted(filled):
            cell = pl.col(name).str.strip_chars()
            columns = {
                name: cell,
                **({} if self._table.is_delimited else {NUMERIC + name: _make_numeric_flags(frame, name)}),
            }
            above = self._above.get(name, ("", False))
            below = [
                pl.when(cell != "").then(value).forward_fill().fill_null(last).alias(target)
                for (target, value), last in zip(columns.items(), above, strict=False)
            ]
            frame = frame.with_columns(below)
            self._above[name] = frame.select(list(columns)).row(-1) if frame.height else above
        return frame

    def _build_facts(self, good: pl.DataFrame) -> pl.DataFrame:
        """Return the lines of facts, and their rows in the index."""
        payload = good.select(self._payload).to_series()
        row_id = pl.Series(_ID, [sha256(text).hexdigest() for text in payload.cast(pl.Binary).to_list()], pl.String)
        line = ndjson.build_fact_lines(self._start, pl.col(_ID), pl.col(_ROW), pl.col(_PAYLOAD))
        return good.with_columns(payload, row_id).select(line.alias(_LINE), *self._hashes)

    def _hash_held(self, bad: pl.DataFrame) -> pl.DataFrame:
        """I20: return the hashed keys of the bad rows that have a key."""
        wanted = bad if self._supplier.on_bad_row == "hold_last" else bad.clear()
        values = wanted.select(pl.lit("").alias(_ID), *self._values)
        key = [self._names[name] for name in self._supplier.key if name != CATEGORY]
        return (values.drop_nulls(key) if key else values).select(self._hashes)

    def _build_bad_rows(self, bad: pl.DataFrame, row_checks: list[Check]) -> pl.DataFrame:
        """I9: return each bad row with its first reason and the column; with `keep_raw` also the text of the cell."""
        plans = self._plans.items()
        reasons = [*row_checks, *(check for _, plan in plans for check in plan.checks)]
        reason = _choose_first([(check, pl.lit(reason.value)) for check, reason in reasons])
        whole_row = (combine_checks([check for check, _ in row_checks]), pl.lit(None, pl.String))
        column = _choose_first([whole_row, *((plan.is_bad, pl.lit(name)) for name, plan in plans)])
        columns = [pl.col(_ROW).alias("row_number"), reason.alias("reason_code"), column.alias("column")]
        if self._supplier.keep_raw:
            raw_values = ((plan.is_bad, plan.cell.str.slice(0, _RAW_LIMIT)) for _, plan in plans)
            columns.append(_choose_first([whole_row, *raw_values]).alias("raw_value"))
        return bad.select(columns)


def _choose_first(choices: list[tuple[pl.Expr, pl.Expr]]) -> pl.Expr:
    """Return the value of the first condition that is true."""
    result = pl.lit(None, pl.String)
    for condition, value in reversed(choices):
        result = pl.when(condition).then(value).otherwise(result)
    return result


def _make_numeric_flags(frame: pl.DataFrame, name: str) -> pl.Expr:
    """Return the flags of the cells that are numbers in the file."""
    return pl.col(NUMERIC + name) if NUMERIC + name in frame.columns else pl.lit(value=False)


def _is_blank(name: str) -> pl.Expr:
    return pl.col(name).str.strip_chars() == ""


def _name_column(index: int | None) -> str:
    return "none" if index is None else str(index)
