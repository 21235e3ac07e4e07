"""The proposed configuration: the key, the header and the columns, with warnings where a person has to decide."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from penstock.ingest.extract.tables import SourceTable
from penstock.ingest.inspect.columns import TypedField
from penstock.ingest.inspect.rows import SkipRules
from penstock.ingest.inspect.sample import FIRST, ROW, FileSample
from penstock.ingest.inspect.tables import ShapedTable, TablePlan
from penstock.ingest.inspect.vocabulary import ColumnHint
from penstock.ingest.model import RunFailed
from penstock.ingest.supplier import CATEGORY, WORKBOOKS, FileFormat, Supplier
from penstock.ingest.transform.gate import bind_columns

_PREFERRED = ("sku", "barcode", "vendor_code", "code", "id")
_TOLERATED = 0.02  # of cells that are empty or come again, in a column that is called as keys are
_TEXTS = ("string", "integer")
_HINTS = (ColumnHint.CODE, ColumnHint.COUNTER, ColumnHint.NONE, ColumnHint.TEXT)
_LONGEST = 60
_BAD_RATIO = 0.10
_ALMOST_ALWAYS = 0.98
_SHOWN = 3
_PRICES = ("price", "wholesale_price", "retail_price")
_FACTS = 0.5  # of the rows of today that should be there tomorrow
_NOUNS = {"integer": "whole numbers", "money": "money", "decimal": "numbers", "enum": "among the known words"}


@dataclass(frozen=True)
class KeyCandidate:
    """A field that could be the key: which table, and which text, each of its cells has."""

    name: str
    hint: ColumnHint
    type: str
    is_everywhere: bool
    cells: pl.DataFrame  # table, hash (null: empty), length

    def repeats(self, *, within_tables: bool) -> float:
        """Which part of its cells is empty, or comes again."""
        filled = self.cells.drop_nulls("hash")
        different = filled.select(["table", "hash"] if within_tables else ["hash"]).n_unique()
        return 1 - different / self.cells.height if self.cells.height else 1.0

    @property
    def is_short(self) -> bool:
        longest = self.cells["length"].max()
        return isinstance(longest, int) and longest <= _LONGEST


@dataclass(frozen=True)
class KeyProposal:
    """The fields that make it, and what a person should know."""

    names: list[str]
    warnings: list[str]


def key_of(candidates: list[KeyCandidate], *, has_sheets: bool) -> KeyProposal:
    """The key, the category beside it if that makes it unique; none with a warning."""
    usable = [
        candidate
        for candidate in candidates
        if candidate.is_everywhere and candidate.type in _TEXTS and candidate.hint in _HINTS
    ]
    rejected: list[str] = []
    for one in sorted(usable, key=_preference):
        is_code = one.hint is ColumnHint.CODE
        allowed = _TOLERATED if is_code else 0.0
        if not is_code and not one.is_short:
            continue
        for names, within in (([one.name], False), ([CATEGORY, one.name], True))[: 2 if has_sheets else 1]:
            repeats = one.repeats(within_tables=within)
            if repeats <= allowed:
                said = f"{repeats:.1%} of the cells of the key {one.name} are empty or come again: such rows are bad"
                return KeyProposal(names, [*rejected, *([said] if repeats else [])])
        if one.name in _PREFERRED:
            rejected.append(f"{one.name} is no key: {repeats:.1%} of its cells are empty or come again")
    return KeyProposal([], [*rejected, "no unique column: no key proposed, so rows that come twice are not noticed"])


def _preference(one: KeyCandidate) -> tuple[int, int]:
    order = _PREFERRED.index(one.name) if one.name in _PREFERRED else len(_PREFERRED)
    return order, _HINTS.index(one.hint)


def config_of(
    read: FileSample, plan: TablePlan, columns: list[TypedField], key: KeyProposal, skipping: SkipRules
) -> dict[str, Any]:
    """What `SupplierView.model_validate` takes, keys in the order people read them."""
    # The main price, if it is almost always there: a row without one is seldom an offer.
    prices = [
        column for name in _PRICES for column in columns if column.field.name == name or column.name == f"{name}_minor"
    ]
    needed = {*key.names, *(price.name for price in prices[:1] if 1 - price.empty() >= _ALMOST_ALWAYS)}
    if skipping.leaves_sections:
        # A section fills one cell: of two that have to be there, it lacks at least one, and cannot pass for data.
        always_there = [
            column.name for column in columns if len(column.field.columns) == len(plan.tables) and column.empty() == 0
        ]
        needed |= set(always_there[:2])
    return {
        "min_fact_count": _least(sum(_rows(table) for table in plan.tables)),
        "max_bad_ratio": _BAD_RATIO,
        "allow_empty_snapshot": False,
        "source": _source(read, plan, skipping.patterns),
        "columns": {column.name: _column(column, needed, plan) for column in columns},
        **({"key": key.names} if key.names else {}),
    }


def chosen_key(plan: TablePlan, columns: list[TypedField]) -> KeyProposal:
    if not columns:
        return KeyProposal([], [])
    candidates = [_candidate(column, plan) for column in columns]
    return key_of(candidates, has_sheets=len(plan.tables) > 1)


def settled_header(config: dict[str, Any], plan: TablePlan) -> list[str]:
    """Let the header be looked for if that finds it in every table, else say where it is; tell which it misses."""
    supplier = Supplier.model_validate(config)
    missed = [
        table for table in plan.tables if table.header is not None and _header_end(table, supplier) != table.header.end
    ]
    if not missed:
        return []
    first = missed[0].header
    if len(plan.tables) == 1 and first is not None:
        config["source"]["header"] = first.above + 1
        return []
    names = [one.sample.name for one in missed]
    skip = config["source"].setdefault("sheets", {}).setdefault("skip", [])
    skip += [name for name in names if name not in skip]
    return [f"sheet {name!r} cannot be read like the others and is skipped: give it a supplier" for name in names]


def doubts_of(columns: list[TypedField], plan: TablePlan) -> list[str]:
    """What to look at in each column."""
    told: list[str] = []
    for column in columns:
        told += [f"column {column.header!r}: {doubt}" for doubt in column.guess.doubts]
        told += _unread(column)
        told += _missing(column, plan)
    return told


def _source(read: FileSample, plan: TablePlan, skip_rows: list[str]) -> dict[str, Any]:
    source: dict[str, Any] = {"format": read.format.value}
    if read.format is FileFormat.CSV and read.delimiter:
        source["delimiter"] = read.delimiter
    if read.format in (FileFormat.CSV, *WORKBOOKS):
        source["header"] = "auto" if plan.has_header else "none"
    if plan.header_rows > 1:
        source["header_rows"] = plan.header_rows
    if skip_rows:
        source["skip_rows"] = skip_rows
    if plan.tables and (skipped := [one.sample.name for one in plan.skipped if one.sample.name]):
        source["sheets"] = {"skip": skipped}
    if read.records:
        source["records"] = read.records
    return source


def _column(one: TypedField, needed: set[str], plan: TablePlan) -> dict[str, Any]:
    places = one.field.places
    options = {"from": places if len(places) > 1 else places[0], **one.options}
    is_everywhere = len(one.field.columns) == len(plan.tables)
    is_needed = one.name in needed and is_everywhere and len(one.texts) > 0
    return {**options, "required": True} if is_needed else options


def _candidate(one: TypedField, plan: TablePlan) -> KeyCandidate:
    """Its cells in the rows looked at, and the hashes of those behind them."""
    parts = []
    for number, table in enumerate(plan.tables):
        where = one.part(number)
        is_first = table.rows.data[ROW] <= FIRST
        cells = pl.DataFrame({"text": one.texts[where], "is_empty": one.is_empty[where]}).filter(is_first)
        hashes = cells.select(pl.when(~pl.col("is_empty")).then(pl.col("text").hash()).alias("hash"))["hash"]
        column = str(one.field.columns.get(number))
        if column in table.sample.beyond.columns:
            hashes = pl.concat([hashes, table.sample.beyond[column].rename("hash")])
        parts.append(pl.DataFrame({"table": pl.repeat(number, len(hashes), eager=True), "hash": hashes}))
    cells = pl.concat(parts).with_columns(pl.lit(one.texts.str.len_chars().max()).alias("length"))
    is_everywhere = len(one.field.columns) == len(plan.tables)
    return KeyCandidate(one.name, one.field.hint, one.guess.type, is_everywhere, cells)


def _header_end(table: ShapedTable, supplier: Supplier) -> int | None:
    sample = table.sample
    try:
        return bind_columns(SourceTable(sample.name, 1, sample.head, iter(()), names=sample.names), supplier).rows
    except RunFailed:
        return None


def _unread(one: TypedField) -> list[str]:
    bad = one.texts.filter(one.is_bad)
    if not len(bad):
        return []
    shown = ", ".join(repr(text) for text in bad.unique(maintain_order=True).head(_SHOWN))
    number = f"{len(bad)} value that is" if len(bad) == 1 else f"{len(bad)} values that are"
    noun = _NOUNS.get(one.guess.type, f"{one.guess.type}s")
    return [f"column {one.header!r} has {number} not {noun}: {shown}; such rows are bad, unless `empty` names them"]


def _missing(one: TypedField, plan: TablePlan) -> list[str]:
    lacking = [table.sample.name for number, table in enumerate(plan.tables) if number not in one.field.columns]
    if not lacking or one.field.hint not in (ColumnHint.CODE, ColumnHint.MONEY) or len(lacking) * 2 > len(plan.tables):
        return []
    more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    return [f"column {one.header!r} is not on sheet {', '.join(map(repr, lacking[:_SHOWN]))}{more}: empty there"]


def _rows(table: ShapedTable) -> int:
    """How many rows of data there are, as far as it is known."""
    looked_at = table.rows.data.height
    beyond = table.sample.total - table.sample.rows.height
    return looked_at + max(0, beyond)


def _least(rows: int) -> int:
    """Half of *rows*, rounded down to a figure people would write."""
    half = int(rows * _FACTS)
    unit = int("1" + "0" * (len(str(half)) - 2))
    return max(1, half // unit * unit)
