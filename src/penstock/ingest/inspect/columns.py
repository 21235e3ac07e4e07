"""The type of every field over all tables, and how well it reads each of them."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import polars as pl

from penstock.ingest.inspect.fields import Field
from penstock.ingest.inspect.tables import Shaped
from penstock.ingest.inspect.types import Guess, Known, guess
from penstock.ingest.inspect.vocabulary import Hint
from penstock.ingest.supplier import Column
from penstock.ingest.transform.values import typed

# What people write when there is nothing to write.
NOTHING = (
    "-", "--", "---", "–", "—", "−", ".", "n/a", "N/A", "n.a.", "na", "NA", "NaN", "null", "NULL", "None", "none",
    "н/д", "Н/Д", "н.д.", "нет данных", "не указано", "не указан", "б/н", "#N/A", "#Н/Д", "#REF!", "#ССЫЛКА!",
    "#VALUE!", "#ЗНАЧ!", "#DIV/0!", "#ДЕЛ/0!", "#NAME?", "#ИМЯ?",
)  # fmt: skip


class Cells:
    """What stands in a column, without what is empty."""

    def __init__(self, texts: pl.Series) -> None:
        filled = texts.filter(texts != "").rename("text")
        counted = filled.value_counts(sort=True, name="count")
        self.values: pl.Series = counted["text"]
        self.counts: pl.Series = counted["count"]
        self.total = len(filled)

    def without(self, values: list[str]) -> "Cells":
        keep = ~self.values.is_in(values)
        other = Cells.__new__(Cells)
        other.values, other.counts = self.values.filter(keep), self.counts.filter(keep)
        other.total = int(other.counts.sum())
        return other

    @cached_property
    def nothings(self) -> list[str]:
        return self.values.filter(self.values.is_in(list(NOTHING))).to_list()

    @cached_property
    def folded(self) -> set[str]:
        return set(self.values.str.to_lowercase().to_list())

    def share(self, pattern: str) -> float:
        """Which part of the cells matches *pattern* as a whole."""
        return self._part(self.values.str.contains(f"^(?:{pattern})$"))

    def matching(self, pattern: str) -> list[str]:
        return self.values.filter(self.values.str.contains(f"^(?:{pattern})$")).to_list()

    def has(self, pattern: str) -> bool:
        return bool(self.values.str.contains(f"^(?:{pattern})$").any())

    def read_by(self, options: dict[str, Any]) -> float:
        """Which part of the cells becomes a value with these options of a column."""
        return 1 - self._part(self._is_unread(options))

    def unread_by(self, options: dict[str, Any]) -> tuple[list[str], int]:
        """The texts that do not, the most frequent first, and in how many cells they are."""
        unread = self._is_unread(options)
        return self.values.filter(unread).to_list(), int(self.counts.filter(unread).sum())

    @property
    def longest(self) -> int:
        """How many characters the longest text has."""
        longest = self.values.str.len_chars().max()
        return longest if isinstance(longest, int) else 0

    def _is_unread(self, options: dict[str, Any]) -> pl.Series:
        found = typed(Column.model_validate({"from": 1, **options}), self.values, is_required=False).is_bad
        return pl.repeat(False, len(self.values), dtype=pl.Boolean, eager=True) if found is None else found

    def _part(self, mask: pl.Series) -> float:
        return int(self.counts.filter(mask).sum()) / self.total if self.total else 0.0


EXAMPLES = 3
_LONGEST_EXAMPLE = 32
_FILLED_DOWN = (0.2, 0.98)  # share of empty cells of a column whose cells are merged downwards


@dataclass(frozen=True)
class Typed:
    """A field with its type; *texts* and *is_bad* are of all tables, one behind the other."""

    field: Field
    name: str
    guess: Guess
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
        return self.field.hint is Hint.COUNTER and bool(filled.str.contains(r"^[0-9]{1,7}\.?$").all())

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


def typed_fields(fields: list[Field], tables: list[Shaped]) -> list[Typed]:
    """Every field with the type that reads it best."""
    is_english = all(name.isascii() for table in tables for name in table.names)
    return [_typed(one, tables, is_english=is_english) for one in fields]


def _typed(field: Field, tables: list[Shaped], *, is_english: bool) -> Typed:
    parts = [table.texts(field.columns.get(number)) for number, table in enumerate(tables)]
    texts = pl.concat([part.rename("text") for part in parts]) if parts else pl.Series("text", [], dtype=pl.String)
    ends = pl.Series([len(part) for part in parts], dtype=pl.Int64).cum_sum().to_list()
    # Only tables that have the column can say what it holds.
    found = guess(Cells(texts), Known(field.hint, is_english))
    if _is_merged_down(field, texts):
        options = {**found.options, "fill_down": True}
        found = replace(found, options=options, doubts=(*found.doubts, "empty cells are filled from the one above"))
    bad = typed(Column.model_validate({"from": 1, **found.options}), texts, is_required=False).is_bad
    is_bad = pl.repeat(False, len(texts), dtype=pl.Boolean, eager=True) if bad is None else bad
    return Typed(field, _final_name(field, found), found, texts, is_bad, ends)


def _is_merged_down(field: Field, texts: pl.Series) -> bool:
    """A category or brand that is written once above all it applies to."""
    low, high = _FILLED_DOWN
    if field.hint is not Hint.GROUP or not len(texts) or len(field.columns) != 1 or texts[0] == "":
        return False
    empty = _mean(texts == "")
    filled = texts.filter(texts != "")
    return low <= empty <= high and filled.n_unique() >= len(filled) * 0.8 and len(filled) > 1


def _final_name(field: Field, found: Guess) -> str:
    if found.type == "money":
        return f"{field.name}_minor"
    if field.hint is not Hint.QUANTITY or found.type not in ("enum", "string"):
        return field.name
    is_boolean = isinstance(found.options.get("values"), dict)
    return field.name.replace("qty", "in_stock" if is_boolean else "availability", 1)


def _mean(mask: pl.Series) -> float:
    return int(mask.sum()) / len(mask) if len(mask) else 0.0
