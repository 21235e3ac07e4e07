"""Series of candles: parsed from a table or an export, and joined; moving averages."""

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
EXAMPLES = 20  # rejected rows in the details
_NUMBERS = COLUMNS[1:]
_SECONDS, _MILLISECONDS = 10**11, 10**14  # limits of epochs in these units: both are after the year 5000
_LARGEST = 1e100  # larger numbers are not prices, and would overflow sums
_DATE = r"(?<date>[0-9]{4}-[0-9]{2}-[0-9]{2})"
_CLOCK = (
    r"(?:[T ](?<minute>[0-9]{2}:[0-9]{2})(?<second>:[0-9]{2}(?:\.[0-9]{1,9})?)?(?<zone>Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)
_INSTANT = rf"^\s*{_DATE}{_CLOCK}\s*$"
_UTC = pl.Datetime("us", "UTC")


class CandleFile(SpecModel):
    """An artifact with candles of one timeframe, written by an earlier step."""

    step: Name
    name: Name
    timeframe: str = Field(pattern=TIMEFRAME)
    path: str = Field("", max_length=1_000)
    candles: int = 0
    first: str | None = None
    last: str | None = None


class Candle(NamedTuple):
    """The prices of one interval, which starts at *time*."""

    time: datetime
    open: float
    high: float
    low: float
    close: float
    volume: float

    @property
    def is_up(self) -> bool:
        """Return whether the candle closed at its opening price or higher."""
        return self.close >= self.open


@dataclass(frozen=True, slots=True)
class CandleSeries:
    """The candles of one timeframe, in order of time."""

    symbol: str
    timeframe: str
    candles: Sequence[Candle]

    def select_last(self, number: int | None) -> "CandleSeries":
        """Return the latest *number* candles, or all for None."""
        return self if number is None else replace(self, candles=self.candles[-number:])

    def as_dict(self) -> dict[str, Any]:
        """Return the series as it is stored and sent."""
        rows = [[format_time(candle.time), *candle[1:]] for candle in self.candles]
        return {
            "symbol": self.symbol,
            "timeframe": self.timeframe,
            "timezone": "UTC",
            "columns": COLUMNS,
            "candles": rows,
        }

    def as_bytes(self) -> bytes:
        """Return the content of the artifact: equal series have equal bytes."""
        return orjson.dumps(self.as_dict())


def read_series(data: bytes) -> CandleSeries:
    """Return the series in the output of `as_bytes`; ValueError for other data."""
    document = orjson.loads(data)
    try:
        candles = [Candle(datetime.fromisoformat(row[0]), *map(float, row[1:])) for row in document["candles"]]
        return CandleSeries(str(document["symbol"]), str(document["timeframe"]), candles)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"the file is not an export of candles: {error!r}") from error


def format_time(at: datetime) -> str:
    """Return a time in ISO 8601, in UTC and without fractions of a second."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def join_candles(candles: Sequence[Candle], size: int) -> list[Candle]:
    """Return one candle for every *size* successive candles; the last may join fewer."""
    return [_join(candles[n : n + size]) for n in range(0, len(candles), size)]


def _join(group: Sequence[Candle]) -> Candle:
    high, low = max(c.high for c in group), min(c.low for c in group)
    return Candle(group[0].time, group[0].open, high, low, group[-1].close, sum(c.volume for c in group))


def compute_moving_average(values: Sequence[float], period: int) -> list[float | None]:
    """Return the mean of the last *period* values at each index; None where there are fewer."""
    sums = [0.0, *accumulate(values)]
    means = [(sums[n] - sums[n - period]) / period for n in range(period, len(sums))]
    return [None] * min(period - 1, len(values)) + list(means)


@dataclass(frozen=True, slots=True)
class CandleSet:
    """Candles in order of time, and a summary of the rejected rows; *seen* is the number of all rows."""

    frame: pl.DataFrame
    symbol: str
    seen: int
    rejected: Mapping[str, Any]


def parse_candles(table: pl.DataFrame, symbol: str | None) -> CandleSet:
    """Return the candles of *symbol* in a table; StepFailed without the columns, or without a valid row."""
    indexed = _normalise_columns(table).with_row_index("row", offset=1)
    selected, name = _select_symbol(indexed, symbol)
    times, numbers = _make_time_column(selected.schema["time"]), map(_make_number_column, _NUMBERS)
    rows = _validate_rows(selected.select("row", times, *numbers))
    valid = rows.filter(pl.col("reason").is_null()).sort("time", "row")
    rejected = _summarise_rejected(rows.filter(pl.col("reason").is_not_null()).sort("row"))
    if valid.is_empty():
        message = f"none of {len(selected)} rows is a valid candle"
        details = {"rows": len(selected), "rejected": rejected}
        raise StepFailed("NO_CANDLES", message, details, retryable=False)
    return CandleSet(valid.select(COLUMNS).rechunk(), name, len(selected), rejected)


def _normalise_columns(table: pl.DataFrame) -> pl.DataFrame:
    """Return the columns of candles under their standard names; case and surrounding spaces are ignored."""
    columns: dict[str, str] = {}
    for column in table.columns:
        name = column.strip().removeprefix("\ufeff").lower()
        if name in (*COLUMNS, "symbol") and name in columns:
            raise StepFailed("BAD_COLUMNS", f"the table has two columns named {name}", retryable=False)
        columns[name] = column
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        message = f"the table has no column {', '.join(missing)}; its columns are {', '.join(table.columns[:50])}"
        raise StepFailed("BAD_COLUMNS", message, {"missing": missing}, retryable=False)
    names = [*COLUMNS, *(["symbol"] if "symbol" in columns else [])]
    return table.select(pl.col(columns[name]).alias(name) for name in names)


def _select_symbol(table: pl.DataFrame, symbol: str | None) -> tuple[pl.DataFrame, str]:
    """Return the rows of one symbol, and its name; StepFailed if the symbol is ambiguous or missing."""
    if "symbol" not in table.columns:
        return table, symbol or ""
    names = table.get_column("symbol").cast(pl.String).str.strip_chars()
    if symbol is not None:
        selected = table.filter(names == symbol)
        if selected.is_empty():
            symbols = names.drop_nulls().unique().sort().to_list()
            message = f"the table has no rows of symbol {symbol!r}"
            raise StepFailed("NO_CANDLES", message, {"symbols": symbols[:50]}, retryable=False)
        return selected, symbol
    symbols = names.drop_nulls().unique().sort().to_list()
    if len(symbols) > 1:
        message = f"the table has rows of {len(symbols)} symbols; select one with `symbol`"
        raise StepFailed("SYMBOL_MISSING", message, {"symbols": symbols[:50]}, retryable=False)
    return table, symbols[0] if symbols else ""


def _make_time_column(kind: pl.DataType) -> pl.Expr:
    """Return the column *time* in UTC, null where it is invalid; a time without a zone is in UTC."""
    column = pl.col("time")
    if isinstance(kind, pl.Datetime):
        return (column.dt.convert_time_zone("UTC") if kind.time_zone else column.dt.replace_time_zone("UTC")).cast(_UTC)
    if kind == pl.Date:
        return column.cast(pl.Datetime("us")).dt.replace_time_zone("UTC")
    if kind.is_numeric():
        return _parse_epoch(column.cast(pl.Int64, strict=False))
    text = column.cast(pl.String, strict=False)
    epoch = _parse_epoch(text.str.strip_chars().cast(pl.Int64, strict=False))
    return pl.coalesce(_parse_iso(text), epoch).alias("time")


def _parse_iso(text: pl.Expr) -> pl.Expr:
    part = text.str.extract_groups(_INSTANT).struct.field
    whole = pl.concat_str(
        part("date"),
        pl.lit("T"),
        part("minute").fill_null("00:00"),
        part("second").fill_null(":00"),
        part("zone").fill_null("Z").str.replace("Z", "+00:00", literal=True),
    )
    return whole.str.to_datetime("%Y-%m-%dT%H:%M:%S%.f%z", time_unit="us", strict=False).cast(_UTC)


def _parse_epoch(number: pl.Expr) -> pl.Expr:
    scale = pl.when(number < _SECONDS).then(1_000_000).when(number < _MILLISECONDS).then(1_000).otherwise(1)
    return pl.when(number >= 0).then(number * scale).cast(pl.Datetime("us")).dt.replace_time_zone("UTC")


def _make_number_column(name: str) -> pl.Expr:
    column = pl.col(name)
    return pl.coalesce(column.cast(pl.Float64, strict=False)).alias(name)


def _validate_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows with the reason why they are rejected; null for valid candles."""
    top, bottom = pl.max_horizontal("open", "close"), pl.min_horizontal("open", "close")
    are_numbers = pl.all_horizontal(
        *(pl.col(name).is_between(-_LARGEST, _LARGEST).fill_null(value=False) for name in _NUMBERS)
    )
    reason = (
        pl.when(pl.col("time").is_null())
        .then(pl.lit("BAD_TIME"))
        .when(~are_numbers)
        .then(pl.lit("BAD_NUMBER"))
        .when((pl.col("high") < top) | (pl.col("low") > bottom))
        .then(pl.lit("HIGH_LOW_CROSSED"))
        .when(pl.col("volume") < 0)
        .then(pl.lit("NEGATIVE_VOLUME"))
    )
    checked = rows.with_columns(reason.alias("reason"))
    # Of several rows with the same time the last counts: it is usually a correction.
    is_last = pl.col("row") == pl.col("row").max().over("time", "reason")
    is_duplicate = pl.col("reason").is_null() & ~is_last
    final = pl.when(is_duplicate).then(pl.lit("DUPLICATE")).otherwise(pl.col("reason"))
    return checked.with_columns(final.alias("reason"))


def _summarise_rejected(rows: pl.DataFrame) -> dict[str, Any]:
    counts = rows.group_by("reason").len().sort("reason")
    examples: Sequence[Any] = rows.select("row", "reason").head(EXAMPLES).to_dicts()
    return {"count": len(rows), "reasons": dict(counts.iter_rows()), "examples": examples}
