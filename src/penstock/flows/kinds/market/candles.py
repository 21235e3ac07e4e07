"""Series of candles: read from a table (invalid rows are counted) or an export, and joined; and moving averages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, NamedTuple

import orjson
import polars as pl
from pydantic import Field

from penstock.flows.definition.spec import Name, SpecModel
from penstock.flows.step import StepFailed

COLUMNS = ("time", "open", "high", "low", "close", "volume")
TIMEFRAME = r"^[1-9][0-9]{0,3}[mhdw]\z"
EXAMPLES = 20  # rejected rows that are told one by one
_NUMBERS = COLUMNS[1:]
_SECONDS, _MILLISECONDS = 10**11, 10**14  # epochs below are meant so: either reaches beyond the year 5000
_LARGEST = 1e100  # of any number; what is beyond is no price, and breaks sums
_DATE = r"(?<date>[0-9]{4}-[0-9]{2}-[0-9]{2})"
_CLOCK = (
    r"(?:[T ](?<minute>[0-9]{2}:[0-9]{2})(?<second>:[0-9]{2}(?:\.[0-9]{1,9})?)?(?<zone>Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)
_INSTANT = rf"^\s*{_DATE}{_CLOCK}\s*$"
_UTC = pl.Datetime("us", "UTC")


class CandleFile(SpecModel):
    """Candles of one timeframe, as a step before exported them."""

    step: Name
    name: Name
    timeframe: str = Field(pattern=TIMEFRAME)
    path: str = Field("", max_length=1_000)
    candles: int = 0
    first: str | None = None
    last: str | None = None


class Candle(NamedTuple):
    """What a price did in the time that began at *time*."""

    time: datetime
    open: float
    high: float
    low: float
    close: float
    volume: float

    @property
    def is_up(self) -> bool:
        """Whether it closed where it opened, or higher."""
        return self.close >= self.open


@dataclass(frozen=True, slots=True)
class CandleSeries:
    """The candles of one timeframe, in order of time."""

    symbol: str
    timeframe: str
    candles: Sequence[Candle]

    def last(self, number: int | None) -> "CandleSeries":
        """The latest so many; all of them for None."""
        return self if number is None else replace(self, candles=self.candles[-number:])

    def as_dict(self) -> dict[str, Any]:
        """As it is kept and sent."""
        rows = [[instant(candle.time), *candle[1:]] for candle in self.candles]
        return {
            "symbol": self.symbol,
            "timeframe": self.timeframe,
            "timezone": "UTC",
            "columns": COLUMNS,
            "candles": rows,
        }

    def as_bytes(self) -> bytes:
        """The artifact: the same bytes for the same candles."""
        return orjson.dumps(self.as_dict())


def read_series(data: bytes) -> CandleSeries:
    """What `as_bytes` wrote; ValueError for anything else."""
    document = orjson.loads(data)
    try:
        candles = [Candle(datetime.fromisoformat(row[0]), *map(float, row[1:])) for row in document["candles"]]
        return CandleSeries(str(document["symbol"]), str(document["timeframe"]), candles)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not an export of candles: {error!r}") from error


def instant(at: datetime) -> str:
    """ISO 8601 in UTC, to the second."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def joined(candles: Sequence[Candle], size: int) -> list[Candle]:
    """Fewer candles, each of *size* that follow one another; the last may be of fewer."""
    return [_one(candles[n : n + size]) for n in range(0, len(candles), size)]


def _one(group: Sequence[Candle]) -> Candle:
    high, low = max(c.high for c in group), min(c.low for c in group)
    return Candle(group[0].time, group[0].open, high, low, group[-1].close, sum(c.volume for c in group))


def moving_average(values: Sequence[float], period: int) -> list[float | None]:
    """The mean of the last *period* values at each place; None where there are fewer."""
    sums = [0.0, *accumulate(values)]
    means = [(sums[n] - sums[n - period]) / period for n in range(period, len(sums))]
    return [None] * min(period - 1, len(values)) + list(means)


@dataclass(frozen=True, slots=True)
class CandleSet:
    """Candles in order of time, and what was set aside of the rows they came from."""

    frame: pl.DataFrame
    symbol: str
    seen: int
    rejected: Mapping[str, Any]


def candles_of(table: pl.DataFrame, symbol: str | None) -> CandleSet:
    """The candles of *symbol* in a table; StepFailed when it has not the columns, or not one candle."""
    named = _with_known_names(table)
    mine, name = _of_symbol(named.with_row_index("row", offset=1), symbol)
    judged = _judged(mine.select("row", _time(mine.schema["time"]), *map(_number, _NUMBERS)))
    good = judged.filter(pl.col("reason").is_null()).sort("time", "row")
    bad = judged.filter(pl.col("reason").is_not_null()).sort("row")
    if good.is_empty():
        details = {"rows": len(mine), "rejected": _told(bad)}
        raise StepFailed("NO_CANDLES", f"none of {len(mine)} rows is a candle", details, retryable=False)
    return CandleSet(good.select(COLUMNS).rechunk(), name, len(mine), _told(bad))


def _with_known_names(table: pl.DataFrame) -> pl.DataFrame:
    """The columns we know, whatever case and space they are written with."""
    known: dict[str, str] = {}
    for column in table.columns:
        name = column.strip().removeprefix("\ufeff").lower()
        if name in (*COLUMNS, "symbol") and name in known:
            raise StepFailed("BAD_COLUMNS", f"two columns are called {name}", retryable=False)
        known[name] = column
    missing = [name for name in COLUMNS if name not in known]
    if missing:
        said = f"there is no column {', '.join(missing)}; there are {', '.join(table.columns[:50])}"
        raise StepFailed("BAD_COLUMNS", said, {"missing": missing}, retryable=False)
    wanted = [*COLUMNS, *(["symbol"] if "symbol" in known else [])]
    return table.select(pl.col(known[name]).alias(name) for name in wanted)


def _of_symbol(table: pl.DataFrame, symbol: str | None) -> tuple[pl.DataFrame, str]:
    """The rows that are meant: several symbols in one series would be nonsense."""
    if "symbol" not in table.columns:
        return table, symbol or ""
    names = table.get_column("symbol").cast(pl.String).str.strip_chars()
    if symbol is not None:
        mine = table.filter(names == symbol)
        if mine.is_empty():
            known = names.drop_nulls().unique().sort().to_list()
            said = f"there are no rows of symbol {symbol!r}"
            raise StepFailed("NO_CANDLES", said, {"symbols": known[:50]}, retryable=False)
        return mine, symbol
    found = names.drop_nulls().unique().sort().to_list()
    if len(found) > 1:
        said = f"the rows are of {len(found)} symbols; give `symbol`"
        raise StepFailed("SYMBOL_MISSING", said, {"symbols": found[:50]}, retryable=False)
    return table, found[0] if found else ""


def _time(kind: pl.DataType) -> pl.Expr:
    """The column *time* in UTC, null where it is none; a time without a zone is meant in UTC."""
    column = pl.col("time")
    if isinstance(kind, pl.Datetime):
        return (column.dt.convert_time_zone("UTC") if kind.time_zone else column.dt.replace_time_zone("UTC")).cast(_UTC)
    if kind == pl.Date:
        return column.cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    if kind.is_numeric():
        return _epoch(column.cast(pl.Int64, strict=False))
    text = column.cast(pl.String, strict=False)
    return pl.coalesce(_written(text), _epoch(text.str.strip_chars().cast(pl.Int64, strict=False))).alias("time")


def _written(text: pl.Expr) -> pl.Expr:
    part = text.str.extract_groups(_INSTANT).struct.field
    whole = pl.concat_str(
        part("date"),
        pl.lit("T"),
        part("minute").fill_null("00:00"),
        part("second").fill_null(":00"),
        part("zone").fill_null("Z").str.replace("Z", "+00:00", literal=True),
    )
    return whole.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%z", time_unit="us", strict=False).cast(_UTC)


def _epoch(number: pl.Expr) -> pl.Expr:
    scale = pl.when(number < _SECONDS).then(1_000_000).when(number < _MILLISECONDS).then(1_000).otherwise(1)
    return pl.when(number >= 0).then(number * scale).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")


def _number(name: str) -> pl.Expr:
    column = pl.col(name)
    return pl.coalesce(column.cast(pl.Float64, strict=False)).alias(name)


def _judged(rows: pl.DataFrame) -> pl.DataFrame:
    """Each row with the reason why it is no candle; null for one that is."""
    top, bottom = pl.max_horizontal("open", "close"), pl.min_horizontal("open", "close")
    sound = pl.all_horizontal(
        *(pl.col(name).is_between(-_LARGEST, _LARGEST).fill_null(value=False) for name in _NUMBERS)
    )
    reason = (
        pl.when(pl.col("time").is_null())
        .then(pl.lit("BAD_TIME"))
        .when(~sound)
        .then(pl.lit("BAD_NUMBER"))
        .when((pl.col("high") < top) | (pl.col("low") > bottom))
        .then(pl.lit("HIGH_LOW_CROSSED"))
        .when(pl.col("volume") < 0)
        .then(pl.lit("NEGATIVE_VOLUME"))
    )
    first = rows.with_columns(reason.alias("reason"))
    # Of rows of one time the last is believed: it is usually the correction.
    is_last = pl.col("row") == pl.col("row").max().over("time", "reason")
    doubled = pl.col("reason").is_null() & ~is_last
    return first.with_columns(pl.when(doubled).then(pl.lit("DUPLICATE")).otherwise(pl.col("reason")).alias("reason"))


def _told(bad: pl.DataFrame) -> dict[str, Any]:
    counts = bad.group_by("reason").len().sort("reason")
    examples: Sequence[Any] = bad.select("row", "reason").head(EXAMPLES).to_dicts()
    return {"count": len(bad), "reasons": dict(counts.iter_rows()), "examples": examples}
