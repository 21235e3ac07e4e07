"""Which rows of a table are data, and which are totals, sections, notes or its header once more."""

from dataclasses import dataclass, field

import polars as pl

from penstock.ingest.inspect.headers import HeaderRows
from penstock.ingest.inspect.sample import ROW, Sample
from penstock.ingest.transform.gate import normal

TOTAL = r"(?i)^(итого|итог|всего|total|grand total|subtotal|sum)(?:[\s:.]|$)"
_FIRST, _FILLED = "\x00first", "\x00filled"
_NARROW = 3  # columns below which a row with one cell is nothing special
_NEAR_END = 5
_TOTALS_AT_END = 2


@dataclass(frozen=True)
class Rows:
    """The rows of a sample, sorted; of those that are no data, their numbers and first texts."""

    data: pl.DataFrame
    firsts: pl.Series
    totals: dict[int, str] = field(default_factory=dict)
    sections: dict[int, str] = field(default_factory=dict)
    repeats: dict[int, str] = field(default_factory=dict)


def sorted_rows(sample: Sample, header: HeaderRows | None) -> Rows:
    """What each row of *sample* below *header* is."""
    cells = [name for name in sample.rows.columns if name != ROW]
    if not cells or sample.names is not None:
        return Rows(_filled_only(sample.rows, cells), pl.Series([], dtype=pl.String))
    end = header.end if header else 0
    last = sample.last.filter(pl.col(ROW) > sample.rows[ROW].max()) if sample.rows.height else sample.last
    frame = pl.concat([sample.rows, last], how="diagonal").filter(pl.col(ROW) > end)
    frame = _measured(frame.with_columns(pl.col(cells).fill_null("")), cells)
    usual = float(frame[_FILLED].median() or 0)  # type: ignore[arg-type]
    is_total = _totals(frame, usual)
    is_repeat = _repeats(frame, header)
    is_section = (pl.lit(usual >= _NARROW)) & (pl.col(_FILLED) == 1)
    kinds = frame.select(total=is_total, repeat=is_repeat & ~is_total, section=is_section & ~is_total & ~is_repeat)
    data = frame.filter(~(kinds["total"] | kinds["repeat"] | kinds["section"]))
    # Totals may stand far behind the sample; data there is not looked at, so that the sample stays one.
    kept = data.filter(pl.col(ROW).is_in(sample.rows[ROW].implode()))
    told = {name: _told(frame.filter(kinds[name])) for name in kinds.columns}
    return Rows(kept.drop(_FIRST, _FILLED), data[_FIRST], told["total"], told["section"], told["repeat"])


def _filled_only(frame: pl.DataFrame, cells: list[str]) -> pl.DataFrame:
    return frame.filter(pl.any_horizontal(pl.col(cells) != "")) if cells else frame


def _measured(frame: pl.DataFrame, cells: list[str]) -> pl.DataFrame:
    first = pl.coalesce([pl.when(pl.col(name) != "").then(pl.col(name)) for name in cells])
    filled = pl.sum_horizontal((pl.col(name) != "").cast(pl.Int32) for name in cells)
    return frame.with_columns(first.alias(_FIRST), filled.alias(_FILLED)).filter(pl.col(_FILLED) > 0)


def _totals(frame: pl.DataFrame, usual: float) -> pl.Expr:
    """Rows that say so and have fewer cells than others, or stand at the end: an oil may be called Total, too."""
    says_so = pl.col(_FIRST).str.contains(TOTAL)
    is_late = pl.int_range(pl.len()) >= frame.height - _NEAR_END
    is_lone = says_so.sum() <= _TOTALS_AT_END
    return says_so & ((pl.col(_FILLED) < usual) | (is_late & is_lone))


def _repeats(frame: pl.DataFrame, header: HeaderRows | None) -> pl.Expr:
    """The header once more, as it is printed on every page."""
    names = [(str(place), normal(name)) for place, name in enumerate(header.names if header else []) if name]
    known = [(column, name) for column, name in names if column in frame.columns]
    if len(known) < 2 or (header is not None and header.depth > 1):
        return pl.lit(False)
    same = [pl.col(column).str.to_lowercase().str.replace_all(r"\s+", " ") == name for column, name in known]
    return pl.sum_horizontal(one.cast(pl.Int32) for one in same) * 2 > len(known)


def _told(frame: pl.DataFrame) -> dict[int, str]:
    return dict(zip(frame[ROW].to_list(), frame[_FIRST].to_list(), strict=True))
