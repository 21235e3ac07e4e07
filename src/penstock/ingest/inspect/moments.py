"""Dates as people write them, and which of day and month comes first."""

from typing import Any

from penstock.ingest.inspect.cells import Cells

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


def moment_options(cells: Cells, *, is_named_so: bool, is_english: bool) -> tuple[dict[str, Any], list[str]] | None:
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


def _formats(cells: Cells, *, is_english: bool) -> tuple[list[str], list[str]]:
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
