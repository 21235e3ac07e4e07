"""F13: `worker_ohlcv_export`: candles from a file or from SQL, resampled to each requested timeframe."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import polars as pl
from pydantic import Field, StringConstraints, field_validator, model_validator

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read_inputs
from penstock.flows.kinds.market.candles import Candle, CandleSeries, CandleSet, format_time, parse_candles
from penstock.flows.step import FlowStep, Handler, Outputs, Query, StepFailed
from penstock.kernel.errors import PenstockError, Transient

OHLCV_EXPORT = "OHLCV_EXPORT"
TIMEFRAMES = ("1m", "3m", "5m", "15m", "30m", "1h", "2h", "4h", "6h", "8h", "12h", "1d", "3d", "1w")
FILE_LIMIT = 1_000_000_000  # bytes
ROW_LIMIT = 5_000_000
_SIGNIFICANT = 12  # digits of a volume; further digits depend on the order of the summation

Timeframe = Annotated[str, StringConstraints(pattern=rf"^({'|'.join(TIMEFRAMES)})\z")]


class CandleSource(SpecModel):
    """The source of the candles: a file in the configured folder, or an SQL statement."""

    file: str | None = Field(None, min_length=1, max_length=500)
    sql: str | None = Field(None, min_length=1, max_length=20_000)
    params: list[Any] = Field(default_factory=list, max_length=100)

    @model_validator(mode="after")
    def _is_one(self) -> "CandleSource":
        if (self.file is None) == (self.sql is None):
            raise ValueError("either `file` or `sql` is required, but not both")
        return self


class OhlcvInputs(SpecModel):
    """The inputs of an OHLCV_EXPORT step."""

    source: CandleSource
    timeframes: list[Timeframe] = Field(min_length=1, max_length=len(TIMEFRAMES))
    symbol: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]{1,64}\z")] | None = None

    @field_validator("timeframes")
    @classmethod
    def _check_different(cls, timeframes: list[str]) -> list[str]:
        if len({*timeframes}) < len(timeframes):
            raise ValueError("the timeframes must be unique")
        return timeframes


def worker_ohlcv_export(files: Path | None, query: Query | None) -> Handler:
    """Return the handler of steps that read *files* or call *query*; either may be None."""

    async def export(step: FlowStep) -> Outputs:
        inputs = read_inputs(OhlcvInputs, step.inputs)
        if inputs.source.file is not None:
            rows = await asyncio.to_thread(_read_file, files, inputs.source.file, inputs.symbol)
        else:
            rows = await _query_sql(query, inputs.source, inputs.symbol)
        if rows.rejected["count"]:
            counted = ", ".join(f"{count} {reason}" for reason, count in rows.rejected["reasons"].items())
            await step.log(f"{rows.rejected['count']} of {rows.seen} rows were rejected: {counted}", "warning")
        written = [await _write_series(step, rows, timeframe) for timeframe in inputs.timeframes]
        return {"symbol": rows.symbol, "files": written, "rows": rows.seen, "rejected": rows.rejected}

    return export


async def _write_series(step: FlowStep, rows: CandleSet, timeframe: str) -> dict[str, Any]:
    series = await asyncio.to_thread(resample, rows, timeframe)
    name = f"{timeframe}.json"
    path = await step.write(name, await asyncio.to_thread(series.as_bytes))
    first, last = (format_time(candle.time) for candle in (series.candles[0], series.candles[-1]))
    await step.log(f"{timeframe}: {len(series.candles)} candles from {first} to {last}")
    file = {"step": step.step_id, "name": name, "timeframe": timeframe, "path": path}
    return {**file, "candles": len(series.candles), "first": first, "last": last}


def resample(rows: CandleSet, timeframe: str) -> CandleSeries:
    """Return the candles of *timeframe* in UTC; intervals without rows have no candle. Weeks start on Monday."""
    interval = rows.frame.get_column("time").diff().min()
    if isinstance(interval, timedelta) and interval > _parse_timeframe(timeframe):
        message = f"the rows have an interval of {interval}, which is longer than the timeframe {timeframe}"
        raise StepFailed("TIMEFRAME_TOO_FINE", message, retryable=False)
    column = pl.col
    grouped = rows.frame.group_by_dynamic("time", every=timeframe, closed="left", label="left", start_by="window").agg(
        column("open").first(),
        column("high").max(),
        column("low").min(),
        column("close").last(),
        column("volume").sum().round_sig_figs(_SIGNIFICANT),
    )
    return CandleSeries(rows.symbol, timeframe, [Candle(*row) for row in grouped.iter_rows()])


def _parse_timeframe(timeframe: str) -> timedelta:
    unit = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[timeframe[-1]]
    return timedelta(**{unit: int(timeframe[:-1])})


def _read_file(folder: Path | None, file: str, symbol: str | None) -> CandleSet:
    path = resolve_path(folder, file)
    try:
        if path.suffix.lower() == ".parquet":
            table = pl.read_parquet(path, glob=False)
        else:
            # As text: each row is validated, instead of types inferred from the first hundred rows.
            table = pl.read_csv(path, infer_schema=False, truncate_ragged_lines=True, glob=False)
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise StepFailed("FILE_UNREADABLE", f"{file} cannot be read: {reason}", retryable=False) from error
    return parse_candles(table, symbol)


def resolve_path(folder: Path | None, file: str) -> Path:
    """Return the path of *file* inside *folder*, with links resolved; StepFailed if it is outside, or not readable."""
    if folder is None:
        message = "OHLCV_EXPORT has no folder to read from; set flows.files"
        raise StepFailed("FLOWS_FILES_NOT_SET", message, retryable=False)
    relative = PurePosixPath(file)
    if relative.is_absolute() or ".." in relative.parts or "\\" in file or "\0" in file:
        message = f"{file!r} is not a relative path inside the folder flows.files"
        raise StepFailed("FILE_OUTSIDE_FOLDER", message, retryable=False)
    if relative.suffix.lower() not in (".csv", ".parquet"):
        message = f"the file {file!r} has an unsupported format; supported are .csv and .parquet"
        raise StepFailed("BAD_INPUTS", message, retryable=False)
    try:
        root = folder.resolve(strict=True)
        path = (root / relative).resolve(strict=True)
        if not path.is_relative_to(root):
            message = f"{file!r} is a link to a file outside the folder flows.files"
            raise StepFailed("FILE_OUTSIDE_FOLDER", message, retryable=False)
        if not path.is_file():
            raise StepFailed("FILE_MISSING", f"{file!r} is not a regular file", retryable=False)
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        message = f"the folder flows.files has no file {file!r}"
        raise StepFailed("FILE_MISSING", message, retryable=False) from error
    if size > FILE_LIMIT:
        message = f"the file {file!r} has {size} bytes; the limit is {FILE_LIMIT}"
        raise StepFailed("FILE_TOO_LARGE", message, retryable=False)
    return path


async def _query_sql(query: Query | None, source: CandleSource, symbol: str | None) -> CandleSet:
    if query is None:
        message = "OHLCV_EXPORT has no database to query; set flows.database"
        raise StepFailed("SQL_NOT_ALLOWED", message, retryable=False)
    try:
        records = await query(str(source.sql), source.params, ROW_LIMIT)
    except PenstockError as error:
        raise StepFailed(error.code, error.message, retryable=isinstance(error, Transient)) from error
    return await asyncio.to_thread(_parse_records, records, symbol)


def _parse_records(records: Sequence[Mapping[str, Any]], symbol: str | None) -> CandleSet:
    if not records:
        raise StepFailed("NO_CANDLES", "the SQL statement returned no rows", retryable=False)
    columns = {name: [_convert_decimal(record[name]) for record in records] for name in records[0]}
    return parse_candles(pl.DataFrame(columns, strict=False), symbol)


def _convert_decimal(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value
