"""I18: numbers as people write them, a whole column at a time; what could be two numbers is none."""

import polars as pl

from penstock.ingest.supplier import ColumnType, SupplierColumn

KINDS = (ColumnType.INTEGER, ColumnType.MONEY, ColumnType.DECIMAL)
_BLANK_CHARACTERS = " \t\u00a0\u2009\u202f'’`"
_BLANK = f"[{_BLANK_CHARACTERS}]"
_CURRENCY = r"(?:₽|\$|€|£|¥|₸|руб(?:\.|лей|ля|ль)?|р\.?|тг\.?|rub|usd|eur|kzt|byn|cny|gbp)"
_MORE = rf"^(?:>=?|≥|(?i:более|больше|свыше|от|over|more{_BLANK}*than|at{_BLANK}*least)\.?){_BLANK}*"
# Blanks part thousands, and nothing else: 195 65 are two numbers. Without any, the text is looked at as it is.
_PARTED = rf"^[+-]?{_BLANK}*(?:[1-9][0-9]{{0,2}}(?:{_BLANK}[0-9]{{3}})+(?:[.,][0-9]+)?|[^{_BLANK_CHARACTERS}]*)$"
# [0-9], not \d: the digits of all scripts take milliseconds to compile, and are no numbers to us.
_FORMS = {
    "plain": r"^[+-]?[0-9]+$",
    "lone": r"^[+-]?[0-9]*[.,][0-9]+$",
    "by_commas": r"^[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?$",
    "by_points": r"^[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+(?:,[0-9]+)?$",
}
_DIGITS = 38  # as many as a decimal can have
TEXT, _BARE, _NUMBER = pl.col("text"), pl.col("bare"), pl.col("number")

# From a text to a value: columns made one after another, each of those before it, so that nothing is done twice.
Way = list[pl.Expr]


def ways(column: SupplierColumn) -> list[Way]:
    """How a text is read, the cheapest first: each way reads what those before it could not, and more.

    Most integers are plain, and most money is but for blanks; only the rest is looked at closely.
    """
    bare = TEXT.str.replace_all("\u00a0", " ", literal=True)
    if column.at_least:
        bare = bare.str.replace(_MORE, "").str.replace(rf"{_BLANK}*\+$", "")
    plain = _plain(column, is_parted=True)
    usual = _plain(column, is_parted=False) if column.type is ColumnType.INTEGER else plain
    return [[TEXT.alias("bare"), usual], [bare.alias("bare"), plain], _looked_at(column, bare)]


def scale_of(column: SupplierColumn) -> int:
    return 0 if column.type is ColumnType.INTEGER else column.scale


def _plain(column: SupplierColumn, *, is_parted: bool) -> pl.Expr:
    """Numbers that are written in the plainest way: at most two digits behind the point cannot be a group."""
    scale = scale_of(column)
    behind = f"(?:[.,][0-9]{{1,{min(scale, 2)}}})?" if scale else ""
    whole = "(?:[0-9]{1,15}|[1-9][0-9]{0,2}(?: [0-9]{3}){1,4})" if is_parted else "[0-9]{1,15}"
    bare = _BARE.str.replace_all(" ", "", literal=True) if is_parted else _BARE
    number: pl.Expr = pl.when(_BARE.str.contains(f"^-?{whole}{behind}$")).then(bare)
    if column.type is ColumnType.INTEGER:
        return number.cast(pl.Int64, strict=False).alias("value")
    number = number.str.replace(",", ".", literal=True) if scale else number
    return _kept(column, number.cast(pl.Decimal(_DIGITS, scale), strict=False))


def _looked_at(column: SupplierColumn, text: pl.Expr) -> Way:
    """Numbers with something around them or grouped in any way."""
    if column.type is ColumnType.MONEY:
        text = text.str.replace(f"(?i)^{_CURRENCY}", "").str.replace(f"(?i){_CURRENCY}$", "")
    text = text.str.strip_chars(_BLANK_CHARACTERS).str.replace("−", "-", literal=True)
    bare = pl.when(text.str.contains(_PARTED)).then(text.str.replace_all(_BLANK, ""))
    scaled = _rounded(column, _NUMBER) if column.round else _exact(column, _NUMBER)
    return [
        bare.alias("bare"),
        *(_BARE.str.contains(form).alias(name) for name, form in _FORMS.items()),
        _with_point(column).alias("number"),
        _kept(column, scaled),
    ]


def _with_point(column: SupplierColumn) -> pl.Expr:
    """The number with a point, however it was grouped."""
    is_plain, is_lone, by_commas, by_points = (pl.col(name) for name in _FORMS)
    lone = _BARE.str.replace(",", ".", literal=True)
    commas = _BARE.str.replace_all(",", "", literal=True)
    points = _BARE.str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)
    # 1,234 is a thousand here and one and a bit there: only who knows the supplier can tell.
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


def _exact(column: SupplierColumn, number: pl.Expr) -> pl.Expr:
    """Null for what has more digits than it may."""
    scale = scale_of(column)
    has_more = number.str.contains(rf"\.[0-9]{{{scale}}}[0-9]*[1-9]")
    return pl.when(~has_more).then(number).cast(pl.Decimal(_DIGITS, scale), strict=False)


def _rounded(column: SupplierColumn, number: pl.Expr) -> pl.Expr:
    """Half away from zero, as people round: the first digit that goes decides, and must not be rounded itself."""
    scale = scale_of(column)
    cut = number.str.replace(rf"(\.[0-9]{{{scale + 1}}})[0-9]+$", "$1")
    finer = cut.cast(pl.Decimal(_DIGITS, scale + 1), strict=False)
    return finer.round(scale, mode="half_away_from_zero").cast(pl.Decimal(_DIGITS, scale), strict=False)


def _kept(column: SupplierColumn, number: pl.Expr) -> pl.Expr:
    """A decimal is kept as a text; anything else as the integer of its last digits: money of minor units."""
    kept = (
        number.cast(pl.String)
        if column.type is ColumnType.DECIMAL
        else number.to_physical().cast(pl.Int64, strict=False)
    )
    return kept.alias("value")
