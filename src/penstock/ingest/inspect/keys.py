"""The key: a column that is always there and never the same twice, best one that is called so."""

from dataclasses import dataclass

import polars as pl

from penstock.ingest.inspect.vocabulary import Hint
from penstock.ingest.supplier import CATEGORY

_PREFERRED = ("sku", "barcode", "vendor_code", "code", "id")
_TOLERATED = 0.02  # of cells that are empty or come again, in a column that is called as keys are
_TEXTS = ("string", "integer")
_LONGEST = 60


@dataclass(frozen=True)
class Candidate:
    """A field that could be the key: which table, and which text, each of its cells has."""

    name: str
    hint: Hint
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
class Key:
    """The fields that make it, and what a person should know."""

    names: list[str]
    warnings: list[str]


def key_of(candidates: list[Candidate], *, has_sheets: bool) -> Key:
    """The key, the category beside it if that makes it unique; none with a warning."""
    usable = [one for one in candidates if one.is_everywhere and one.type in _TEXTS and one.hint in _HINTS]
    rejected: list[str] = []
    for one in sorted(usable, key=_preference):
        is_code = one.hint is Hint.CODE
        allowed = _TOLERATED if is_code else 0.0
        if not is_code and not one.is_short:
            continue
        for names, within in (([one.name], False), ([CATEGORY, one.name], True))[: 2 if has_sheets else 1]:
            repeats = one.repeats(within_tables=within)
            if repeats <= allowed:
                return Key(names, [*rejected, *_doubts(one, repeats)])
        if one.name in _PREFERRED:
            rejected.append(f"{one.name} is no key: {repeats:.1%} of its cells are empty or come again")
    return Key([], [*rejected, "no unique column: no key proposed, so rows that come twice are not noticed"])


_HINTS = (Hint.CODE, Hint.COUNTER, Hint.NONE, Hint.TEXT)


def _preference(one: Candidate) -> tuple[int, int]:
    order = _PREFERRED.index(one.name) if one.name in _PREFERRED else len(_PREFERRED)
    return order, _HINTS.index(one.hint)


def _doubts(one: Candidate, repeats: float) -> list[str]:
    if not repeats:
        return []
    return [f"{repeats:.1%} of the cells of the key {one.name} are empty or come again: such rows are bad"]
