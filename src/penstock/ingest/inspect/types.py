"""The type of a column: the first type that its header allows and that reads nearly all of its cells."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.ingest.inspect.cells import CellTexts
from penstock.ingest.inspect.formats import (
    is_fractional,
    measure_moment,
    measure_money,
    measure_options,
    measure_quantity,
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
_FEW = 0.05  # share of unreadable cells above which their texts are read as empty
# The type of a column without filled cells.
_DEFAULT_TYPES = {ColumnHint.MONEY: "money", ColumnHint.QUANTITY: "integer", ColumnHint.MOMENT: "date"}


@dataclass(frozen=True)
class TypeGuess:
    """The options of a column, and the doubts about them."""

    options: dict[str, Any]
    doubts: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        return str(self.options["type"])


@dataclass(frozen=True)
class ColumnContext:
    """The properties of a column that do not depend on its cells."""

    hint: ColumnHint
    is_english: bool


def guess_type(cells: CellTexts, context: ColumnContext) -> TypeGuess:
    """Return the type of *cells* with its options."""
    if (pair := _guess_boolean(cells, context)) is not None:
        return pair
    empty_texts = cells.empty_texts
    filled = cells.exclude(empty_texts)
    if filled.total == 0:
        return _add_empty(TypeGuess({"type": _DEFAULT_TYPES.get(context.hint, "string")}), empty_texts)
    for propose in _PROPOSERS:
        guess = propose(filled, context)
        if guess is not None:
            return _add_empty_words(guess, filled, empty_texts)
    # The header suggests a type that the cells do not have.
    expected = {ColumnHint.MONEY: "amounts", ColumnHint.MOMENT: "dates"}.get(context.hint)
    doubt = f"the header suggests {expected}, but the cells contain texts such as {filled.values[0]!r}"
    doubts = (doubt,) if expected else ()
    return _add_empty(TypeGuess({"type": "string"}, doubts), empty_texts)


def _guess_boolean(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    if context.hint in (ColumnHint.CODE, ColumnHint.TEXT, ColumnHint.MONEY) or len(cells.values) > 4 or cells.total < 2:
        return None
    for pair, truth in _PAIRS:
        if cells.lowercase == pair:
            values = {text: text == truth for text in sorted(pair, key=lambda text: text != truth)}
            return TypeGuess({"type": "enum", "values": values})
    return None


def _guess_code(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    """Guess a text for codes: as a number, a code would lose its leading zeros."""
    if context.hint is ColumnHint.CODE:
        return TypeGuess({"type": "string"})
    if context.hint is not ColumnHint.NONE:
        return None
    digits = cells.measure_match("[0-9]+")
    is_code = digits > 0.8 and (cells.has_match(_LEADING_ZERO) or cells.measure_match(_CODES) > 0.8)
    is_mixed = digits > 0 and cells.has_match(_LETTERED) and digits + cells.measure_match(_LETTERED) > 0.99
    return TypeGuess({"type": "string"}) if is_code or is_mixed else None


def _guess_moment(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    if context.hint not in (ColumnHint.MOMENT, ColumnHint.NONE):
        return None
    return _make_guess(measure_moment(cells, is_named=context.hint is ColumnHint.MOMENT, is_english=context.is_english))


def _guess_money(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    if context.hint not in (ColumnHint.MONEY, ColumnHint.NONE):
        return None
    return _make_guess(measure_money(cells, is_named=context.hint is ColumnHint.MONEY))


def _guess_quantity(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    if context.hint not in (ColumnHint.QUANTITY, ColumnHint.MEASURE, ColumnHint.NONE):
        return None
    # Very few fractions are likely to be mistakes.
    if is_fractional(cells) and cells.measure_match(r"[+-]?[0-9]*[.,][0-9]*[1-9][0-9]*") >= 0.01:
        return None
    return _make_guess(measure_quantity(cells, is_named=context.hint is ColumnHint.QUANTITY))


def _guess_measure(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    if context.hint not in (ColumnHint.QUANTITY, ColumnHint.MEASURE, ColumnHint.NONE):
        return None
    return _make_guess(measure_options(cells, is_named=context.hint is not ColumnHint.NONE))


def _guess_enum(cells: CellTexts, context: ColumnContext) -> TypeGuess | None:
    """Guess an enum for a few words that repeat; not for brands and categories, which get new values."""
    if context.hint not in (ColumnHint.NONE, ColumnHint.QUANTITY) or cells.total < _ENUM_CELLS:
        return None
    words: dict[str, str] = {}
    for text in cells.values.head(_ENUM_VALUES * 3):
        words.setdefault(text.casefold(), text)
    is_few = 2 <= len(words) <= _ENUM_VALUES and len(cells.values) <= _ENUM_VALUES * 3
    is_short = cells.longest <= _ENUM_LENGTH
    return TypeGuess({"type": "enum", "values": sorted(words.values())}) if is_few and is_short else None


_PROPOSERS: tuple[Callable[[CellTexts, ColumnContext], TypeGuess | None], ...] = (
    _guess_code,
    _guess_moment,
    _guess_money,
    _guess_quantity,
    _guess_measure,
    _guess_enum,
)


def _make_guess(proposal: tuple[dict[str, Any], list[str]] | None) -> TypeGuess | None:
    return None if proposal is None else TypeGuess(proposal[0], tuple(proposal[1]))


def _add_empty_words(guess: TypeGuess, cells: CellTexts, empty_texts: list[str]) -> TypeGuess:
    """Add words to `empty` if they occur in many cells instead of a value."""
    unread, count = cells.list_unread(guess.options)
    words = [text for text in unread if not any(letter.isdigit() for letter in text)]
    if count <= cells.total * _FEW or not words or len(words) > 10:
        return _add_empty(guess, empty_texts)
    doubt = f"{', '.join(repr(word) for word in words[:3])} {'is' if len(words) == 1 else 'are'} read as empty"
    return _add_empty(TypeGuess(guess.options, (*guess.doubts, doubt)), [*empty_texts, *words])


def _add_empty(guess: TypeGuess, empty_texts: list[str]) -> TypeGuess:
    return TypeGuess({**guess.options, "empty": empty_texts}, guess.doubts) if empty_texts else guess
