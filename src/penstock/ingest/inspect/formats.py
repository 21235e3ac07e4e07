"""The formats of numbers and dates in a column: separators, currencies, units, the order of day and month."""

from typing import Any

from penstock.ingest.inspect.cells import CellTexts

_BLANK = r"[ \x{00a0}\x{2009}\x{202f}'’]"
_GROUPED = rf"[0-9]{{1,3}}(?:{_BLANK}[0-9]{{3}})+"
INTEGER = rf"[+-]?(?:[0-9]+|{_GROUPED}|[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+)"
FRACTION = rf"[+-]?(?:[0-9]*|{_GROUPED}|[0-9]{{1,3}}(?:[.,][0-9]{{3}})+)[.,][0-9]+"
NUMBER = f"(?:{INTEGER}|{FRACTION})"
CURRENCY = r"(?i:₽|\$|€|£|¥|₸|руб(?:\.|лей|ля|ль)?|р\.?|тг\.?|rub|usd|eur|kzt|byn|cny|gbp)"
WITH_CURRENCY = rf"(?:{CURRENCY}{_BLANK}*{NUMBER}|{NUMBER}{_BLANK}*{CURRENCY})"
MORE = rf"(?:(?:>=?|≥|(?i:более|больше|свыше|от|over|more than|at least)\.?){_BLANK}*[0-9]+|[0-9]+{_BLANK}*\+)"
PIECES = r"\s*(?i:шт(?:ук[аи]?)?|pcs|ед|компл|пар[аы]?)\.?"
PERCENT = r"\s*%"
# The number that a word means in a column of counts.
WORDS = {
    r"(?i)^(?:нет|нет в наличии|отсутствует|под заказ|out of stock|no|none)$": "0",
    r"(?i)^(?:есть|в наличии|да|имеется|in stock|yes|available)$": "1",
}
# 1,234 can have a separator of thousands or a decimal comma.
_DOUBTFUL_COMMA, _DOUBTFUL_POINT = r"[+-]?[1-9][0-9]{0,2},[0-9]{3}", r"[+-]?[1-9][0-9]{0,2}\.[0-9]{3}"
_TAIL = rf"(?:{_BLANK}*{CURRENCY})?"
_FINEST = 6
_MONEY_SCALE = 2
_ISO = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"[T ][0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
_DAY, _YEAR, _SHORT = r"(?:[0-2]?[0-9]|3[01])", r"(?:19|20)[0-9]{2}", r"[0-9]{2}"
_CLOCKS = ((r" [0-9]{1,2}:[0-9]{2}:[0-9]{2}", " %H:%M:%S"), (r" [0-9]{1,2}:[0-9]{2}", " %H:%M"), ("", ""))
# Dates with points start with the day everywhere; with slashes or dashes the order depends on the country.
_FORMS = (
    (rf"{_DAY}\.{_DAY}\.{_YEAR}", ("%d.%m.%Y",)),
    (rf"{_DAY}\.{_DAY}\.{_SHORT}", ("%d.%m.%y",)),
    (rf"{_DAY}/{_DAY}/{_YEAR}", ("%d/%m/%Y", "%m/%d/%Y")),
    (rf"{_DAY}/{_DAY}/{_SHORT}", ("%d/%m/%y", "%m/%d/%y")),
    (rf"{_DAY}-{_DAY}-{_YEAR}", ("%d-%m-%Y", "%m-%d-%Y")),
    (rf"{_YEAR}/{_DAY}/{_DAY}", ("%Y/%m/%d",)),
    (rf"{_YEAR}\.{_DAY}\.{_DAY}", ("%Y.%m.%d",)),
    (rf"{_DAY} [A-Za-z]{{3}} {_YEAR}", ("%d %b %Y",)),
    (rf"[A-Za-z]{{3}} {_DAY}, {_YEAR}", ("%b %d, %Y",)),
    (rf"{_DAY}-[A-Za-z]{{3}}-{_YEAR}", ("%d-%b-%Y",)),
)
_COMPACT = (rf"{_YEAR}(?:0[1-9]|1[0-2]){_DAY}", "%Y%m%d")  # a date only if the header says so


def measure_quantity(cells: CellTexts, *, is_named: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Return the options and doubts of an integer column, with its words and units; None if too few cells fit."""
    options: dict[str, Any] = {"type": "integer"}
    doubts: list[str] = []
    replace: dict[str, str] = {}
    if cells.has_match(rf"(?:{INTEGER}|{MORE}){PIECES}"):
        replace[f"{PIECES}$"] = ""
    if is_named:
        for pattern, number in WORDS.items():
            if words := cells.list_matches(pattern):
                replace[pattern] = number
                shown = ", ".join(repr(text) for text in words[:3])
                doubts.append(f"{shown} {'is' if len(words) == 1 else 'are'} read as {number}")
    if replace:
        options["replace"] = replace
    if cells.has_match(rf"{MORE}(?:{PIECES})?"):
        options["at_least"] = True
    settled, more = _guess_separator(cells, is_fraction=False)
    options |= settled
    needed = 0.5 if is_named else 0.95
    # A column of words alone is not a column of counts.
    is_counted = (
        cells.measure_read(options) >= needed and cells.measure_match(rf"(?:{INTEGER}|{MORE})(?:{PIECES})?") > 0
    )
    return (options, [*doubts, *more]) if is_counted else None


def measure_money(cells: CellTexts, *, is_named: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Return the options and doubts of a money column; None if neither the header nor the cells indicate money."""
    if not is_named and cells.measure_match(WITH_CURRENCY) < 0.3:
        return None
    settled, doubts = _guess_separator(cells, is_fraction=False)
    options: dict[str, Any] = {"type": "money", **settled}
    if _count_digits(cells, settled.get("decimal")) > _MONEY_SCALE:
        options["round"] = True
        doubts.append(f"values with more than {_MONEY_SCALE} decimal places are rounded")
    return (options, doubts) if cells.measure_read(options) >= (0.5 if is_named else 0.9) else None


def measure_options(cells: CellTexts, *, is_named: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Return the options and doubts of a decimal column; None if too few cells are numbers."""
    options, doubts = _guess_separator(cells, is_fraction=True)
    options = {"type": "decimal", **options}
    if cells.measure_match(f"{NUMBER}{PERCENT}") > 0.3:
        options["replace"] = {f"{PERCENT}$": ""}
    digits = _count_digits(cells, options.get("decimal"))
    options["scale"] = min(max(digits, _MONEY_SCALE), _FINEST)
    if digits > _FINEST:
        options["round"] = True
    return (options, doubts) if cells.measure_read(options) >= (0.7 if is_named else 0.95) else None


def is_fractional(cells: CellTexts) -> bool:
    return cells.has_match(rf"{FRACTION}(?:{PERCENT})?") and cells.measure_match(INTEGER) < 1.0


def _guess_separator(cells: CellTexts, *, is_fraction: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the option `decimal` if cells are ambiguous without it, and the doubts."""
    by_comma = cells.list_matches(rf"(?:{CURRENCY}{_BLANK}*)?{_DOUBTFUL_COMMA}{_TAIL}")
    by_point = cells.list_matches(rf"(?:{CURRENCY}{_BLANK}*)?{_DOUBTFUL_POINT}{_TAIL}")
    if not by_comma and not by_point:
        return {}, []
    proven = _find_proven_separator(cells)
    if proven:
        return {"decimal": proven}, []
    # Amounts and counts have no thousandths, but measures often have.
    doubtful, mark = (by_comma, ",") if by_comma else (by_point, ".")
    other = "." if mark == "," else ","
    decimal = mark if is_fraction else other
    role = "the decimal separator" if is_fraction else "the separator of thousands"
    doubt = f"{mark!r} in {doubtful[0]!r} is read as {role}; this is a guess, correct `decimal` if it is wrong"
    return {"decimal": decimal}, [doubt]


def _find_proven_separator(cells: CellTexts) -> str | None:
    before = rf"(?:{CURRENCY}{_BLANK}*)?[+-]?"
    marks = {",": (r",[0-9]{1,2}", r"\.[0-9]{3}(?:,[0-9]+)"), ".": (r"\.[0-9]{1,2}", r",[0-9]{3}(?:\.[0-9]+)")}
    for mark, (short, grouped) in marks.items():
        if cells.has_match(rf"{before}[0-9]+(?:{_BLANK}[0-9]{{3}})*(?:{short}|{grouped}){_TAIL}"):
            return mark
    return None


def _count_digits(cells: CellTexts, decimal: str | None) -> int:
    """Return the highest number of decimal places in a column."""
    tails = cells.values.str.extract(rf"[{decimal or '.,'}]([0-9]+)(?:{PERCENT}|{_TAIL})$").str.strip_chars_end("0")
    if decimal is None:
        grouped = rf"^(?:{CURRENCY}{_BLANK}*)?[+-]?[1-9][0-9]{{0,2}}(?:[.,][0-9]{{3}})+{_TAIL}$"
        tails = tails.filter(~cells.values.str.contains(grouped))
    most = tails.str.len_chars().max()
    return most if isinstance(most, int) else 0


def measure_moment(cells: CellTexts, *, is_named: bool, is_english: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Return the options and doubts of a date column; None if too few cells are dates."""
    formats, doubts = _find_formats(cells, is_english=is_english)
    if is_named and cells.has_match(_COMPACT[0]):
        formats.append(_COMPACT[1])
    has_time = cells.measure_match(f".*[0-9]{{1,2}}:[0-9]{{2}}.*") > 0.5  # noqa: F541
    options: dict[str, Any] = {"type": "datetime" if has_time else "date"}
    if formats:
        options["formats"] = formats
    if not formats and not cells.has_match(f"{_ISO}(?:{_TIME})?"):
        return None
    return (options, doubts) if cells.measure_read(options) >= (0.5 if is_named else 0.9) else None


def _find_formats(cells: CellTexts, *, is_english: bool) -> tuple[list[str], list[str]]:
    formats: list[str] = []
    doubts: list[str] = []
    for shape, orders in _FORMS:
        for clock, form in _CLOCKS:
            dates = cells.list_matches(shape + clock)
            if not dates:
                continue
            order, doubt = _guess_order(dates, orders, is_english=is_english)
            formats.append(order + form)
            doubts += [doubt] if doubt else []
    return formats, doubts


def _guess_order(dates: list[str], orders: tuple[str, ...], *, is_english: bool) -> tuple[str, str | None]:
    if len(orders) == 1:
        return orders[0], None
    separator = orders[0][2]
    parts = [text.split(" ")[0].split(separator) for text in dates]
    day_first = any(int(part[0]) > 12 for part in parts)
    month_first = any(int(part[1]) > 12 for part in parts)
    if day_first != month_first:
        return orders[0] if day_first else orders[1], None
    guess = orders[1] if is_english else orders[0]
    reason = "some dates start with the day and some with the month" if day_first else "the order is ambiguous"
    return guess, f"dates such as {dates[0]!r} are read as {guess}; this is a guess, because {reason}"
