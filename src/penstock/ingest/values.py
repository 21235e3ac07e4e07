"""I18: what a column's text becomes, a whole column at a time; and where it is bad."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import polars as pl

from penstock.ingest.contract import Reason
from penstock.ingest.supplier import LARGEST, Column, Kind

_BLANKS = r"[ \t\x{00a0}\x{2009}\x{202f}'’`]"
_CURRENCY = r"(?:₽|\$|€|£|¥|₸|руб(?:\.|лей|ля|ль)?|р\.?|тг\.?|rub|usd|eur|kzt|byn|cny|gbp)"
_MORE = r"^(?:>=?|≥|(?i:более|больше|свыше|от|over|morethan|atleast)\.?)"
# [0-9], not \d: the digits of all scripts take milliseconds to compile, and are no numbers to us.
_PLAIN = r"^[+-]?[0-9]+$"
_LONE = r"^[+-]?[0-9]*[.,][0-9]+$"
_BY_COMMAS = r"^[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?$"
_BY_POINTS = r"^[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]+)?$"
_ISO_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ]|$)"
_ISO_TIMES = ("%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%d")
_FINER = 6  # digits looked at when rounding

Checks = list[tuple[pl.Series, Reason]]
Tests = list[tuple[pl.Expr, Reason]]  # over the columns `text` and `value`
_TEXT, _VALUE = pl.col("text"), pl.col("value")


@dataclass(frozen=True)
class Typed:
    """A column's values, and for each way they can be bad where that is so, the first one first."""

    value: pl.Series
    checks: Checks

    @cached_property
    def is_bad(self) -> pl.Series | None:
        """Where anything is wrong; None when nothing is."""
        found = [check for check, _ in self.checks if check.any()]
        return any_of(found) if found else None

    def reason(self, rows: pl.Series) -> pl.Series:
        """The first thing that is wrong in each of *rows*, or null."""
        told = nothing(len(rows))
        for check, reason in reversed([(check, reason) for check, reason in self.checks if check.any()]):
            told = same(reason.value, len(rows)).zip_with(check.gather(rows), told)
        return told


def any_of(masks: Sequence[pl.Series]) -> pl.Series:
    """Where any of *masks* is so."""
    together = masks[0]
    for mask in masks[1:]:
        together = together | mask
    return together


def same(text: str, length: int) -> pl.Series:
    return pl.repeat(text, length, dtype=pl.String, eager=True)


def nothing(length: int) -> pl.Series:
    return pl.repeat(None, length, dtype=pl.String, eager=True)


def typed(column: Column, raw: pl.Series, *, is_required: bool) -> Typed:
    """What *raw*, the text of the cells, becomes."""
    present = _present(column, raw)
    text = _extracted(column, present)
    value = _KINDS[column.type](column, text)
    checks = _checked(text, value, _tests(column))
    if column.extract:
        checks = [(present.is_not_null() & text.is_null(), Reason.PATTERN_MISMATCH), *checks]
    if column.default is not None:
        default = pl.repeat(column.default, len(raw), dtype=value.dtype, eager=True)
        value = value.zip_with(present.is_not_null(), default)
    elif is_required:
        checks = [(present.is_null(), Reason.REQUIRED_MISSING), *checks]
    return Typed(value, checks)


def _present(column: Column, raw: pl.Series) -> pl.Series:
    """The text after what is replaced in it, null where nothing is there."""
    text = pl.col("raw")
    for pattern, by in column.replace.items():
        text = text.str.replace_all(pattern, by)
    empty = ["", *column.empty]
    return _made(raw, "raw", text.str.strip_chars().replace(empty, [None] * len(empty)))


def _extracted(column: Column, text: pl.Series) -> pl.Series:
    if column.extract:
        found = _TEXT.str.extract(f"({column.extract})", 2 if _has_group(column.extract) else 1)
        text = _made(text, "text", found.str.strip_chars())
    if column.case is not None:
        text = text.str.to_uppercase() if column.case == "upper" else text.str.to_lowercase()
    return text


def _has_group(pattern: str) -> bool:
    return re.search(r"(?<!\\)\((?!\?)|\(\?P?<[A-Za-z]", pattern) is not None


def _string(_column: Column, text: pl.Series) -> pl.Series:
    return text


def _integer(column: Column, text: pl.Series) -> pl.Series:
    number = _number(column, text, 0)
    return (_rounded(number, 0) if column.round else number).cast(pl.Int64, strict=False)


def _money(column: Column, text: pl.Series) -> pl.Series:
    # A decimal is an integer of its last digits: here, of minor units.
    return _scaled(column, text).to_physical().cast(pl.Int64, strict=False)


def _decimal(column: Column, text: pl.Series) -> pl.Series:
    return _scaled(column, text).cast(pl.String)


def _date(column: Column, text: pl.Series) -> pl.Series:
    forms = [
        _moment(form).dt.date() if "%H" in form else _TEXT.str.to_date(form, strict=False) for form in column.formats
    ]
    iso = pl.when(_TEXT.str.contains(_ISO_DATE)).then(_TEXT.str.slice(0, 10)).str.to_date("%Y-%m-%d", strict=False)
    return _first(text, [*forms, iso], pl.Date).cast(pl.String)


def _datetime(column: Column, text: pl.Series) -> pl.Series:
    forms = [
        _moment(form) if "%H" in form else _TEXT.str.to_date(form, strict=False).cast(pl.Datetime("us"))
        for form in (*column.formats, *_ISO_TIMES)
    ]
    return _first(text, forms, pl.Datetime("us")).dt.strftime("%Y-%m-%dT%H:%M:%S")


def _enum(column: Column, text: pl.Series) -> pl.Series:
    values = column.values if isinstance(column.values, dict) else {value: value for value in column.values or []}
    kinds = {str: pl.String, int: pl.Int64, bool: pl.Boolean}
    known = {key.strip().lower(): value for key, value in values.items()}
    kind = kinds[type(next(iter(values.values())))]
    low = _TEXT.str.to_lowercase()
    return _made(text, "text", low.replace_strict(list(known), list(known.values()), default=None, return_dtype=kind))


_KINDS: dict[Kind, Callable[[Column, pl.Series], pl.Series]] = {
    Kind.STRING: _string,
    Kind.INTEGER: _integer,
    Kind.MONEY: _money,
    Kind.DECIMAL: _decimal,
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


def _tests(column: Column) -> Tests:
    """What is asked of a value, in this order."""
    tests: Tests = []
    if column.type in _UNREAD:
        tests.append((_TEXT.is_not_null() & _VALUE.is_null(), _UNREAD[column.type]))
    if column.type in (Kind.INTEGER, Kind.MONEY):  # beyond 53 bits a number is not the same everywhere
        tests.append((_VALUE.abs() > LARGEST, Reason.OUT_OF_RANGE))
    number = _VALUE.cast(pl.Decimal(38, column.scale), strict=False) if column.type is Kind.DECIMAL else _VALUE
    if column.min is not None:
        tests.append((number < column.min, Reason.OUT_OF_RANGE))
    if column.max is not None:
        tests.append((number > column.max, Reason.OUT_OF_RANGE))
    if column.pattern:
        tests.append((~_TEXT.str.contains(f"^(?:{column.pattern})$"), Reason.PATTERN_MISMATCH))
    if column.max_length is not None:
        tests.append((_TEXT.str.len_chars() > column.max_length, Reason.TOO_LONG))
    return tests


def _checked(text: pl.Series, value: pl.Series, tests: Tests) -> Checks:
    if not tests:
        return []
    frame = pl.DataFrame([text.alias("text"), value.alias("value")])
    # Of what is not there nothing is wrong.
    found = frame.select([test.fill_null(value=False).alias(str(place)) for place, (test, _) in enumerate(tests)])
    return [(mask, reason) for mask, (_, reason) in zip(found.get_columns(), tests, strict=True)]


def _number(column: Column, text: pl.Series, scale: int) -> pl.Series:
    """The number with a point and at most *scale* digits behind it that are not 0; null when it is none.

    Most numbers are plain, and most others are without their blanks; only the rest is looked at closely.
    """
    number, others = _plain(text, scale)
    if len(others):
        blank = _TEXT.str.replace_all(" ", "", literal=True).str.replace_all("\u00a0", "", literal=True)
        closer = _made(text.gather(others), "text", blank)
        found, rest = _plain(closer, scale)
        if len(rest):
            found = found.scatter(rest, _looked_at(column, closer.gather(rest), scale))
        number = number.scatter(others, found)
    return number


def _plain(text: pl.Series, scale: int) -> tuple[pl.Series, pl.Series]:
    """The numbers that are written in the plainest way, and the places of those that are not."""
    behind = f"(?:[.,][0-9]{{1,{min(scale, 2)}}})?" if scale else ""
    is_plain = _made(text, "text", _TEXT.str.contains(f"^-?[0-9]{{1,15}}{behind}$").fill_null(value=False))
    number = text.str.replace(",", ".", literal=True) if scale else text
    number = number if is_plain.all() else number.zip_with(is_plain, nothing(len(text)))
    return number, (~is_plain & text.is_not_null()).arg_true()


def _looked_at(column: Column, text: pl.Series, scale: int) -> pl.Series:
    """The same for numbers with something around them or grouped in any way; null for what could be two."""
    bare = _made(text, "text", _bare(column)).alias("bare")
    frame = bare.to_frame().select(
        pl.col("bare"),
        pl.col("bare").str.contains(_PLAIN).alias("plain"),
        pl.col("bare").str.contains(_LONE).alias("lone"),
        pl.col("bare").str.contains(_BY_COMMAS).alias("by_commas"),
        pl.col("bare").str.contains(_BY_POINTS).alias("by_points"),
    )
    number = frame.select(_unified(column).alias("text"))["text"]
    if column.round:
        return number
    has_more = _TEXT.str.contains(rf"\.[0-9]{{{scale}}}[0-9]*[1-9]")
    return _made(number, "text", pl.when(~has_more).then(_TEXT if scale else _TEXT.str.replace(r"\.[0-9]*$", "")))


def _bare(column: Column) -> pl.Expr:
    text = _TEXT
    if column.type is Kind.MONEY:
        text = text.str.replace(f"(?i)^{_CURRENCY}", "").str.replace(f"(?i){_CURRENCY}$", "")
    if column.at_least:
        text = text.str.replace(_MORE, "").str.replace(r"\+$", "")
    return text.str.replace_all(_BLANKS, "").str.replace("−", "-", literal=True)


def _unified(column: Column) -> pl.Expr:
    """The number with a point, however it was grouped."""
    bare, is_lone, by_commas, by_points = (pl.col(name) for name in ("bare", "lone", "by_commas", "by_points"))
    lone = bare.str.replace(",", ".", literal=True)
    commas = bare.str.replace_all(",", "", literal=True)
    points = bare.str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)
    # 1,234 is a thousand here and one and a bit there: only who knows the supplier can tell.
    doubtful = pl.lit(None, dtype=pl.String)
    if column.decimal is not None:
        is_decimal = by_commas if column.decimal == "," else by_points
        doubtful = pl.when(is_decimal).then(lone).when(by_commas).then(commas).otherwise(points)
    return (
        pl.when(is_lone & (by_commas | by_points)).then(doubtful)
        .when(pl.col("plain") | is_lone).then(lone)
        .when(by_commas).then(commas)
        .when(by_points).then(points)
    )  # fmt: skip


def _scaled(column: Column, text: pl.Series) -> pl.Series:
    """The number with as many digits as it shall have."""
    number = _number(column, text, column.scale)
    return _rounded(number, column.scale) if column.round else number.cast(pl.Decimal(38, column.scale), strict=False)


def _rounded(number: pl.Series, scale: int) -> pl.Series:
    """Half away from zero, as people round."""
    finer = number.cast(pl.Decimal(38, scale + _FINER), strict=False)
    return finer.round(scale, mode="half_away_from_zero").cast(pl.Decimal(38, scale), strict=False)


def _moment(form: str) -> pl.Expr:
    return _TEXT.str.to_datetime(form, strict=False, time_unit="us")


def _first(text: pl.Series, forms: list[pl.Expr], kind: pl.DataType | type[pl.DataType]) -> pl.Series:
    """What the first of *forms* makes of each text that makes anything of it."""
    value = pl.repeat(None, len(text), dtype=kind, eager=True)
    for form in forms:
        value = value.zip_with(value.is_not_null(), _made(text, "text", form))
        if value.null_count() == text.null_count():
            break
    return value


def _made(series: pl.Series, name: str, expression: pl.Expr) -> pl.Series:
    """What *expression* makes of *series*, which it knows as *name*."""
    return series.alias(name).to_frame().select(expression.alias(name)).to_series()
