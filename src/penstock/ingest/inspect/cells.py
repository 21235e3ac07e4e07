"""The texts of a column, each once with how often it comes, so that a guess is tried on all of them cheaply."""

from functools import cached_property
from typing import Any

import polars as pl

from penstock.ingest.supplier import SupplierColumn
from penstock.ingest.transform.values import read_column

# What people write when there is nothing to write.
NOTHING = (
    "-", "--", "---", "–", "—", "−", ".", "n/a", "N/A", "n.a.", "na", "NA", "NaN", "null", "NULL", "None", "none",
    "н/д", "Н/Д", "н.д.", "нет данных", "не указано", "не указан", "б/н", "#N/A", "#Н/Д", "#REF!", "#ССЫЛКА!",
    "#VALUE!", "#ЗНАЧ!", "#DIV/0!", "#ДЕЛ/0!", "#NAME?", "#ИМЯ?",
)  # fmt: skip


class CellTexts:
    """What stands in a column, without what is empty."""

    def __init__(self, texts: pl.Series) -> None:
        filled = texts.filter(texts != "").rename("text")
        counted = filled.value_counts(sort=True, name="count")
        self.values: pl.Series = counted["text"]
        self.counts: pl.Series = counted["count"]
        self.total = len(filled)

    def without(self, values: list[str]) -> "CellTexts":
        keep = ~self.values.is_in(values)
        other = CellTexts.__new__(CellTexts)
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
        found = read_column(
            SupplierColumn.model_validate({"from": 1, **options}), self.values, is_required=False
        ).is_bad
        return pl.repeat(False, len(self.values), dtype=pl.Boolean, eager=True) if found is None else found

    def _part(self, mask: pl.Series) -> float:
        return int(self.counts.filter(mask).sum()) / self.total if self.total else 0.0
