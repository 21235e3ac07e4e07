"""I18: the values of cells and the checks of values, a column at a time."""

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
from penstock.ingest.transform.numbers import TEXT, ValueParser

_ISO_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ]|$)"
_ISO_TIMES = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M")
# Only the offset Z is accepted: a time of another zone would be converted or misread unnoticed.
_ISO_TIMESTAMP = r"^([0-9-]{10}[T ][0-9]{2}:[0-9]{2})(?:(:[0-9]{2})(?:\.[0-9]+)?)?Z?$"
_SAMPLE_A, _SAMPLE_B = datetime(2025, 3, 4, 5, 6, 7), datetime(2025, 3, 4, 21, 34, 56)  # noqa: DTZ001 - without a zone
_TYPE_REASONS = {
    ColumnType.INTEGER: IngestReason.NOT_INTEGER,
    ColumnType.MONEY: IngestReason.NOT_MONEY,
    ColumnType.DECIMAL: IngestReason.NOT_DECIMAL,
    ColumnType.DATE: IngestReason.NOT_DATE,
    ColumnType.DATETIME: IngestReason.NOT_DATE,
    ColumnType.ENUM: IngestReason.NOT_IN_ENUM,
}

Check = tuple[pl.Expr, IngestReason]


@dataclass(frozen=True)
class ValuePlan:
    """The plan for reading the cells of a column: expressions for a table, over columns named by *position*.

    Each of the *parsers* reads the texts that those before it could not. *checks* are in the order of their priority.
    """

    position: int
    cell: pl.Expr
    present: pl.Expr
    text: pl.Expr | None  # None: the present cells are the texts
    parsers: list[ValueParser]
    checks: list[Check]
    value: pl.Expr
    numeric_column: str | None  # the flags of the cells that are numbers in the file; None for other types

    @property
    def is_bad(self) -> pl.Expr:
        return combine_checks([check for check, _ in self.checks])


@dataclass(frozen=True)
class TypedColumn:
    """The values of a column, and the flags of bad cells."""

    value: pl.Series
    is_bad: pl.Series


def plan_value(position: int, column: SupplierColumn, name: str, *, is_required: bool) -> ValuePlan:
    """Return the plan for reading the cells *name* as *column* is configured."""
    names, cell = _ColumnNames(position), pl.col(name)
    parsers = _PARSERS[column.type](column)
    value = pl.col(names.value if parsers else names.text)
    checks = _list_checks(column, pl.col(names.text), value)
    text = None
    present = _select_present(column, cell)
    if column.extract:
        text = _convert_case(column, _extract(column.extract, present))
        checks = [
            (pl.col(names.present).is_not_null() & pl.col(names.text).is_null(), IngestReason.PATTERN_MISMATCH),
            *checks,
        ]
    else:
        present = _convert_case(column, present)
    filled = pl.col(names.present if text is not None else names.text)
    if column.default is not None:
        value = pl.when(filled.is_null()).then(pl.lit(column.default).cast(_choose_value_type(column))).otherwise(value)
    elif is_required:
        checks = [(filled.is_null(), IngestReason.REQUIRED_MISSING), *checks]
    numeric_column = NUMERIC + name if column.type in numbers.KINDS else None
    return ValuePlan(position, cell, present, text, parsers, checks, value, numeric_column)


def read_values(frame: pl.DataFrame, plans: Sequence[ValuePlan]) -> pl.DataFrame:
    """Return *frame* with the texts and the values of its cells."""
    frame = frame.with_columns([expression for plan in plans for expression in _make_text_columns(plan)])
    return frame.with_columns(
        _parse_texts(_select_texts(frame, plan), plan.parsers).alias(_ColumnNames(plan.position).value)
        for plan in plans
        if plan.parsers
    )


def read_column(column: SupplierColumn, cells: pl.Series, *, is_required: bool) -> TypedColumn:
    """Return the values of *cells*, read as *column* is configured."""
    plan = plan_value(0, column, "cell", is_required=is_required)
    frame = read_values(cells.alias("cell").to_frame(), [plan])
    frame = frame.select(plan.value.alias("value"), plan.is_bad.alias("bad"))
    return TypedColumn(frame["value"], frame["bad"])


def combine_checks(checks: Sequence[pl.Expr]) -> pl.Expr:
    """Return an expression that is true where any of *checks* is true; null counts as false."""
    return pl.any_horizontal(checks).fill_null(value=False) if checks else pl.lit(value=False)


class _ColumnNames:
    """The names of the columns of a plan; the columns of cells have names of digits."""

    def __init__(self, position: int) -> None:
        self.present, self.text, self.value = f"present {position}", f"text {position}", f"value {position}"


def _make_text_columns(plan: ValuePlan) -> list[pl.Expr]:
    names = _ColumnNames(plan.position)
    if plan.text is None:
        return [plan.present.alias(names.text)]
    return [plan.present.alias(names.present), plan.text.alias(names.text)]


def _select_texts(frame: pl.DataFrame, plan: ValuePlan) -> pl.Series:
    """Return the texts; a numeric cell gets a trailing zero, so that its point is not read as a group separator."""
    text = frame[_ColumnNames(plan.position).text]
    if plan.numeric_column not in frame.columns:
        return text
    # A cell that `replace` has changed counts as a text.
    is_numeric = pl.col(plan.numeric_column) & (pl.lit(text) == plan.cell.str.strip_chars())
    return frame.select(pl.when(is_numeric).then(pl.lit(text) + "0").otherwise(pl.lit(text))).to_series()


def _parse_texts(text: pl.Series, parsers: list[ValueParser]) -> pl.Series:
    """Return the value of each text by the first parser that reads it; later parsers get only the rest."""
    value = _apply_parser(text, parsers[0])
    for parser in parsers[1:]:
        if value.null_count() == text.null_count():
            break
        rest = (value.is_null() & text.is_not_null()).arg_true()
        value = value.scatter(rest, _apply_parser(text.gather(rest), parser))
    return value


def _apply_parser(text: pl.Series, parser: ValueParser) -> pl.Series:
    frame = text.alias("text").to_frame()
    for column in parser:
        frame = frame.with_columns(column)
    return frame.to_series(-1)


def _select_present(column: SupplierColumn, cell: pl.Expr) -> pl.Expr:
    """Return the text after `replace`, and null for empty cells."""
    for pattern, by in column.replace.items():
        cell = cell.str.replace_all(pattern, by)
    empty = ["", *column.empty]
    return cell.str.strip_chars().replace(empty, [None] * len(empty))


def _extract(pattern: str, text: pl.Expr) -> pl.Expr:
    has_group = re.search(r"(?<!\\)\((?!\?)|\(\?P?<[A-Za-z]", pattern) is not None
    return text.str.extract(f"({pattern})", 2 if has_group else 1).str.strip_chars()


def _convert_case(column: SupplierColumn, text: pl.Expr) -> pl.Expr:
    if column.case is None:
        return text
    return text.str.to_uppercase() if column.case == "upper" else text.str.to_lowercase()


def _list_date_parsers(column: SupplierColumn) -> list[ValueParser]:
    iso = pl.when(TEXT.str.contains(_ISO_DATE)).then(TEXT.str.slice(0, 10)).str.to_date("%Y-%m-%d", strict=False)
    days = [*(_parse_moment(form) for form in column.formats), iso]
    return [
        [day.cast(pl.Date).alias("moment"), _require_four_digit_year().cast(pl.String).alias("value")] for day in days
    ]


def _list_datetime_parsers(column: SupplierColumn) -> list[ValueParser]:
    forms = (*column.formats, *_ISO_TIMES, "%Y-%m-%d")
    value = _require_four_digit_year().dt.strftime("%Y-%m-%dT%H:%M:%S").alias("value")
    moments = {form: _parse_moment(form).cast(pl.Datetime("us")).alias("moment") for form in forms}
    to_the_second = TEXT.str.replace(_ISO_TIMESTAMP, "$1$2").alias("text")
    return [
        *([moments[form], value] for form in forms),
        *([to_the_second, moments[form], value] for form in _ISO_TIMES),
    ]


def _parse_moment(form: str) -> pl.Expr:
    # The cache of polars is slower than parsing.
    if _has_time(form):
        return TEXT.str.to_datetime(form, strict=False, time_unit="us", cache=False)
    return TEXT.str.to_date(form, strict=False, cache=False)


@lru_cache
def _has_time(form: str) -> bool:
    """Return whether the format *form* contains a time of day."""
    return pl.Series([_SAMPLE_A, _SAMPLE_B]).dt.strftime(form).n_unique() > 1


def _require_four_digit_year() -> pl.Expr:
    """Return the moment; null for a year before 1000, which is the misread year of two digits."""
    moment = pl.col("moment")
    return pl.when(moment.is_between(date(1000, 1, 1), date(9999, 12, 31))).then(moment)


def _list_enum_parsers(column: SupplierColumn) -> list[ValueParser]:
    values = column.values if isinstance(column.values, dict) else {value: value for value in column.values or []}
    by_key = {key.strip().lower(): value for key, value in values.items()}
    low = TEXT.str.to_lowercase()
    value = low.replace_strict(
        list(by_key), list(by_key.values()), default=None, return_dtype=_choose_value_type(column)
    )
    return [[value.alias("value")]]


def _choose_value_type(column: SupplierColumn) -> type[pl.DataType]:
    """Return the polars type of the values of a column."""
    if column.type is ColumnType.ENUM and isinstance(column.values, dict):
        return {str: pl.String, int: pl.Int64, bool: pl.Boolean}[type(next(iter(column.values.values())))]
    return pl.Int64 if column.type in (ColumnType.INTEGER, ColumnType.MONEY) else pl.String


_PARSERS: dict[ColumnType, Callable[[SupplierColumn], list[ValueParser]]] = {
    ColumnType.STRING: lambda _column: [],
    ColumnType.INTEGER: numbers.list_parsers,
    ColumnType.MONEY: numbers.list_parsers,
    ColumnType.DECIMAL: numbers.list_parsers,
    ColumnType.DATE: _list_date_parsers,
    ColumnType.DATETIME: _list_datetime_parsers,
    ColumnType.ENUM: _list_enum_parsers,
}


def _list_checks(column: SupplierColumn, text: pl.Expr, value: pl.Expr) -> list[Check]:
    """Return the checks of a value, in their order."""
    checks: list[Check] = []
    if column.type in _TYPE_REASONS:
        checks.append((text.is_not_null() & value.is_null(), _TYPE_REASONS[column.type]))
    if column.type in (ColumnType.INTEGER, ColumnType.MONEY):  # larger integers are not exact in every JSON parser
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
