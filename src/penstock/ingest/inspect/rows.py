"""The rows of a table as data, totals, sections, notes and repeated headers; and patterns for the rows to skip."""

import re
from dataclasses import dataclass, field

import polars as pl

from penstock.ingest.inspect.headers import HeaderRows
from penstock.ingest.inspect.sample import ROW, SampleBuffer
from penstock.ingest.transform.gate import normalize_name

TOTAL = r"(?i)^(итого|итог|всего|total|grand total|subtotal|sum)(?:[\s:.]|$)"
_FIRST, _FILLED = "\x00first", "\x00filled"
_NARROW = 3  # columns below which a row with one cell is nothing special
_NEAR_END = 5
_TOTALS_AT_END = 2
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")
_MOST = 30  # texts that are listed one by one
_COUNTER = r"^[0-9]+$"
_NOT_COUNTED = r"^[^0-9]"


@dataclass(frozen=True)
class SampleRows:
    """The rows of a sample, sorted; of those that are no data, their numbers and first texts."""

    data: pl.DataFrame
    firsts: pl.Series
    totals: dict[int, str] = field(default_factory=dict)
    sections: dict[int, str] = field(default_factory=dict)
    repeats: dict[int, str] = field(default_factory=dict)


def sorted_rows(sample: SampleBuffer, header: HeaderRows | None) -> SampleRows:
    """What each row of *sample* below *header* is."""
    cells = [name for name in sample.rows.columns if name != ROW]
    if not cells or sample.names is not None:
        data = sample.rows.filter(pl.any_horizontal(pl.col(cells) != "")) if cells else sample.rows
        return SampleRows(data, pl.Series([], dtype=pl.String))
    end = header.end if header else 0
    last = sample.last.filter(pl.col(ROW) > sample.rows[ROW].max()) if sample.rows.height else sample.last
    frame = pl.concat([sample.rows, last], how="diagonal").filter(pl.col(ROW) > end)
    frame = frame.with_columns(pl.col(cells).fill_null(""))
    first = pl.coalesce([pl.when(pl.col(name) != "").then(pl.col(name)) for name in cells])
    filled = pl.sum_horizontal((pl.col(name) != "").cast(pl.Int32) for name in cells)
    frame = frame.with_columns(first.alias(_FIRST), filled.alias(_FILLED)).filter(pl.col(_FILLED) > 0)
    usual = float(frame[_FILLED].median() or 0)  # type: ignore[arg-type]
    is_total = _totals(frame, usual)
    is_repeat = _repeats(frame, header)
    is_section = (pl.lit(usual >= _NARROW)) & (pl.col(_FILLED) == 1)
    kinds = frame.select(total=is_total, repeat=is_repeat & ~is_total, section=is_section & ~is_total & ~is_repeat)
    data = frame.filter(~(kinds["total"] | kinds["repeat"] | kinds["section"]))
    # Totals may stand far behind the sample; data there is not looked at, so that the sample stays one.
    kept = data.filter(pl.col(ROW).is_in(sample.rows[ROW].implode()))
    told = {name: _told(frame.filter(kinds[name])) for name in kinds.columns}
    return SampleRows(kept.drop(_FIRST, _FILLED), data[_FIRST], told["total"], told["section"], told["repeat"])


def _totals(frame: pl.DataFrame, usual: float) -> pl.Expr:
    """Rows that say so and have fewer cells than others, or stand at the end: an oil may be called Total, too."""
    says_so = pl.col(_FIRST).str.contains(TOTAL)
    is_late = pl.int_range(pl.len()) >= frame.height - _NEAR_END
    is_lone = says_so.sum() <= _TOTALS_AT_END
    return says_so & ((pl.col(_FILLED) < usual) | (is_late & is_lone))


def _repeats(frame: pl.DataFrame, header: HeaderRows | None) -> pl.Expr:
    """The header once more, as it is printed on every page."""
    names = [(str(place), normalize_name(name)) for place, name in enumerate(header.names if header else []) if name]
    known = [(column, name) for column, name in names if column in frame.columns]
    if len(known) < 2 or (header is not None and header.depth > 1):
        return pl.lit(False)
    same = [pl.col(column).str.to_lowercase().str.replace_all(r"\s+", " ") == name for column, name in known]
    return pl.sum_horizontal(one.cast(pl.Int32) for one in same) * 2 > len(known)


def _told(frame: pl.DataFrame) -> dict[int, str]:
    return dict(zip(frame[ROW].to_list(), frame[_FIRST].to_list(), strict=True))


@dataclass(frozen=True)
class SkipRules:
    """Patterns of `source.skip_rows`, and what a person should know."""

    patterns: list[str]
    warnings: list[str]
    leaves_sections: bool = False


def patterns_for(tables: list[SampleRows]) -> SkipRules:
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
    return SkipRules(found, warnings, leaves_sections=bool(sections) and not patterns)


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
