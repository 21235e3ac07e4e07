"""The type of every field over all tables, the share of cells it reads, and names derived from the content."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import polars as pl

from penstock.ingest.inspect.cells import CellTexts
from penstock.ingest.inspect.fields import InspectedField
from penstock.ingest.inspect.tables import ShapedTable
from penstock.ingest.inspect.types import KnownFormats, TypeGuess, guess
from penstock.ingest.inspect.vocabulary import ColumnHint
from penstock.ingest.supplier import SupplierColumn
from penstock.ingest.transform.values import read_column

EXAMPLES = 3
_LONGEST_EXAMPLE = 32
_FILLED_DOWN = (0.2, 0.98)  # share of empty cells of a column whose cells are merged downwards
_BARCODE = r"^[0-9]{8,14}$"
_CODE = r"^[A-Za-zА-Яа-я0-9][A-Za-zА-Яа-я0-9./_-]*$"
_LONG = 10


@dataclass(frozen=True)
class TypedField:
    """A field with its type; *texts* and *is_bad* are of all tables, one behind the other."""

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
    def only_counts(self) -> bool:
        """Whether it numbers the rows: such a number is another one as soon as a row is added."""
        filled = self.texts.filter(~self.is_empty)
        return self.field.hint is ColumnHint.COUNTER and bool(filled.str.contains(r"^[0-9]{1,7}\.?$").all())

    def part(self, table: int | None) -> slice:
        """Where the cells of a table are; None: of all."""
        if table is None:
            return slice(0, len(self.texts))
        return slice(self.ends[table - 1] if table else 0, self.ends[table])

    def empty(self, table: int | None = None) -> float:
        return _mean(self.is_empty[self.part(table)])

    def read(self, table: int | None = None) -> float:
        """Which part of the cells that hold something becomes a value."""
        where = self.part(table)
        filled = ~self.is_empty[where]
        return 1 - _mean(self.is_bad[where].filter(filled)) if filled.any() else 1.0

    def is_unique(self, table: int) -> bool:
        texts = self.texts[self.part(table)]
        return len(texts) > 0 and not self.is_empty[self.part(table)].any() and texts.n_unique() == len(texts)

    def examples(self, table: int | None = None) -> list[str]:
        where = self.part(table)
        filled = self.texts[where].filter(~self.is_empty[where]).head(200).unique(maintain_order=True)
        return [shortened(text) for text in filled.head(EXAMPLES)]


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_EXAMPLE else f"{text[: _LONGEST_EXAMPLE - 1]}…"


def typed_fields(fields: list[InspectedField], tables: list[ShapedTable]) -> list[TypedField]:
    """Every field with the type that reads it best."""
    is_english = all(name.isascii() for table in tables for name in table.names)
    return [_typed(field, tables, is_english=is_english) for field in fields]


def _typed(field: InspectedField, tables: list[ShapedTable], *, is_english: bool) -> TypedField:
    parts = [table.texts(field.columns.get(number)) for number, table in enumerate(tables)]
    texts = pl.concat([part.rename("text") for part in parts]) if parts else pl.Series("text", [], dtype=pl.String)
    ends = pl.Series([len(part) for part in parts], dtype=pl.Int64).cum_sum().to_list()
    # Only tables that have the column can say what it holds.
    found = guess(CellTexts(texts), KnownFormats(field.hint, is_english))
    if _is_merged_down(field, texts):
        options = {**found.options, "fill_down": True}
        found = replace(found, options=options, doubts=(*found.doubts, "empty cells are filled from the one above"))
    bad = read_column(SupplierColumn.model_validate({"from": 1, **found.options}), texts, is_required=False).is_bad
    is_bad = pl.repeat(False, len(texts), dtype=pl.Boolean, eager=True) if bad is None else bad
    return TypedField(field, _final_name(field, found), found, texts, is_bad, ends)


def _is_merged_down(field: InspectedField, texts: pl.Series) -> bool:
    """A category or brand that is written once above all it applies to."""
    low, high = _FILLED_DOWN
    if field.hint is not ColumnHint.GROUP or not len(texts) or len(field.columns) != 1 or texts[0] == "":
        return False
    empty = _mean(texts == "")
    filled = texts.filter(texts != "")
    return low <= empty <= high and filled.n_unique() >= len(filled) * 0.8 and len(filled) > 1


def _final_name(field: InspectedField, found: TypeGuess) -> str:
    if found.type == "money":
        return f"{field.name}_minor"
    if field.hint is not ColumnHint.QUANTITY or found.type not in ("enum", "string"):
        return field.name
    is_boolean = isinstance(found.options.get("values"), dict)
    return field.name.replace("qty", "in_stock" if is_boolean else "availability", 1)


def _mean(mask: pl.Series) -> float:
    return int(mask.sum()) / len(mask) if len(mask) else 0.0


def named_by_content(columns: list[TypedField]) -> tuple[list[TypedField], list[str]]:
    """The same columns: codes, texts, prices and dates called so, each name given once."""
    taken: set[str] = set()
    found: list[TypedField] = []
    for column in columns:
        name, hint = _name(column, taken)
        taken.add(name)
        found.append(replace(column, name=name, field=replace(column.field, hint=hint)))
    found, told = _priced(found, taken)
    guessed = [f"{one.name} ({one.field.number})" for one in found if not one.name.startswith("column_")]
    return found, [*told, *([f"names are guesses by what the columns hold: {', '.join(guessed)}"] if guessed else [])]


def _name(one: TypedField, taken: set[str]) -> tuple[str, ColumnHint]:
    choices = {
        "barcode": (one.guess.type == "string" and _share(one, _BARCODE) > 0.9, ColumnHint.CODE),
        "sku": (one.guess.type == "string" and _is_code(one), ColumnHint.CODE),
        "price_minor": (one.guess.type == "money", ColumnHint.MONEY),
        "date": (one.guess.type in ("date", "datetime"), ColumnHint.MOMENT),
        "name": (one.guess.type == "string" and _length(one) > _LONG, ColumnHint.TEXT),
    }
    for name, (holds, hint) in choices.items():
        if holds and name not in taken:
            return name, hint
    return f"{one.field.name}_minor" if one.guess.type == "money" else one.field.name, one.field.hint


def _priced(columns: list[TypedField], taken: set[str]) -> tuple[list[TypedField], list[str]]:
    """The only column with a point and two digits is most likely a price."""
    decimals = [column for column in columns if column.guess.type == "decimal" and column.options.get("scale") == 2]
    if len(decimals) != 1 or "price_minor" in taken:
        return columns, []
    options = {key: value for key, value in decimals[0].options.items() if key != "scale"} | {"type": "money"}
    price = replace(decimals[0], name="price_minor", guess=TypeGuess(options, decimals[0].guess.doubts))
    told = f"column {price.field.number} is taken for a price: its numbers have two digits behind the point"
    return [price if column is decimals[0] else column for column in columns], [told]


def _is_code(one: TypedField) -> bool:
    filled = one.texts.filter(~one.is_empty)
    return len(filled) > 1 and filled.n_unique() >= len(filled) * 0.98 and _share(one, _CODE) > 0.95


def _share(one: TypedField, pattern: str) -> float:
    filled = one.texts.filter(~one.is_empty)
    return int(filled.str.contains(pattern).sum()) / len(filled) if len(filled) else 0.0


def _length(one: TypedField) -> float:
    lengths = one.texts.filter(~one.is_empty).str.len_chars()
    return int(lengths.sum()) / len(lengths) if len(lengths) else 0.0
