"""I18: what the cells of a row become, whole columns at a time; and where they are bad."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import lru_cache

import polars as pl

from penstock.ingest.contract import IngestReason
from penstock.ingest.extract.tables import NUMERIC
from penstock.ingest.supplier import LARGEST, ColumnType, SupplierColumn
from penstock.ingest.transform import numbers
from penstock.ingest.transform.numbers import TEXT, Way

_ISO_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ]|$)"
_ISO_TIMES = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M")
# Any other offset than Z is bad: a time of another zone, moved to ours or taken for it, would be wrong unnoticed.
_ISO_TAIL = r"^([0-9-]{10}[T ][0-9]{2}:[0-9]{2})(?:(:[0-9]{2})(?:\.[0-9]+)?)?Z?$"
_MORNING, _EVENING = datetime(2025, 3, 4, 5, 6, 7), datetime(2025, 3, 4, 21, 34, 56)  # noqa: DTZ001 - of no zone
_UNREAD = {
    ColumnType.INTEGER: IngestReason.NOT_INTEGER,
    ColumnType.MONEY: IngestReason.NOT_MONEY,
    ColumnType.DECIMAL: IngestReason.NOT_DECIMAL,
    ColumnType.DATE: IngestReason.NOT_DATE,
    ColumnType.DATETIME: IngestReason.NOT_DATE,
    ColumnType.ENUM: IngestReason.NOT_IN_ENUM,
}

Check = tuple[pl.Expr, IngestReason]


@dataclass(frozen=True)
class ValueFormats:
    """How a column's cells are read: expressions made once for a table, over columns named by *place*.

    Of the *ways* from a text to a value each reads what those before it could not. *checks* are in the order in
    which they are told.
    """

    place: int
    cell: pl.Expr
    present: pl.Expr
    text: pl.Expr | None  # None: what is present is the text
    ways: list[Way]
    checks: list[Check]
    value: pl.Expr
    figures: str | None  # the column that says which cells were numbers in the file; None: that is all the same

    @property
    def is_bad(self) -> pl.Expr:
        return any_of([check for check, _ in self.checks])


@dataclass(frozen=True)
class TypedColumn:
    """A column's values, and where they are bad."""

    value: pl.Series
    is_bad: pl.Series


def reading(place: int, column: SupplierColumn, name: str, *, is_required: bool) -> ValueFormats:
    """How the cells called *name* are read as *column* says."""
    names, cell = _Names(place), pl.col(name)
    ways = _WAYS[column.type](column)
    value = pl.col(names.value if ways else names.text)
    checks = _checks(column, pl.col(names.text), value)
    text = None
    present = _present(column, cell)
    if column.extract:
        text = _cased(column, _extracted(column.extract, present))
        checks = [
            (pl.col(names.present).is_not_null() & pl.col(names.text).is_null(), IngestReason.PATTERN_MISMATCH),
            *checks,
        ]
    else:
        present = _cased(column, present)
    known = pl.col(names.present if text is not None else names.text)
    if column.default is not None:
        value = pl.when(known.is_null()).then(pl.lit(column.default).cast(_dtype(column))).otherwise(value)
    elif is_required:
        checks = [(known.is_null(), IngestReason.REQUIRED_MISSING), *checks]
    figures = NUMERIC + name if column.type in numbers.KINDS else None
    return ValueFormats(place, cell, present, text, ways, checks, value, figures)


def read(frame: pl.DataFrame, readings: Sequence[ValueFormats]) -> pl.DataFrame:
    """*frame* with what its cells say."""
    frame = frame.with_columns([expression for one in readings for expression in _texts(one)])
    return frame.with_columns(
        [_value(_readable(frame, one), one.ways).alias(_Names(one.place).value) for one in readings if one.ways]
    )


def typed(column: SupplierColumn, cells: pl.Series, *, is_required: bool) -> TypedColumn:
    """What *column* alone makes of *cells*."""
    one = reading(0, column, "cell", is_required=is_required)
    made = read(cells.alias("cell").to_frame(), [one]).select(one.value.alias("value"), one.is_bad.alias("bad"))
    return TypedColumn(made["value"], made["bad"])


def any_of(checks: Sequence[pl.Expr]) -> pl.Expr:
    """Where any of *checks* is so; of what is not there nothing is wrong."""
    return pl.any_horizontal(checks).fill_null(value=False) if checks else pl.lit(value=False)


class _Names:
    """The columns of a frame that belong to one reading; cells have names of digits only."""

    def __init__(self, place: int) -> None:
        self.present, self.text, self.value = f"present {place}", f"text {place}", f"value {place}"


def _texts(one: ValueFormats) -> list[pl.Expr]:
    names = _Names(one.place)
    if one.text is None:
        return [one.present.alias(names.text)]
    return [one.present.alias(names.present), one.text.alias(names.text)]


def _readable(frame: pl.DataFrame, one: ValueFormats) -> pl.Series:
    """The texts; a number has a zero put behind it, so that its point cannot be taken for a mark of thousands."""
    text = frame[_Names(one.place).text]
    if one.figures not in frame.columns:
        return text
    # Whoever replaces something in it has a text, and knows what it says.
    is_figure = pl.col(one.figures) & (pl.lit(text) == one.cell.str.strip_chars())
    return frame.select(pl.when(is_figure).then(pl.lit(text) + "0").otherwise(pl.lit(text))).to_series()


def _value(text: pl.Series, ways: list[Way]) -> pl.Series:
    """What the first way makes of a text that makes anything of it; only what is left goes the next one."""
    value = _made(text, ways[0])
    for way in ways[1:]:
        if value.null_count() == text.null_count():
            break
        rest = (value.is_null() & text.is_not_null()).arg_true()
        value = value.scatter(rest, _made(text.gather(rest), way))
    return value


def _made(text: pl.Series, way: Way) -> pl.Series:
    frame = text.alias("text").to_frame()
    for column in way:
        frame = frame.with_columns(column)
    return frame.to_series(-1)


def _present(column: SupplierColumn, cell: pl.Expr) -> pl.Expr:
    """The text after what is replaced in it, null where nothing is there."""
    for pattern, by in column.replace.items():
        cell = cell.str.replace_all(pattern, by)
    empty = ["", *column.empty]
    return cell.str.strip_chars().replace(empty, [None] * len(empty))


def _extracted(pattern: str, text: pl.Expr) -> pl.Expr:
    has_group = re.search(r"(?<!\\)\((?!\?)|\(\?P?<[A-Za-z]", pattern) is not None
    return text.str.extract(f"({pattern})", 2 if has_group else 1).str.strip_chars()


def _cased(column: SupplierColumn, text: pl.Expr) -> pl.Expr:
    if column.case is None:
        return text
    return text.str.to_uppercase() if column.case == "upper" else text.str.to_lowercase()


def _date(column: SupplierColumn) -> list[Way]:
    iso = pl.when(TEXT.str.contains(_ISO_DATE)).then(TEXT.str.slice(0, 10)).str.to_date("%Y-%m-%d", strict=False)
    days = [*(_moment(form) for form in column.formats), iso]
    return [[day.cast(pl.Date).alias("moment"), _in_our_time().cast(pl.String).alias("value")] for day in days]


def _datetime(column: SupplierColumn) -> list[Way]:
    forms = (*column.formats, *_ISO_TIMES, "%Y-%m-%d")
    value = _in_our_time().dt.strftime("%Y-%m-%dT%H:%M:%S").alias("value")
    moments = {form: _moment(form).cast(pl.Datetime("us")).alias("moment") for form in forms}
    to_the_second = TEXT.str.replace(_ISO_TAIL, "$1$2").alias("text")
    return [
        *([moments[form], value] for form in forms),
        *([to_the_second, moments[form], value] for form in _ISO_TIMES),
    ]


def _moment(form: str) -> pl.Expr:
    # To look a text up in a cache takes longer than to read it.
    if _has_time(form):
        return TEXT.str.to_datetime(form, strict=False, time_unit="us", cache=False)
    return TEXT.str.to_date(form, strict=False, cache=False)


@lru_cache
def _has_time(form: str) -> bool:
    """Whether *form* tells the morning from the evening."""
    return pl.Series([_MORNING, _EVENING]).dt.strftime(form).n_unique() > 1


def _in_our_time() -> pl.Expr:
    """A year of two digits is none of the first century."""
    moment = pl.col("moment")
    return pl.when(moment.is_between(date(1000, 1, 1), date(9999, 12, 31))).then(moment)


def _enum(column: SupplierColumn) -> list[Way]:
    values = column.values if isinstance(column.values, dict) else {value: value for value in column.values or []}
    known = {key.strip().lower(): value for key, value in values.items()}
    low = TEXT.str.to_lowercase()
    value = low.replace_strict(list(known), list(known.values()), default=None, return_dtype=_dtype(column))
    return [[value.alias("value")]]


def _dtype(column: SupplierColumn) -> type[pl.DataType]:
    """What a column's values are."""
    if column.type is ColumnType.ENUM and isinstance(column.values, dict):
        return {str: pl.String, int: pl.Int64, bool: pl.Boolean}[type(next(iter(column.values.values())))]
    return pl.Int64 if column.type in (ColumnType.INTEGER, ColumnType.MONEY) else pl.String


_WAYS: dict[ColumnType, Callable[[SupplierColumn], list[Way]]] = {
    ColumnType.STRING: lambda _column: [],
    ColumnType.INTEGER: numbers.ways,
    ColumnType.MONEY: numbers.ways,
    ColumnType.DECIMAL: numbers.ways,
    ColumnType.DATE: _date,
    ColumnType.DATETIME: _datetime,
    ColumnType.ENUM: _enum,
}


def _checks(column: SupplierColumn, text: pl.Expr, value: pl.Expr) -> list[Check]:
    """What is asked of a value, in this order."""
    checks: list[Check] = []
    if column.type in _UNREAD:
        checks.append((text.is_not_null() & value.is_null(), _UNREAD[column.type]))
    if column.type in (ColumnType.INTEGER, ColumnType.MONEY):  # beyond 53 bits a number is not the same everywhere
        checks.append((~value.is_between(-LARGEST, LARGEST), IngestReason.OUT_OF_RANGE))
    number = value.cast(pl.Decimal(38, column.scale), strict=False) if column.type is ColumnType.DECIMAL else value
    if column.min is not None:
        checks.append((number < column.min, IngestReason.OUT_OF_RANGE))
    if column.max is not None:
        checks.append((number > column.max, IngestReason.OUT_OF_RANGE))
    if column.pattern:
        checks.append((~text.str.contains(f"^(?:{column.pattern})$"), IngestReason.PATTERN_MISMATCH))
    if column.max_length is not None:
        checks.append((text.str.len_chars() > column.max_length, IngestReason.TOO_LONG))
    return checks
