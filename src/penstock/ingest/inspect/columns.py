"""The type of every field over all tables, the share of cells it reads, and names derived from the content."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import polars as pl

from penstock.ingest.inspect.cells import CellTexts
from penstock.ingest.inspect.fields import InspectedField
from penstock.ingest.inspect.tables import ShapedTable
from penstock.ingest.inspect.types import ColumnContext, TypeGuess, guess_type
from penstock.ingest.inspect.vocabulary import ColumnHint
from penstock.ingest.supplier import SupplierColumn
from penstock.ingest.transform.values import read_column

EXAMPLES = 3
_LONGEST_EXAMPLE = 32
_MERGED_SHARES = (0.2, 0.98)  # minimum and maximum share of empty cells in a column of merged cells
_BARCODE = r"^[0-9]{8,14}$"
_CODE = r"^[A-Za-zА-Яа-я0-9][A-Za-zА-Яа-я0-9./_-]*$"
_NAME_LENGTH = 10


@dataclass(frozen=True)
class TypedField:
    """A field with its type; *texts* and *is_bad* contain the cells of all tables in a row."""

    field: InspectedField
    name: str
    guess: TypeGuess
    texts: pl.Series
    is_bad: pl.Series
    ends: list[int]

    @property
    def options(self) -> dict[str, Any]:
        return self.guess.options

    @cached_property
    def is_empty(self) -> pl.Series:
        return self.texts.is_in(["", *self.options.get("empty", [])])

    @property
    def header(self) -> str:
        return self.field.spellings[0] if self.field.spellings else str(self.field.number)

    @property
    def is_row_number(self) -> bool:
        """True if the column only numbers the rows, so that its values change when a row is added."""
        filled = self.texts.filter(~self.is_empty)
        return self.field.hint is ColumnHint.COUNTER and bool(filled.str.contains(r"^[0-9]{1,7}\.?$").all())

    def slice_table(self, table: int | None) -> slice:
        """Return the slice of the cells of a table, or of all tables."""
        if table is None:
            return slice(0, len(self.texts))
        return slice(self.ends[table - 1] if table else 0, self.ends[table])

    def measure_empty(self, table: int | None = None) -> float:
        """Return the share of empty cells."""
        return _measure_share(self.is_empty[self.slice_table(table)])

    def measure_read(self, table: int | None = None) -> float:
        """Return the share of the filled cells that become values."""
        where = self.slice_table(table)
        filled = ~self.is_empty[where]
        return 1 - _measure_share(self.is_bad[where].filter(filled)) if filled.any() else 1.0

    def is_unique(self, table: int) -> bool:
        texts = self.texts[self.slice_table(table)]
        return len(texts) > 0 and not self.is_empty[self.slice_table(table)].any() and texts.n_unique() == len(texts)

    def list_examples(self, table: int | None = None) -> list[str]:
        """Return a few different values of the column."""
        where = self.slice_table(table)
        filled = self.texts[where].filter(~self.is_empty[where]).head(200).unique(maintain_order=True)
        return [shorten(text) for text in filled.head(EXAMPLES)]


def shorten(text: str) -> str:
    """Return *text* on a single line, cut to the length of an example."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_EXAMPLE else f"{text[: _LONGEST_EXAMPLE - 1]}…"


def type_fields(fields: list[InspectedField], tables: list[ShapedTable]) -> list[TypedField]:
    """Return every field with the type that reads its cells best."""
    is_english = all(name.isascii() for table in tables for name in table.names)
    return [_type_field(field, tables, is_english=is_english) for field in fields]


def _type_field(field: InspectedField, tables: list[ShapedTable], *, is_english: bool) -> TypedField:
    parts = [table.select_texts(field.columns.get(number)) for number, table in enumerate(tables)]
    texts = (
        pl.concat([slice_table.rename("text") for slice_table in parts])
        if parts
        else pl.Series("text", [], dtype=pl.String)
    )
    ends = pl.Series([len(slice_table) for slice_table in parts], dtype=pl.Int64).cum_sum().to_list()
    # Cells of tables without the column are empty and do not affect the guess.
    guess = guess_type(CellTexts(texts), ColumnContext(field.hint, is_english))
    if _is_merged_down(field, texts):
        options = {**guess.options, "fill_down": True}
        doubts = (*guess.doubts, "an empty cell gets the value of the cell above it (`fill_down`)")
        guess = replace(guess, options=options, doubts=doubts)
    column = SupplierColumn.model_validate({"from": 1, **guess.options})
    is_bad = read_column(column, texts, is_required=False).is_bad
    return TypedField(field, _name_field(field, guess), guess, texts, is_bad, ends)


def _is_merged_down(field: InspectedField, texts: pl.Series) -> bool:
    """Return whether the column is a category or brand that is written once above all its rows."""
    low, high = _MERGED_SHARES
    if field.hint is not ColumnHint.GROUP or not len(texts) or len(field.columns) != 1 or texts[0] == "":
        return False
    empty = _measure_share(texts == "")
    filled = texts.filter(texts != "")
    return low <= empty <= high and filled.n_unique() >= len(filled) * 0.8 and len(filled) > 1


def _name_field(field: InspectedField, guess: TypeGuess) -> str:
    if guess.type == "money":
        return f"{field.name}_minor"
    if field.hint is not ColumnHint.QUANTITY or guess.type not in ("enum", "string"):
        return field.name
    is_boolean = isinstance(guess.options.get("values"), dict)
    return field.name.replace("qty", "in_stock" if is_boolean else "availability", 1)


def _measure_share(mask: pl.Series) -> float:
    return int(mask.sum()) / len(mask) if len(mask) else 0.0


def name_by_content(columns: list[TypedField]) -> tuple[list[TypedField], list[str]]:
    """Name the columns of a table without a header by their content; return them and the warnings."""
    taken: set[str] = set()
    named: list[TypedField] = []
    for column in columns:
        name, hint = _guess_name(column, taken)
        taken.add(name)
        named.append(replace(column, name=name, field=replace(column.field, hint=hint)))
    named, warnings = _find_price(named, taken)
    guessed = [
        f"{column.name} (column {column.field.number})" for column in named if not column.name.startswith("column_")
    ]
    if guessed:
        warnings.append(f"the file has no header; these names are guesses from the content: {', '.join(guessed)}")
    return named, warnings


def _guess_name(column: TypedField, taken: set[str]) -> tuple[str, ColumnHint]:
    choices = {
        "barcode": (column.guess.type == "string" and _measure_match(column, _BARCODE) > 0.9, ColumnHint.CODE),
        "sku": (column.guess.type == "string" and _is_code(column), ColumnHint.CODE),
        "price_minor": (column.guess.type == "money", ColumnHint.MONEY),
        "date": (column.guess.type in ("date", "datetime"), ColumnHint.MOMENT),
        "name": (column.guess.type == "string" and _measure_length(column) > _NAME_LENGTH, ColumnHint.TEXT),
    }
    for name, (is_likely, hint) in choices.items():
        if is_likely and name not in taken:
            return name, hint
    field = column.field
    return f"{field.name}_minor" if column.guess.type == "money" else field.name, field.hint


def _find_price(columns: list[TypedField], taken: set[str]) -> tuple[list[TypedField], list[str]]:
    """Make a single column of numbers with two decimal places a price; return the columns and the warnings."""
    decimals = [column for column in columns if column.guess.type == "decimal" and column.options.get("scale") == 2]
    if len(decimals) != 1 or "price_minor" in taken:
        return columns, []
    options = {key: value for key, value in decimals[0].options.items() if key != "scale"} | {"type": "money"}
    price = replace(decimals[0], name="price_minor", guess=TypeGuess(options, decimals[0].guess.doubts))
    warning = f"column {price.field.number} is read as a price, because its numbers have two decimal places"
    return [price if column is decimals[0] else column for column in columns], [warning]


def _is_code(column: TypedField) -> bool:
    filled = column.texts.filter(~column.is_empty)
    return len(filled) > 1 and filled.n_unique() >= len(filled) * 0.98 and _measure_match(column, _CODE) > 0.95


def _measure_match(column: TypedField, pattern: str) -> float:
    filled = column.texts.filter(~column.is_empty)
    return int(filled.str.contains(pattern).sum()) / len(filled) if len(filled) else 0.0


def _measure_length(column: TypedField) -> float:
    lengths = column.texts.filter(~column.is_empty).str.len_chars()
    return int(lengths.sum()) / len(lengths) if len(lengths) else 0.0
