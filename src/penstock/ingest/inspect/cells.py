"""The distinct texts of a column with their counts, so that a guess can be tested on all cells cheaply."""

from functools import cached_property
from typing import Any

import polars as pl

from penstock.ingest.supplier import SupplierColumn
from penstock.ingest.transform.values import read_column

# Texts that people write into empty cells.
EMPTY_TEXTS = (
    "-", "--", "---", "–", "—", "−", ".", "n/a", "N/A", "n.a.", "na", "NA", "NaN", "null", "NULL", "None", "none",
    "н/д", "Н/Д", "н.д.", "нет данных", "не указано", "не указан", "б/н", "#N/A", "#Н/Д", "#REF!", "#ССЫЛКА!",
    "#VALUE!", "#ЗНАЧ!", "#DIV/0!", "#ДЕЛ/0!", "#NAME?", "#ИМЯ?",
)  # fmt: skip


class CellTexts:
    """The texts of the cells of a column that are not empty."""

    def __init__(self, texts: pl.Series) -> None:
        filled = texts.filter(texts != "").rename("text")
        counted = filled.value_counts(sort=True, name="count")
        self.values: pl.Series = counted["text"]
        self.counts: pl.Series = counted["count"]
        self.total = len(filled)

    def exclude(self, values: list[str]) -> "CellTexts":
        keep = ~self.values.is_in(values)
        other = CellTexts.__new__(CellTexts)
        other.values, other.counts = self.values.filter(keep), self.counts.filter(keep)
        other.total = int(other.counts.sum())
        return other

    @cached_property
    def empty_texts(self) -> list[str]:
        return self.values.filter(self.values.is_in(list(EMPTY_TEXTS))).to_list()

    @cached_property
    def lowercase(self) -> set[str]:
        return set(self.values.str.to_lowercase().to_list())

    def measure_match(self, pattern: str) -> float:
        """Return the share of the cells that match *pattern* completely."""
        return self._measure_share(self.values.str.contains(f"^(?:{pattern})$"))

    def list_matches(self, pattern: str) -> list[str]:
        return self.values.filter(self.values.str.contains(f"^(?:{pattern})$")).to_list()

    def has_match(self, pattern: str) -> bool:
        return bool(self.values.str.contains(f"^(?:{pattern})$").any())

    def measure_read(self, options: dict[str, Any]) -> float:
        """Return the share of the cells that become values with these options of a column."""
        return 1 - self._measure_share(self._flag_unread(options))

    def list_unread(self, options: dict[str, Any]) -> tuple[list[str], int]:
        """Return the texts that do not become values, the most frequent first, and the number of their cells."""
        unread = self._flag_unread(options)
        return self.values.filter(unread).to_list(), int(self.counts.filter(unread).sum())

    @property
    def longest(self) -> int:
        """The number of characters of the longest text."""
        longest = self.values.str.len_chars().max()
        return longest if isinstance(longest, int) else 0

    def _flag_unread(self, options: dict[str, Any]) -> pl.Series:
        column = SupplierColumn.model_validate({"from": 1, **options})
        return read_column(column, self.values, is_required=False).is_bad

    def _measure_share(self, mask: pl.Series) -> float:
        return int(self.counts.filter(mask).sum()) / self.total if self.total else 0.0
