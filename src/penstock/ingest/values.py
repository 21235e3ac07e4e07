"""I18: what the cells of a row become, whole columns at a time; and where they are bad."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from penstock.ingest import numbers
from penstock.ingest.contract import Reason
from penstock.ingest.supplier import LARGEST, Column, Kind

_ISO_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ]|$)"
_ISO_TIMES = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_YEARS = (1000, 9999)  # a year of two digits is none of the first century

Check = tuple[pl.Expr, Reason]


@dataclass(frozen=True)
class Reading:
    """How a column's cells are read: expressions made once for a table, over columns named by *place*.

    Of the *ways* from a text to a value each reads what those before it could not. *checks* are in the order in
    which they are told.
    """

    place: int
    cell: pl.Expr
    present: pl.Expr
    text: pl.Expr | None  # None: what is present is the text
    ways: list[pl.Expr]
    checks: list[Check]
    value: pl.Expr

    @property
    def is_bad(self) -> pl.Expr:
        return any_of([check for check, _ in self.checks])


def reading(place: int, column: Column, cell: pl.Expr, *, is_required: bool) -> Reading:
    """How *cell* is read as *column* says."""
    names = _Names(place)
    ways = _WAYS[column.type](column, pl.col(names.text))
    value = pl.col(names.value if ways else names.text)
    checks = _checks(column, pl.col(names.text), value)
    text = None
    present = _present(column, cell)
    if column.extract:
        text = _cased(column, _extracted(column.extract, present))
        checks = [(pl.col(names.present).is_not_null() & pl.col(names.text).is_null(), Reason.PATTERN_MISMATCH), *checks]
    else:
        present = _cased(column, present)
    known = pl.col(names.present if text is not None else names.text)
    if column.default is not None:
        value = pl.when(known.is_null()).then(pl.lit(column.default)).otherwise(value)
    elif is_required:
        checks = [(known.is_null(), Reason.REQUIRED_MISSING), *checks]
    return Reading(place, cell, present, text, ways, checks, value)


def read(frame: pl.DataFrame, readings: Sequence[Reading]) -> pl.DataFrame:
    """*frame* with what its cells say, all columns at once; rare ways only for the rows that need them."""
    frame = frame.with_columns([expression for one in readings for expression in _texts(one)])
    typed = [(one, _Names(one.place)) for one in readings if one.ways]
    frame = frame.with_columns([one.ways[0].alias(names.value) for one, names in typed])
    closer = [
        _read_closer(frame[names.text], frame[names.value], one.ways[1:])
        for one, names in typed
        if frame[names.value].null_count() > frame[names.text].null_count()
    ]
    return frame.with_columns(closer) if closer else frame


def is_unread(column: Column, cells: pl.Series) -> pl.Series:
    """Where *column* makes nothing of a text."""
    one = reading(0, column, pl.col("cell"), is_required=False)
    return read(cells.alias("cell").to_frame(), [one]).select(one.is_bad.alias("bad"))["bad"]


def any_of(checks: Sequence[pl.Expr]) -> pl.Expr:
    """Where any of *checks* is so; of what is not there nothing is wrong."""
    return pl.any_horizontal(checks).fill_null(value=False) if checks else pl.lit(value=False)


class _Names:
    """The columns of a frame that belong to one reading; cells have names of digits only."""

    def __init__(self, place: int) -> None:
        self.present, self.text, self.value = f"present {place}", f"text {place}", f"value {place}"


def _texts(one: Reading) -> list[pl.Expr]:
    names = _Names(one.place)
    if one.text is None:
        return [one.present.alias(names.text)]
    return [one.present.alias(names.present), one.text.alias(names.text)]


def _read_closer(text: pl.Series, value: pl.Series, ways: list[pl.Expr]) -> pl.Series:
    for way in ways:
        rest = (value.is_null() & text.is_not_null()).arg_true()
        if not len(rest):
            break
        # Lazily, because only then what an expression says more than once is done once.
        found = text.gather(rest).to_frame().lazy().select(way.alias("found")).collect()
        value = value.scatter(rest, found["found"])
    return value


def _present(column: Column, cell: pl.Expr) -> pl.Expr:
    """The text after what is replaced in it, null where nothing is there."""
    for pattern, by in column.replace.items():
        cell = cell.str.replace_all(pattern, by)
    empty = ["", *column.empty]
    return cell.str.strip_chars().replace(empty, [None] * len(empty))


def _extracted(pattern: str, text: pl.Expr) -> pl.Expr:
    has_group = re.search(r"(?<!\\)\((?!\?)|\(\?P?<[A-Za-z]", pattern) is not None
    return text.str.extract(f"({pattern})", 2 if has_group else 1).str.strip_chars()


def _cased(column: Column, text: pl.Expr) -> pl.Expr:
    if column.case is None:
        return text
    return text.str.to_uppercase() if column.case == "upper" else text.str.to_lowercase()


def _date(column: Column, text: pl.Expr) -> list[pl.Expr]:
    iso = pl.when(text.str.contains(_ISO_DATE)).then(text.str.slice(0, 10))
    days = [*(_moment(text, form) for form in column.formats), iso.str.to_date("%Y-%m-%d", strict=False)]
    return [_in_our_time(day).cast(pl.Date).cast(pl.String) for day in days]


def _datetime(column: Column, text: pl.Expr) -> list[pl.Expr]:
    moments = [_moment(text, form) for form in (*column.formats, *_ISO_TIMES)]
    return [_in_our_time(one).cast(pl.Datetime("us")).dt.strftime("%Y-%m-%dT%H:%M:%S") for one in moments]


def _moment(text: pl.Expr, form: str) -> pl.Expr:
    if "%H" in form:
        return text.str.to_datetime(form, strict=False, time_unit="us")
    return text.str.to_date(form, strict=False)


def _in_our_time(moment: pl.Expr) -> pl.Expr:
    return pl.when(moment.dt.year().is_between(*_YEARS)).then(moment)


def _enum(column: Column, text: pl.Expr) -> list[pl.Expr]:
    values = column.values if isinstance(column.values, dict) else {value: value for value in column.values or []}
    kinds = {str: pl.String, int: pl.Int64, bool: pl.Boolean}
    known = {key.strip().lower(): value for key, value in values.items()}
    kind = kinds[type(next(iter(values.values())))]
    low = text.str.to_lowercase()
    return [low.replace_strict(list(known), list(known.values()), default=None, return_dtype=kind)]


_WAYS: dict[Kind, Callable[[Column, pl.Expr], list[pl.Expr]]] = {
    Kind.STRING: lambda _column, _text: [],
    Kind.INTEGER: numbers.ways,
    Kind.MONEY: numbers.ways,
    Kind.DECIMAL: numbers.ways,
    Kind.DATE: _date,
    Kind.DATETIME: _datetime,
    Kind.ENUM: _enum,
}
_UNREAD = {
    Kind.INTEGER: Reason.NOT_INTEGER,
    Kind.MONEY: Reason.NOT_MONEY,
    Kind.DECIMAL: Reason.NOT_DECIMAL,
    Kind.DATE: Reason.NOT_DATE,
    Kind.DATETIME: Reason.NOT_DATE,
    Kind.ENUM: Reason.NOT_IN_ENUM,
}


def _checks(column: Column, text: pl.Expr, value: pl.Expr) -> list[Check]:
    """What is asked of a value, in this order."""
    checks: list[Check] = []
    if column.type in _UNREAD:
        checks.append((text.is_not_null() & value.is_null(), _UNREAD[column.type]))
    if column.type in (Kind.INTEGER, Kind.MONEY):  # beyond 53 bits a number is not the same everywhere
        checks.append((~value.is_between(-LARGEST, LARGEST), Reason.OUT_OF_RANGE))
    number = value.cast(pl.Decimal(38, column.scale), strict=False) if column.type is Kind.DECIMAL else value
    if column.min is not None:
        checks.append((number < column.min, Reason.OUT_OF_RANGE))
    if column.max is not None:
        checks.append((number > column.max, Reason.OUT_OF_RANGE))
    if column.pattern:
        checks.append((~text.str.contains(f"^(?:{column.pattern})$"), Reason.PATTERN_MISMATCH))
    if column.max_length is not None:
        checks.append((text.str.len_chars() > column.max_length, Reason.TOO_LONG))
    return checks


@dataclass(frozen=True)
class Typed:
    """Where a column is bad."""

    is_bad: pl.Series


def typed(column: Column, raw: pl.Series, *, is_required: bool) -> Typed:
    del is_required
    return Typed(is_unread(column, raw))
