"""What type a column gets: the first that its name allows and that reads nearly all of its cells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.ingest.inspect.cells import CellTexts
from penstock.ingest.inspect.formats import (
    is_fractional,
    measure_options,
    moment_options,
    money_options,
    quantity_options,
)
from penstock.ingest.inspect.vocabulary import ColumnHint

_PAIRS = (
    ({"да", "нет"}, "да"),
    ({"yes", "no"}, "yes"),
    ({"true", "false"}, "true"),
    ({"y", "n"}, "y"),
    ({"есть", "нет"}, "есть"),
    ({"есть", "нет в наличии"}, "есть"),
    ({"в наличии", "нет в наличии"}, "в наличии"),
    ({"в наличии", "нет"}, "в наличии"),
    ({"в наличии", "под заказ"}, "в наличии"),
    ({"in stock", "out of stock"}, "in stock"),
    ({"+", "-"}, "+"),
)
_CODES = r"[0-9]{8,14}"
_LEADING_ZERO = r"0[0-9]+"
_LETTERED = r"[A-Za-zА-Яа-яЁё]\S*[0-9]\S*|[0-9]+[-/_]\S*[A-Za-zА-Яа-яЁё]\S*"
_ENUM_VALUES, _ENUM_CELLS, _ENUM_LENGTH = 6, 100, 30
_FEW = 0.05  # of cells that no type reads, beyond which they are taken for empty
# What a column without any cell is taken for.
_UNSEEN = {ColumnHint.MONEY: "money", ColumnHint.QUANTITY: "integer", ColumnHint.MOMENT: "date"}


@dataclass(frozen=True)
class TypeGuess:
    """Options of a column, and what a person should know of them."""

    options: dict[str, Any]
    doubts: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        return str(self.options["type"])


@dataclass(frozen=True)
class KnownFormats:
    """What is known of a column before its cells are looked at."""

    hint: ColumnHint
    is_english: bool


def guess(cells: CellTexts, known: KnownFormats) -> TypeGuess:
    """The type of *cells* with its options."""
    if (pair := _boolean(cells, known)) is not None:
        return pair
    nothings = cells.nothings
    filled = cells.without(nothings)
    if filled.total == 0:
        return _with_empty(TypeGuess({"type": _UNSEEN.get(known.hint, "string")}), nothings)
    for propose in _PROPOSERS:
        found = propose(filled, known)
        if found is not None:
            return _with_words_for_nothing(found, filled, nothings)
    # What a header lets one expect, and its cells do not keep.
    expected = {ColumnHint.MONEY: "money", ColumnHint.MOMENT: "dates"}.get(known.hint)
    doubts = (f"not {expected}, as its header says, but texts such as {filled.values[0]!r}",) if expected else ()
    return _with_empty(TypeGuess({"type": "string"}, doubts), nothings)


def _boolean(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    if known.hint in (ColumnHint.CODE, ColumnHint.TEXT, ColumnHint.MONEY) or len(cells.values) > 4 or cells.total < 2:
        return None
    for pair, truth in _PAIRS:
        if cells.folded == pair:
            values = {text: text == truth for text in sorted(pair, key=lambda text: text != truth)}
            return TypeGuess({"type": "enum", "values": values})
    return None


def _code(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    """Codes are texts, even when they look like numbers: their zeros count."""
    if known.hint is ColumnHint.CODE:
        return TypeGuess({"type": "string"})
    if known.hint is not ColumnHint.NONE:
        return None
    digits = cells.share("[0-9]+")
    is_code = digits > 0.8 and (cells.has(_LEADING_ZERO) or cells.share(_CODES) > 0.8)
    is_mixed = digits > 0 and cells.has(_LETTERED) and digits + cells.share(_LETTERED) > 0.99
    return TypeGuess({"type": "string"}) if is_code or is_mixed else None


def _moment(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    if known.hint not in (ColumnHint.MOMENT, ColumnHint.NONE):
        return None
    return _guessed(moment_options(cells, is_named_so=known.hint is ColumnHint.MOMENT, is_english=known.is_english))


def _money(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    if known.hint not in (ColumnHint.MONEY, ColumnHint.NONE):
        return None
    return _guessed(money_options(cells, is_named_so=known.hint is ColumnHint.MONEY))


def _quantity(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    if known.hint not in (ColumnHint.QUANTITY, ColumnHint.MEASURE, ColumnHint.NONE):
        return None
    # Fractions may be so few that they are mistakes.
    if is_fractional(cells) and cells.share(r"[+-]?[0-9]*[.,][0-9]*[1-9][0-9]*") >= 0.01:
        return None
    return _guessed(quantity_options(cells, is_named_so=known.hint is ColumnHint.QUANTITY))


def _measure(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    if known.hint not in (ColumnHint.QUANTITY, ColumnHint.MEASURE, ColumnHint.NONE):
        return None
    return _guessed(measure_options(cells, is_named_so=known.hint is not ColumnHint.NONE))


def _enum(cells: CellTexts, known: KnownFormats) -> TypeGuess | None:
    """Few words that come again and again; brands and categories may get new ones any day."""
    if known.hint not in (ColumnHint.NONE, ColumnHint.QUANTITY) or cells.total < _ENUM_CELLS:
        return None
    usual: dict[str, str] = {}
    for text in cells.values.head(_ENUM_VALUES * 3):
        usual.setdefault(text.casefold(), text)
    is_few = 2 <= len(usual) <= _ENUM_VALUES and len(cells.values) <= _ENUM_VALUES * 3
    is_short = cells.longest <= _ENUM_LENGTH
    return TypeGuess({"type": "enum", "values": sorted(usual.values())}) if is_few and is_short else None


_PROPOSERS: tuple[Callable[[CellTexts, KnownFormats], TypeGuess | None], ...] = (
    _code,
    _moment,
    _money,
    _quantity,
    _measure,
    _enum,
)


def _guessed(found: tuple[dict[str, Any], list[str]] | None) -> TypeGuess | None:
    return None if found is None else TypeGuess(found[0], tuple(found[1]))


def _with_words_for_nothing(found: TypeGuess, cells: CellTexts, nothings: list[str]) -> TypeGuess:
    """Where many cells hold a word instead of a value, the word means that there is none."""
    unread, count = cells.unread_by(found.options)
    words = [text for text in unread if not any(letter.isdigit() for letter in text)]
    if count <= cells.total * _FEW or not words or len(words) > 10:
        return _with_empty(found, nothings)
    told = f"{', '.join(repr(word) for word in words[:3])} {'is' if len(words) == 1 else 'are'} taken for empty"
    return _with_empty(TypeGuess(found.options, (*found.doubts, told)), [*nothings, *words])


def _with_empty(found: TypeGuess, nothings: list[str]) -> TypeGuess:
    return TypeGuess({**found.options, "empty": nothings}, found.doubts) if nothings else found
