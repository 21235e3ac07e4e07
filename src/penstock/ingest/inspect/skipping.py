"""Patterns for rows that are no data, proposed only when they cannot match a row that is."""

import re
from dataclasses import dataclass

import polars as pl

from penstock.ingest.inspect.rows import TOTAL, Rows

_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")
_MOST = 30  # texts that are listed one by one
_COUNTER = r"^[0-9]+$"
_NOT_COUNTED = r"^[^0-9]"


@dataclass(frozen=True)
class Skipping:
    """Patterns of `source.skip_rows`, and what a person should know."""

    patterns: list[str]
    warnings: list[str]
    leaves_sections: bool = False


def patterns_for(tables: list[Rows]) -> Skipping:
    """What to skip in all of *tables*."""
    firsts = pl.concat([rows.firsts for rows in tables]) if tables else pl.Series([], dtype=pl.String)
    totals = _texts([rows.totals for rows in tables])
    repeats = _texts([rows.repeats for rows in tables])
    sections = _texts([rows.sections for rows in tables])
    found: list[str] = []
    warnings: list[str] = []
    patterns: list[str] = []
    for propose, texts in ((_for_totals, totals), (_for_repeats, repeats), (_for_sections, sections)):
        patterns, told = propose(texts, firsts) if texts else ([], [])
        found += [pattern for pattern in patterns if pattern not in found]
        warnings += told
    return Skipping(found, warnings, leaves_sections=bool(sections) and not patterns)


def _for_totals(texts: list[str], firsts: pl.Series) -> tuple[list[str], list[str]]:
    words = sorted({match[1].lower() for text in texts if (match := re.search(TOTAL, text))})
    patterns: list[str] = []
    for word in words:
        exact = [_exactly(text) for text in texts if text.lower().startswith(word)]
        patterns += next((tried for tried in ([rf"(?i)^{word}\b"], exact) if not _hits(tried, firsts)), [])
    if len(patterns) < len(words):
        return patterns, [f"rows such as {texts[0]!r} look like totals, but so does data: they are not skipped"]
    return patterns, []


def _for_repeats(texts: list[str], firsts: pl.Series) -> tuple[list[str], list[str]]:
    patterns = [_exactly(text) for text in texts]
    if _hits(patterns, firsts):
        return [], [f"the header comes again inside the table ({texts[0]!r}), and such rows will be bad"]
    return patterns, []


def _for_sections(texts: list[str], firsts: pl.Series) -> tuple[list[str], list[str]]:
    """A pattern for any section is safe only beside a column that counts rows; else only these very texts are."""
    shown = ", ".join(repr(text) for text in texts[:3])
    what = f"{len(texts)} rows with a single cell, such as {shown},"
    counted = len(firsts) > 0 and bool(firsts.str.contains(_COUNTER).all())
    if counted and all(re.match(_NOT_COUNTED, text) for text in texts):
        return [_NOT_COUNTED], [f"{what} are taken for sections or notes and skipped; their text is lost"]
    patterns = [_exactly(text) for text in texts]
    if len(texts) <= _MOST and not _hits(patterns, firsts):
        return patterns, [f"{what} are taken for sections or notes and skipped by name; new ones will be bad rows"]
    return [], [f"{what} are no data and will be bad rows: skip them with source.skip_rows if a pattern fits"]


def _texts(found: list[dict[int, str]]) -> list[str]:
    return list(dict.fromkeys(text for one in found for text in one.values()))


def _exactly(text: str) -> str:
    return "^" + _SPECIAL.sub(r"\\\1", text) + "$"


def _hits(patterns: list[str], firsts: pl.Series) -> bool:
    return any(bool(firsts.str.contains(pattern).any()) for pattern in patterns)
