"""§16, the Emitter: rows become facts or bad rows, a whole batch at a time."""

from dataclasses import dataclass
from hashlib import sha256

import polars as pl

from penstock.ingest import lines
from penstock.ingest.contract import Reason
from penstock.ingest.extract import MALFORMED, Batch, Table
from penstock.ingest.facts import text_of
from penstock.ingest.header import Bound, Header
from penstock.ingest.supplier import CATEGORY, Supplier
from penstock.ingest.values import Checks, Typed, any_of, nothing, same, typed

_ROW = "\x00row"  # no column of anybody's is called that
_RAW_LIMIT = 200


@dataclass(frozen=True)
class Emitted:
    """What became of a batch. *index* has a row per fact; *held* one per bad row whose key is known."""

    facts: bytes
    bad: bytes
    good: int
    index: pl.DataFrame
    held: pl.DataFrame
    reasons: dict[str, int]
    blank: int
    skipped: int


@dataclass(frozen=True)
class Prepared:
    """The rows of a batch that are judged, and how many are not."""

    frame: pl.DataFrame
    skipped: int


class Emitter:
    """Turns the batches of one table into lines of facts.ndjson and bad.ndjson."""

    def __init__(self, run_id: str, name: str, supplier: Supplier, header: Header, table: Table) -> None:
        self._supplier = supplier
        self._header = header
        self._table = table
        self._above: dict[str, str] = {}
        # RFC 8785 sorts by UTF-16 code units.
        self._payload = sorted((bound.name for bound in header.fields), key=lambda name: name.encode("utf-16-be"))
        self._start = lines.start_of(run_id, name, table.name)

    def prepare(self, batch: Batch) -> Prepared:
        """The rows of *batch* that count; batches are prepared in their order."""
        frame = batch.frame.with_columns(pl.int_range(pl.len()).alias(_ROW) + batch.first_row)
        frame = frame.slice(max(0, self._header.rows + 1 - batch.first_row))
        kept = self._without_skipped(frame)
        return Prepared(self._filled_down(kept), frame.height - kept.height)

    def emit(self, prepared: Prepared) -> Emitted:
        """Judge every row; any number of batches may be judged at once."""
        frame = prepared.frame
        judged = _Judged(frame, self._header.fields, self._torn(frame), self._supplier.key)
        good = judged.good()
        facts, index = self._facts(good)
        bad, reasons = self._bad(judged)
        held = self._held(judged)
        return Emitted(facts, bad, good.height, index, held, reasons, judged.blank, prepared.skipped)

    def _torn(self, frame: pl.DataFrame) -> Checks:
        """What can be wrong with a row as such."""
        checks: Checks = []
        if MALFORMED in frame.columns:
            checks.append((frame[MALFORMED] != "", Reason.RECORD_MALFORMED))
        beyond = [name for name in frame.columns if name.isdigit() and int(name) >= self._header.width]
        if self._table.is_delimited and beyond:
            checks.append((any_of([frame[name].str.strip_chars() != "" for name in beyond]), Reason.ROW_TOO_LONG))
        return checks

    def _without_skipped(self, frame: pl.DataFrame) -> pl.DataFrame:
        patterns = self._supplier.source.skip_rows
        if not patterns:
            return frame
        cells = [pl.col(name).str.strip_chars() for name in frame.columns if name.isdigit()]
        first = pl.coalesce([pl.when(cell != "").then(cell) for cell in cells])
        matches = pl.any_horizontal([first.str.contains(pattern) for pattern in patterns])
        return frame.filter(~matches.fill_null(value=False))

    def _filled_down(self, frame: pl.DataFrame) -> pl.DataFrame:
        filled = {_column(bound.index) for bound in self._header.fields if bound.column.fill_down}
        for name in sorted(filled & set(frame.columns)):
            cell = pl.col(name).str.strip_chars()
            below = pl.when(cell != "").then(cell).forward_fill().fill_null(self._above.get(name, ""))
            frame = frame.with_columns(below.alias(name))
            self._above[name] = frame[name][-1] if frame.height else self._above.get(name, "")
        return frame

    def _facts(self, good: pl.DataFrame) -> tuple[bytes, pl.DataFrame]:
        payload = good.select(pl.struct(self._payload).struct.json_encode().alias("payload"))["payload"]
        row_id = pl.Series(
            "row_id", [sha256(text).hexdigest() for text in payload.cast(pl.Binary).to_list()], pl.String
        )
        text = text_of(lines.fact_lines(self._start, row_id, good[_ROW], payload))
        return text, self._keys(good.with_columns(row_id))

    def _keys(self, rows: pl.DataFrame) -> pl.DataFrame:
        parts = [
            pl.lit(self._table.name) if name == CATEGORY else pl.col(name).cast(pl.String).fill_null("")
            for name in self._supplier.key
        ]
        return lines.hashed(rows.select(lines.key_text(self._supplier, parts).alias("key"), "row_id"))

    def _held(self, judged: "_Judged") -> pl.DataFrame:
        """I20: the keys of bad rows, as far as they have one."""
        bad = judged.bad() if self._supplier.on_bad_row == "hold_last" else judged.bad().clear()
        known = bad.drop_nulls([name for name in self._supplier.key if name != CATEGORY] or None)
        return self._keys(known.with_columns(pl.lit("").alias("row_id")))

    def _bad(self, judged: "_Judged") -> tuple[bytes, dict[str, int]]:
        told = judged.told(keeps_raw=self._supplier.keep_raw)
        if told.is_empty():
            return b"", {}
        return text_of(lines.bad_lines(self._start, told)), dict(told["reason_code"].value_counts().iter_rows())


class _Judged:
    """The values of some rows, and which of them are good, bad, or hold nothing."""

    def __init__(self, frame: pl.DataFrame, fields: list[Bound], torn: Checks, key: list[str]) -> None:
        self._rows = frame[_ROW]
        self._torn = Typed(self._rows, torn)
        empty = same("", frame.height)
        columns = {one.name: _column(one.index) for one in fields}
        self._cells = {name: frame[column] if column in frame.columns else empty for name, column in columns.items()}
        self._typed = {
            one.name: typed(one.column, self._cells[one.name], is_required=one.column.required or one.name in key)
            for one in fields
        }
        wrong = [mask for one in (self._torn, *self._typed.values()) if (mask := one.is_bad) is not None]
        bad = any_of(wrong) if wrong else pl.repeat(False, frame.height, dtype=pl.Boolean, eager=True)
        blank = self._is_blank(frame.height)
        self.blank = int(blank.sum())
        self._wrong = (bad & ~blank).arg_true()
        self._is_good = ~(bad | blank)

    def good(self) -> pl.DataFrame:
        values = pl.DataFrame([self._rows, *(one.value.alias(name) for name, one in self._typed.items())])
        return values if self._is_good.all() else values.filter(self._is_good)

    def bad(self) -> pl.DataFrame:
        return pl.DataFrame([one.value.gather(self._wrong).alias(name) for name, one in self._typed.items()])

    def told(self, *, keeps_raw: bool) -> pl.DataFrame:
        """I9: each bad row with the first thing that is wrong; for who wants to know, where, and what stood there."""
        rows = self._wrong
        if not len(rows):
            return pl.DataFrame()
        reason, column, raw = nothing(len(rows)), nothing(len(rows)), nothing(len(rows))
        wrong = {name: one for name, one in self._typed.items() if one.is_bad is not None}
        for name, one in reversed(wrong.items()):
            found = one.reason(rows)
            is_here = found.is_not_null()
            reason = found.zip_with(is_here, reason)
            column = same(name, len(rows)).zip_with(is_here, column)
            raw = self._cells[name].gather(rows).str.slice(0, _RAW_LIMIT).zip_with(is_here, raw)
        torn = self._torn.reason(rows)
        is_torn, none = torn.is_not_null(), nothing(len(rows))
        told = [self._rows.gather(rows).alias("row_number"), torn.zip_with(is_torn, reason).alias("reason_code")]
        if keeps_raw:
            told += [none.zip_with(is_torn, column).alias("column"), none.zip_with(is_torn, raw).alias("raw_value")]
        return pl.DataFrame(told)

    def _is_blank(self, height: int) -> pl.Series:
        """Where nothing is in any cell we read; of a record that is none nothing can be read, and it is not blank."""
        blank = pl.repeat(True, height, dtype=pl.Boolean, eager=True)
        for cells in self._cells.values():
            if not blank.any():
                return blank
            blank = blank & (cells.str.strip_chars() == "")
        torn = self._torn.is_bad
        return blank if torn is None else blank & ~torn


def _column(index: int | None) -> str:
    return "none" if index is None else str(index)
