"""The proposed configuration: the key, the header and the columns, with warnings about decisions to review."""

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
from penstock.kernel.status import pluralize

_PREFERRED = ("sku", "barcode", "vendor_code", "code", "id")
_MAX_REPEATS = 0.02  # maximum share of empty or repeated cells in a column whose header indicates a key
_TEXTS = ("string", "integer")
_HINTS = (ColumnHint.CODE, ColumnHint.COUNTER, ColumnHint.NONE, ColumnHint.TEXT)
_LONGEST = 60
_BAD_RATIO = 0.10
_MOSTLY_FILLED = 0.98
_SHOWN = 3
_PRICES = ("price", "wholesale_price", "retail_price")
_MIN_SHARE = 0.5  # of the rows of this file, as the minimum of the next file
_NOUNS = {"integer": "a whole number", "money": "an amount", "decimal": "a number", "enum": "one of the known words"}


@dataclass(frozen=True)
class KeyCandidate:
    """A field that may be the key, with the table and the hash of each of its cells."""

    name: str
    hint: ColumnHint
    type: str
    is_everywhere: bool
    cells: pl.DataFrame  # table, hash (null: empty), length

    def measure_repeats(self, *, within_tables: bool) -> float:
        """Return the share of the cells that are empty or repeated."""
        filled = self.cells.drop_nulls("hash")
        different = filled.select(["table", "hash"] if within_tables else ["hash"]).n_unique()
        return 1 - different / self.cells.height if self.cells.height else 1.0

    @property
    def is_short(self) -> bool:
        longest = self.cells["length"].max()
        return isinstance(longest, int) and longest <= _LONGEST


@dataclass(frozen=True)
class KeyProposal:
    """The proposed key, and the warnings about it."""

    names: list[str]
    warnings: list[str]


def propose_key(candidates: list[KeyCandidate], *, has_sheets: bool) -> KeyProposal:
    """Return the key, with the category if only both are unique; without a unique column, no key and a warning."""
    usable = [
        candidate
        for candidate in candidates
        if candidate.is_everywhere and candidate.type in _TEXTS and candidate.hint in _HINTS
    ]
    rejected: list[str] = []
    for candidate in sorted(usable, key=_rank_candidate):
        is_code = candidate.hint is ColumnHint.CODE
        allowed = _MAX_REPEATS if is_code else 0.0
        if not is_code and not candidate.is_short:
            continue
        keys = (([candidate.name], False), ([CATEGORY, candidate.name], True))
        for names, within in keys[: 2 if has_sheets else 1]:
            repeats = candidate.measure_repeats(within_tables=within)
            if repeats <= allowed:
                warning = f"{repeats:.1%} of the cells of the key {candidate.name} are empty or repeated: bad rows"
                return KeyProposal(names, [*rejected, *([warning] if repeats else [])])
        if candidate.name in _PREFERRED:
            problem = f"{repeats:.1%} of its cells are empty or repeated"
            rejected.append(f"{candidate.name} is not proposed as the key: {problem}")
    warning = "no column is unique, so no key is proposed: repeated rows will not be detected"
    return KeyProposal([], [*rejected, warning])


def _rank_candidate(candidate: KeyCandidate) -> tuple[int, int]:
    order = _PREFERRED.index(candidate.name) if candidate.name in _PREFERRED else len(_PREFERRED)
    return order, _HINTS.index(candidate.hint)


def build_config(
    sample: FileSample, plan: TablePlan, columns: list[TypedField], key: KeyProposal, skipping: SkipRules
) -> dict[str, Any]:
    """Return the configuration as a document, with the keys in the order of the documentation."""
    # The main price is required if it is almost never empty: a row without a price is rarely an offer.
    prices = [
        column for name in _PRICES for column in columns if column.field.name == name or column.name == f"{name}_minor"
    ]
    needed = {*key.names, *(price.name for price in prices[:1] if 1 - price.measure_empty() >= _MOSTLY_FILLED)}
    if skipping.leaves_sections:
        # A section has a single cell, so two required columns keep it out of the data.
        always_filled = [
            column.name
            for column in columns
            if len(column.field.columns) == len(plan.tables) and column.measure_empty() == 0
        ]
        needed |= set(always_filled[:2])
    return {
        "min_fact_count": _round_down(sum(_count_rows(table) for table in plan.tables)),
        "max_bad_ratio": _BAD_RATIO,
        "allow_empty_snapshot": False,
        "source": _build_source(sample, plan, skipping.patterns),
        "columns": {column.name: _build_column(column, needed, plan) for column in columns},
        **({"key": key.names} if key.names else {}),
    }


def choose_key(plan: TablePlan, columns: list[TypedField]) -> KeyProposal:
    """Return the key that is proposed for *columns*."""
    if not columns:
        return KeyProposal([], [])
    candidates = [_make_candidate(column, plan) for column in columns]
    return propose_key(candidates, has_sheets=len(plan.tables) > 1)


def settle_header(config: dict[str, Any], plan: TablePlan) -> list[str]:
    """Set the row of the header, or skip sheets, if the automatic search fails; return the warnings."""
    supplier = Supplier.model_validate(config)
    missed = [
        table
        for table in plan.tables
        if table.header is not None and _find_header_end(table, supplier) != table.header.end
    ]
    if not missed:
        return []
    first = missed[0].header
    if len(plan.tables) == 1 and first is not None:
        config["source"]["header"] = first.above + 1
        return []
    names = [table.sample.name for table in missed]
    skip = config["source"].setdefault("sheets", {}).setdefault("skip", [])
    skip += [name for name in names if name not in skip]
    problem = "its header differs from the other sheets: it is skipped; read it with a supplier of its own"
    return [f"sheet {name!r}: {problem}" for name in names]


def list_doubts(columns: list[TypedField], plan: TablePlan) -> list[str]:
    """Return the warnings about each column."""
    warnings: list[str] = []
    for column in columns:
        warnings += [f"column {column.header!r}: {doubt}" for doubt in column.guess.doubts]
        warnings += _report_unread(column)
        warnings += _report_missing(column, plan)
    return warnings


def _build_source(sample: FileSample, plan: TablePlan, skip_rows: list[str]) -> dict[str, Any]:
    source: dict[str, Any] = {"format": sample.format.value}
    if sample.format is FileFormat.CSV and sample.delimiter:
        source["delimiter"] = sample.delimiter
    if sample.format in (FileFormat.CSV, *WORKBOOKS):
        source["header"] = "auto" if plan.has_header else "none"
    if plan.header_rows > 1:
        source["header_rows"] = plan.header_rows
    if skip_rows:
        source["skip_rows"] = skip_rows
    if plan.tables and (skipped := [table.sample.name for table in plan.skipped if table.sample.name]):
        source["sheets"] = {"skip": skipped}
    if sample.records:
        source["records"] = sample.records
    return source


def _build_column(column: TypedField, needed: set[str], plan: TablePlan) -> dict[str, Any]:
    references = column.field.references
    options = {"from": references if len(references) > 1 else references[0], **column.options}
    is_everywhere = len(column.field.columns) == len(plan.tables)
    is_needed = column.name in needed and is_everywhere and len(column.texts) > 0
    return {**options, "required": True} if is_needed else options


def _make_candidate(field: TypedField, plan: TablePlan) -> KeyCandidate:
    """Return the candidate with the cells of the sample, and the hashes of the rows after it."""
    parts = []
    for number, table in enumerate(plan.tables):
        cells_of_table = field.slice_table(number)
        is_first = table.rows.data[ROW] <= FIRST
        cells = pl.DataFrame({"text": field.texts[cells_of_table], "is_empty": field.is_empty[cells_of_table]}).filter(
            is_first
        )
        hashes = cells.select(pl.when(~pl.col("is_empty")).then(pl.col("text").hash()).alias("hash"))["hash"]
        column = str(field.field.columns.get(number))
        if column in table.sample.beyond.columns:
            hashes = pl.concat([hashes, table.sample.beyond[column].rename("hash")])
        parts.append(pl.DataFrame({"table": pl.repeat(number, len(hashes), eager=True), "hash": hashes}))
    cells = pl.concat(parts).with_columns(pl.lit(field.texts.str.len_chars().max()).alias("length"))
    is_everywhere = len(field.field.columns) == len(plan.tables)
    return KeyCandidate(field.name, field.field.hint, field.guess.type, is_everywhere, cells)


def _find_header_end(table: ShapedTable, supplier: Supplier) -> int | None:
    sample = table.sample
    try:
        return bind_columns(SourceTable(sample.name, 1, sample.head, iter(()), names=sample.names), supplier).rows
    except RunFailed:
        return None


def _report_unread(column: TypedField) -> list[str]:
    bad = column.texts.filter(column.is_bad)
    if not len(bad):
        return []
    examples = ", ".join(repr(text) for text in bad.unique(maintain_order=True).head(_SHOWN))
    noun = _NOUNS.get(column.guess.type, f"a {column.guess.type}")
    problem = f"column {column.header!r}: {pluralize(len(bad), 'value')} cannot be read as {noun}: {examples}"
    return [f"{problem}; these rows will be bad; add values that mean an empty cell to `empty`"]


def _report_missing(column: TypedField, plan: TablePlan) -> list[str]:
    lacking = [table.sample.name for number, table in enumerate(plan.tables) if number not in column.field.columns]
    is_important = column.field.hint in (ColumnHint.CODE, ColumnHint.MONEY)
    if not lacking or not is_important or len(lacking) * 2 > len(plan.tables):
        return []
    more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
    sheets = f"sheet {', '.join(map(repr, lacking[:_SHOWN]))}{more}"
    return [f"column {column.header!r} is missing on {sheets}: its values are empty there"]


def _count_rows(table: ShapedTable) -> int:
    """Return the number of data rows, as far as it is known."""
    sampled = table.rows.data.height
    beyond = table.sample.total - table.sample.rows.height
    return sampled + max(0, beyond)


def _round_down(rows: int) -> int:
    """Return half of *rows*, rounded down to a number with few digits."""
    half = int(rows * _MIN_SHARE)
    unit = int("1" + "0" * (len(str(half)) - 2))
    return max(1, half // unit * unit)
