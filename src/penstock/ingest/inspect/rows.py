"""The rows of a table as data, totals, sections, notes and repeated headers; and patterns for the rows to skip."""

import re
from dataclasses import dataclass, field

import polars as pl

from penstock.ingest.inspect.headers import HeaderRows
from penstock.ingest.inspect.sample import ROW, SampleBuffer
from penstock.ingest.transform.gate import normalize_name
from penstock.kernel.status import pluralize

TOTAL = r"(?i)^(итого|итог|всего|total|grand total|subtotal|sum)(?:[\s:.]|$)"
_FIRST, _FILLED = "\x00first", "\x00filled"
_NARROW = 3  # with fewer columns, a row with a single cell is not a section
_NEAR_END = 5
_TOTALS_AT_END = 2
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")
_MAX_LISTED = 30  # texts for which single patterns are proposed
_ROW_NUMBER = r"^[0-9]+$"
_NOT_ROW_NUMBER = r"^[^0-9]"


@dataclass(frozen=True)
class SampleRows:
    """The data rows of a sample, and the numbers and first texts of totals, sections and repeated headers."""

    data: pl.DataFrame
    firsts: pl.Series
    totals: dict[int, str] = field(default_factory=dict)
    sections: dict[int, str] = field(default_factory=dict)
    repeats: dict[int, str] = field(default_factory=dict)


def sort_rows(sample: SampleBuffer, header: HeaderRows | None) -> SampleRows:
    """Sort the rows of *sample* below *header* into data, totals, sections and repeated headers."""
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
    is_total = _find_totals(frame, usual)
    is_repeat = _find_repeats(frame, header)
    is_section = (pl.lit(usual >= _NARROW)) & (pl.col(_FILLED) == 1)
    kinds = frame.select(total=is_total, repeat=is_repeat & ~is_total, section=is_section & ~is_total & ~is_repeat)
    data = frame.filter(~(kinds["total"] | kinds["repeat"] | kinds["section"]))
    # Totals may be far after the sample; data rows there are dropped, because they are not part of the sample.
    sampled = data.filter(pl.col(ROW).is_in(sample.rows[ROW].implode()))
    texts = {name: _read_first_texts(frame.filter(kinds[name])) for name in kinds.columns}
    return SampleRows(sampled.drop(_FIRST, _FILLED), data[_FIRST], texts["total"], texts["section"], texts["repeat"])


def _find_totals(frame: pl.DataFrame, usual: float) -> pl.Expr:
    """Return whether a row starts with a word such as total, and has few cells or is at the end."""
    is_named = pl.col(_FIRST).str.contains(TOTAL)
    is_late = pl.int_range(pl.len()) >= frame.height - _NEAR_END
    is_lone = is_named.sum() <= _TOTALS_AT_END
    return is_named & ((pl.col(_FILLED) < usual) | (is_late & is_lone))


def _find_repeats(frame: pl.DataFrame, header: HeaderRows | None) -> pl.Expr:
    """Return whether a row repeats the header, which some programs print on every page."""
    names = [(str(index), normalize_name(name)) for index, name in enumerate(header.names if header else []) if name]
    present = [(column, name) for column, name in names if column in frame.columns]
    if len(present) < 2 or (header is not None and header.depth > 1):
        return pl.lit(False)
    same = [pl.col(column).str.to_lowercase().str.replace_all(r"\s+", " ") == name for column, name in present]
    return pl.sum_horizontal(cell.cast(pl.Int32) for cell in same) * 2 > len(present)


def _read_first_texts(frame: pl.DataFrame) -> dict[int, str]:
    return dict(zip(frame[ROW].to_list(), frame[_FIRST].to_list(), strict=True))


@dataclass(frozen=True)
class SkipRules:
    """The patterns proposed for `source.skip_rows`, and the warnings."""

    patterns: list[str]
    warnings: list[str]
    leaves_sections: bool = False


def propose_skip_rules(tables: list[SampleRows]) -> SkipRules:
    """Return the rules that skip rows in all *tables*."""
    firsts = pl.concat([rows.firsts for rows in tables]) if tables else pl.Series([], dtype=pl.String)
    totals = _list_texts([rows.totals for rows in tables])
    repeats = _list_texts([rows.repeats for rows in tables])
    sections = _list_texts([rows.sections for rows in tables])
    all_patterns: list[str] = []
    warnings: list[str] = []
    patterns: list[str] = []
    for propose, texts in ((_skip_totals, totals), (_skip_repeats, repeats), (_skip_sections, sections)):
        patterns, more = propose(texts, firsts) if texts else ([], [])
        all_patterns += [pattern for pattern in patterns if pattern not in all_patterns]
        warnings += more
    return SkipRules(all_patterns, warnings, leaves_sections=bool(sections) and not patterns)


def _skip_totals(texts: list[str], firsts: pl.Series) -> tuple[list[str], list[str]]:
    words = sorted({match[1].lower() for text in texts if (match := re.search(TOTAL, text))})
    patterns: list[str] = []
    for word in words:
        exact = [_match_exactly(text) for text in texts if text.lower().startswith(word)]
        patterns += next((tried for tried in ([rf"(?i)^{word}\b"], exact) if not _matches_data(tried, firsts)), [])
    if len(patterns) < len(words):
        problem = f"rows such as {texts[0]!r} look like totals, but a pattern would also match data"
        return patterns, [f"{problem}: they are not skipped"]
    return patterns, []


def _skip_repeats(texts: list[str], firsts: pl.Series) -> tuple[list[str], list[str]]:
    patterns = [_match_exactly(text) for text in texts]
    if _matches_data(patterns, firsts):
        return [], [f"the header is repeated inside the table ({texts[0]!r}): these rows will be bad"]
    return patterns, []


def _skip_sections(texts: list[str], firsts: pl.Series) -> tuple[list[str], list[str]]:
    """Propose a pattern for all sections if the first column numbers the rows, else a pattern for each text."""
    examples = ", ".join(repr(text) for text in texts[:3])
    rows = f"{pluralize(len(texts), 'row')} with a single cell, such as {examples}"
    is_numbered = len(firsts) > 0 and bool(firsts.str.contains(_ROW_NUMBER).all())
    if is_numbered and all(re.match(_NOT_ROW_NUMBER, text) for text in texts):
        return [_NOT_ROW_NUMBER], [f"{rows}: skipped as sections or notes; their text is not read"]
    patterns = [_match_exactly(text) for text in texts]
    if len(texts) <= _MAX_LISTED and not _matches_data(patterns, firsts):
        return patterns, [f"{rows}: skipped by their texts as sections or notes; other sections will be bad rows"]
    return [], [f"{rows}: these will be bad rows; skip them with a pattern in `source.skip_rows`"]


def _list_texts(tables: list[dict[int, str]]) -> list[str]:
    return list(dict.fromkeys(text for rows in tables for text in rows.values()))


def _match_exactly(text: str) -> str:
    return "^" + _SPECIAL.sub(r"\\\1", text) + "$"


def _matches_data(patterns: list[str], firsts: pl.Series) -> bool:
    return any(bool(firsts.str.contains(pattern).any()) for pattern in patterns)
