"""The formats of numbers and dates in a column: separators, currencies, units, order of day and month."""

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
# What a word means when others in the same column are counts.
WORDS = {
    r"(?i)^(?:нет|нет в наличии|отсутствует|под заказ|out of stock|no|none)$": "0",
    r"(?i)^(?:есть|в наличии|да|имеется|in stock|yes|available)$": "1",
}
# Written without zeros behind it, 1,234 is a thousand to some and one and a bit to others.
_DOUBTFUL_COMMA, _DOUBTFUL_POINT = r"[+-]?[1-9][0-9]{0,2},[0-9]{3}", r"[+-]?[1-9][0-9]{0,2}\.[0-9]{3}"
_TAIL = rf"(?:{_BLANK}*{CURRENCY})?"
_FINEST = 6
_MONEY_SCALE = 2
_ISO = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_TIME = r"[T ][0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
_DAY, _YEAR, _SHORT = r"(?:[0-2]?[0-9]|3[01])", r"(?:19|20)[0-9]{2}", r"[0-9]{2}"
_CLOCKS = ((r" [0-9]{1,2}:[0-9]{2}:[0-9]{2}", " %H:%M:%S"), (r" [0-9]{1,2}:[0-9]{2}", " %H:%M"), ("", ""))
# With a point the day is first everywhere; with a slash or a dash only the numbers can tell.
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
_COMPACT = (rf"{_YEAR}(?:0[1-9]|1[0-2]){_DAY}", "%Y%m%d")  # a date only when the header says so


def quantity_options(cells: CellTexts, *, is_named_so: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Options of an integer column, with words and units taken care of; None when there are too few whole numbers."""
    options: dict[str, Any] = {"type": "integer"}
    doubts: list[str] = []
    replace: dict[str, str] = {}
    if cells.has(rf"(?:{INTEGER}|{MORE}){PIECES}"):
        replace[f"{PIECES}$"] = ""
    if is_named_so:
        for pattern, meant in WORDS.items():
            if found := cells.matching(pattern):
                replace[pattern] = meant
                shown = ", ".join(repr(text) for text in found[:3])
                doubts.append(f"{shown} {'is' if len(found) == 1 else 'are'} read as {meant}")
    if replace:
        options["replace"] = replace
    if cells.has(rf"{MORE}(?:{PIECES})?"):
        options["at_least"] = True
    settled, more = _separator(cells, is_fraction=False)
    options |= settled
    needed = 0.5 if is_named_so else 0.95
    # Some number has to be there: a column of words alone counts nothing.
    is_counted = cells.read_by(options) >= needed and cells.share(rf"(?:{INTEGER}|{MORE})(?:{PIECES})?") > 0
    return (options, [*doubts, *more]) if is_counted else None


def money_options(cells: CellTexts, *, is_named_so: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Options of a money column; None when neither the header nor the cells speak of money."""
    if not is_named_so and cells.share(WITH_CURRENCY) < 0.3:
        return None
    settled, doubts = _separator(cells, is_fraction=False)
    options: dict[str, Any] = {"type": "money", **settled}
    if _digits(cells, settled.get("decimal")) > _MONEY_SCALE:
        options["round"] = True
        doubts.append(f"some have more than {_MONEY_SCALE} digits behind the point and are rounded")
    return (options, doubts) if cells.read_by(options) >= (0.5 if is_named_so else 0.9) else None


def measure_options(cells: CellTexts, *, is_named_so: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Options of a decimal column; None when too few are numbers."""
    options, doubts = _separator(cells, is_fraction=True)
    options = {"type": "decimal", **options}
    if cells.share(f"{NUMBER}{PERCENT}") > 0.3:
        options["replace"] = {f"{PERCENT}$": ""}
    digits = _digits(cells, options.get("decimal"))
    options["scale"] = min(max(digits, _MONEY_SCALE), _FINEST)
    if digits > _FINEST:
        options["round"] = True
    return (options, doubts) if cells.read_by(options) >= (0.7 if is_named_so else 0.95) else None


def is_fractional(cells: CellTexts) -> bool:
    return cells.has(rf"{FRACTION}(?:{PERCENT})?") and cells.share(INTEGER) < 1.0


def _separator(cells: CellTexts, *, is_fraction: bool) -> tuple[dict[str, Any], list[str]]:
    """Which of comma and point is the decimal one, if any cell needs to be told."""
    by_comma = cells.matching(rf"(?:{CURRENCY}{_BLANK}*)?{_DOUBTFUL_COMMA}{_TAIL}")
    by_point = cells.matching(rf"(?:{CURRENCY}{_BLANK}*)?{_DOUBTFUL_POINT}{_TAIL}")
    if not by_comma and not by_point:
        return {}, []
    proven = _proven(cells)
    if proven:
        return {"decimal": proven}, []
    # Money and counts have no thousandths, measures often do.
    doubtful, mark = (by_comma, ",") if by_comma else (by_point, ".")
    other = "." if mark == "," else ","
    decimal = mark if is_fraction else other
    meant = "one and a bit" if is_fraction else "a thousand and more"
    return {"decimal": decimal}, [f"nothing proves whether {doubtful[0]!r} is {meant}; that is a guess"]


def _proven(cells: CellTexts) -> str | None:
    before = rf"(?:{CURRENCY}{_BLANK}*)?[+-]?"
    ways = {",": (r",[0-9]{1,2}", r"\.[0-9]{3}(?:,[0-9]+)"), ".": (r"\.[0-9]{1,2}", r",[0-9]{3}(?:\.[0-9]+)")}
    for mark, (short, grouped) in ways.items():
        if cells.has(rf"{before}[0-9]+(?:{_BLANK}[0-9]{{3}})*(?:{short}|{grouped}){_TAIL}"):
            return mark
    return None


def _digits(cells: CellTexts, decimal: str | None) -> int:
    """The most digits behind a point or comma that is no mark of thousands."""
    tails = cells.values.str.extract(rf"[{decimal or '.,'}]([0-9]+)(?:{PERCENT}|{_TAIL})$").str.strip_chars_end("0")
    if decimal is None:
        grouped = rf"^(?:{CURRENCY}{_BLANK}*)?[+-]?[1-9][0-9]{{0,2}}(?:[.,][0-9]{{3}})+{_TAIL}$"
        tails = tails.filter(~cells.values.str.contains(grouped))
    most = tails.str.len_chars().max()
    return most if isinstance(most, int) else 0


def moment_options(cells: CellTexts, *, is_named_so: bool, is_english: bool) -> tuple[dict[str, Any], list[str]] | None:
    """Options of a date column that read most of *cells*, and what is doubtful; None when they are no dates."""
    formats, doubts = _formats(cells, is_english=is_english)
    if is_named_so and cells.has(_COMPACT[0]):
        formats.append(_COMPACT[1])
    has_time = cells.share(f".*[0-9]{{1,2}}:[0-9]{{2}}.*") > 0.5  # noqa: F541
    options: dict[str, Any] = {"type": "datetime" if has_time else "date"}
    if formats:
        options["formats"] = formats
    if not formats and not cells.has(f"{_ISO}(?:{_TIME})?"):
        return None
    return (options, doubts) if cells.read_by(options) >= (0.5 if is_named_so else 0.9) else None


def _formats(cells: CellTexts, *, is_english: bool) -> tuple[list[str], list[str]]:
    formats: list[str] = []
    doubts: list[str] = []
    for shape, orders in _FORMS:
        for clock, form in _CLOCKS:
            found = cells.matching(shape + clock)
            if not found:
                continue
            order, doubt = _order(found, orders, is_english=is_english)
            formats.append(order + form)
            doubts += [doubt] if doubt else []
    return formats, doubts


def _order(found: list[str], orders: tuple[str, ...], *, is_english: bool) -> tuple[str, str | None]:
    if len(orders) == 1:
        return orders[0], None
    separator = orders[0][2]
    parts = [text.split(" ")[0].split(separator) for text in found]
    day_first = any(int(part[0]) > 12 for part in parts)
    month_first = any(int(part[1]) > 12 for part in parts)
    if day_first != month_first:
        return orders[0] if day_first else orders[1], None
    guess = orders[1] if is_english else orders[0]
    why = "some dates have the day first and some the month" if day_first else "no date proves which comes first"
    return guess, f"day or month first? {why}, such as {found[0]!r}; {guess} is a guess"
