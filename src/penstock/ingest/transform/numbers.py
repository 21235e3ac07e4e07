"""I18: numbers as people write them, a column at a time; a text that could be read as two numbers is rejected."""

import polars as pl

from penstock.ingest.supplier import ColumnType, SupplierColumn

KINDS = (ColumnType.INTEGER, ColumnType.MONEY, ColumnType.DECIMAL)
_BLANK_CHARACTERS = " \t\u00a0\u2009\u202f'’`"
_BLANK = f"[{_BLANK_CHARACTERS}]"
_CURRENCY = r"(?:₽|\$|€|£|¥|₸|руб(?:\.|лей|ля|ль)?|р\.?|тг\.?|rub|usd|eur|kzt|byn|cny|gbp)"
_AT_LEAST = rf"^(?:>=?|≥|(?i:более|больше|свыше|от|over|more{_BLANK}*than|at{_BLANK}*least)\.?){_BLANK}*"
# Blanks separate only groups of thousands: 195 65 are two numbers.
_GROUPED = rf"^[+-]?{_BLANK}*(?:[1-9][0-9]{{0,2}}(?:{_BLANK}[0-9]{{3}})+(?:[.,][0-9]+)?|[^{_BLANK_CHARACTERS}]*)$"
# [0-9], not \d: the digits of all scripts take milliseconds to compile, and are not supported.
_FORMS = {
    "plain": r"^[+-]?[0-9]+$",
    "lone": r"^[+-]?[0-9]*[.,][0-9]+$",
    "by_commas": r"^[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?$",
    "by_points": r"^[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]+)?$",
}
_MAX_DIGITS = 38  # of a polars decimal
TEXT, _BARE, _NUMBER = pl.col("text"), pl.col("bare"), pl.col("number")

# The steps from a text to a value: each step is a column computed from the columns before it.
ValueParser = list[pl.Expr]


def list_parsers(column: SupplierColumn) -> list[ValueParser]:
    """Return the parsers of a column, the cheapest first; each also reads the texts of those before it.

    Most integers are plain, and most amounts are plain except for blanks; only the rest needs the last parser.
    """
    bare = TEXT.str.replace_all("\u00a0", " ", literal=True)
    if column.at_least:
        bare = bare.str.replace(_AT_LEAST, "").str.replace(rf"{_BLANK}*\+$", "")
    plain = _parse_plain(column, is_grouped=True)
    usual = _parse_plain(column, is_grouped=False) if column.type is ColumnType.INTEGER else plain
    return [[TEXT.alias("bare"), usual], [bare.alias("bare"), plain], _parse_any(column, bare)]


def read_scale(column: SupplierColumn) -> int:
    return 0 if column.type is ColumnType.INTEGER else column.scale


def _parse_plain(column: SupplierColumn, *, is_grouped: bool) -> pl.Expr:
    """Parse plain numbers: up to two digits after the point cannot be a group of thousands."""
    scale = read_scale(column)
    fraction = f"(?:[.,][0-9]{{1,{min(scale, 2)}}})?" if scale else ""
    whole = "(?:[0-9]{1,15}|[1-9][0-9]{0,2}(?: [0-9]{3}){1,4})" if is_grouped else "[0-9]{1,15}"
    bare = _BARE.str.replace_all(" ", "", literal=True) if is_grouped else _BARE
    number: pl.Expr = pl.when(_BARE.str.contains(f"^-?{whole}{fraction}$")).then(bare)
    if column.type is ColumnType.INTEGER:
        return number.cast(pl.Int64, strict=False).alias("value")
    number = number.str.replace(",", ".", literal=True) if scale else number
    return _encode_number(column, number.cast(pl.Decimal(_MAX_DIGITS, scale), strict=False))


def _parse_any(column: SupplierColumn, text: pl.Expr) -> ValueParser:
    """Parse numbers with currencies or signs around them, or with groups in any notation."""
    if column.type is ColumnType.MONEY:
        text = text.str.replace(f"(?i)^{_CURRENCY}", "").str.replace(f"(?i){_CURRENCY}$", "")
    text = text.str.strip_chars(_BLANK_CHARACTERS).str.replace("−", "-", literal=True)
    bare = pl.when(text.str.contains(_GROUPED)).then(text.str.replace_all(_BLANK, ""))
    scaled = _parse_rounded(column, _NUMBER) if column.round else _parse_exact(column, _NUMBER)
    return [
        bare.alias("bare"),
        *(_BARE.str.contains(form).alias(name) for name, form in _FORMS.items()),
        _normalize_point(column).alias("number"),
        _encode_number(column, scaled),
    ]


def _normalize_point(column: SupplierColumn) -> pl.Expr:
    """Return the number without groups and with a decimal point."""
    is_plain, is_lone, by_commas, by_points = (pl.col(name) for name in _FORMS)
    lone = _BARE.str.replace(",", ".", literal=True)
    commas = _BARE.str.replace_all(",", "", literal=True)
    points = _BARE.str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)
    # 1,234 has a separator of thousands in some countries and a decimal comma in others: `decimal` decides.
    doubtful = pl.lit(None, dtype=pl.String)
    if column.decimal is not None:
        is_decimal = by_commas if column.decimal == "," else by_points
        doubtful = pl.when(is_decimal).then(lone).when(by_commas).then(commas).otherwise(points)
    return (
        pl.when(is_lone & (by_commas | by_points)).then(doubtful)
        .when(is_plain | is_lone).then(lone)
        .when(by_commas).then(commas)
        .when(by_points).then(points)
    )  # fmt: skip


def _parse_exact(column: SupplierColumn, number: pl.Expr) -> pl.Expr:
    """Parse a number; null if it has more digits than the scale."""
    scale = read_scale(column)
    has_more = number.str.contains(rf"\.[0-9]{{{scale}}}[0-9]*[1-9]")
    return pl.when(~has_more).then(number).cast(pl.Decimal(_MAX_DIGITS, scale), strict=False)


def _parse_rounded(column: SupplierColumn, number: pl.Expr) -> pl.Expr:
    """Parse and round half away from zero; further digits are cut first, so that they are not rounded twice."""
    scale = read_scale(column)
    cut = number.str.replace(rf"(\.[0-9]{{{scale + 1}}})[0-9]+$", "$1")
    finer = cut.cast(pl.Decimal(_MAX_DIGITS, scale + 1), strict=False)
    return finer.round(scale, mode="half_away_from_zero").cast(pl.Decimal(_MAX_DIGITS, scale), strict=False)


def _encode_number(column: SupplierColumn, number: pl.Expr) -> pl.Expr:
    """Return a decimal as text, and any other number as an integer: money in minor units."""
    encoded = (
        number.cast(pl.String)
        if column.type is ColumnType.DECIMAL
        else number.to_physical().cast(pl.Int64, strict=False)
    )
    return encoded.alias("value")
