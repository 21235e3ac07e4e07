"""F13: `worker_ohlcv_export`: candles from a file or from SQL, resampled to each timeframe that is asked for."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import polars as pl
from pydantic import Field, StringConstraints, field_validator, model_validator

from penstock.flows.definition.spec import SpecModel
from penstock.flows.kinds.inputs import read
from penstock.flows.kinds.market.candles import Candle, CandleSeries, CandleSet, candles_of, instant
from penstock.flows.step import FlowStep, Handler, Outputs, Query, StepFailed
from penstock.kernel.errors import PenstockError, Transient

OHLCV_EXPORT = "OHLCV_EXPORT"
TIMEFRAMES = ("1m", "3m", "5m", "15m", "30m", "1h", "2h", "4h", "6h", "8h", "12h", "1d", "3d", "1w")
FILE_LIMIT = 1_000_000_000  # bytes
ROW_LIMIT = 5_000_000
_SIGNIFICANT = 12  # digits of a volume: what is beyond depends on the order in which it was added up

Timeframe = Annotated[str, StringConstraints(pattern=rf"^({'|'.join(TIMEFRAMES)})\z")]


class CandleSource(SpecModel):
    """Where candles come from: a file of the folder in the configuration, or a statement."""

    file: str | None = Field(None, min_length=1, max_length=500)
    sql: str | None = Field(None, min_length=1, max_length=20_000)
    params: list[Any] = Field(default_factory=list, max_length=100)

    @model_validator(mode="after")
    def _is_one(self) -> "CandleSource":
        if (self.file is None) == (self.sql is None):
            raise ValueError("give either `file` or `sql`")
        return self


class OhlcvInputs(SpecModel):
    """What a step of the kind OHLCV_EXPORT is to do."""

    source: CandleSource
    timeframes: list[Timeframe] = Field(min_length=1, max_length=len(TIMEFRAMES))
    symbol: Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f]{1,64}\z")] | None = None

    @field_validator("timeframes")
    @classmethod
    def _are_different(cls, timeframes: list[str]) -> list[str]:
        if len({*timeframes}) < len(timeframes):
            raise ValueError("one comes twice")
        return timeframes


def worker_ohlcv_export(files: Path | None, query: Query | None) -> Handler:
    """The worker that reads *files* and asks with *query*; either may be missing."""

    async def export(step: FlowStep) -> Outputs:
        inputs = read(OhlcvInputs, step.inputs)
        if inputs.source.file is not None:
            rows = await asyncio.to_thread(_from_file, files, inputs.source.file, inputs.symbol)
        else:
            rows = await _from_sql(query, inputs.source, inputs.symbol)
        if rows.rejected["count"]:
            counted = ", ".join(f"{count} {reason}" for reason, count in rows.rejected["reasons"].items())
            await step.log(f"{rows.rejected['count']} of {rows.seen} rows are no candles: {counted}", "warning")
        kept = [await _keep(step, rows, timeframe) for timeframe in inputs.timeframes]
        return {"symbol": rows.symbol, "files": kept, "rows": rows.seen, "rejected": rows.rejected}

    return export


async def _keep(step: FlowStep, rows: CandleSet, timeframe: str) -> dict[str, Any]:
    series = await asyncio.to_thread(resampled, rows, timeframe)
    name = f"{timeframe}.json"
    path = await step.write(name, await asyncio.to_thread(series.as_bytes))
    first, last = (instant(candle.time) for candle in (series.candles[0], series.candles[-1]))
    await step.log(f"{timeframe}: {len(series.candles)} candles from {first} to {last}")
    known = {"step": step.step_id, "name": name, "timeframe": timeframe, "path": path}
    return {**known, "candles": len(series.candles), "first": first, "last": last}


def resampled(rows: CandleSet, timeframe: str) -> CandleSeries:
    """The candles of *timeframe*; where there was no trade there is no candle. Weeks begin on Monday, all in UTC."""
    apart = rows.frame.get_column("time").diff().min()
    if isinstance(apart, timedelta) and apart > _length(timeframe):
        said = f"the candles are {apart} apart: they cannot be cut into {timeframe}"
        raise StepFailed("TIMEFRAME_TOO_FINE", said, retryable=False)
    column = pl.col
    grouped = rows.frame.group_by_dynamic("time", every=timeframe, closed="left", label="left", start_by="window").agg(
        column("open").first(),
        column("high").max(),
        column("low").min(),
        column("close").last(),
        column("volume").sum().round_sig_figs(_SIGNIFICANT),
    )
    return CandleSeries(rows.symbol, timeframe, [Candle(*row) for row in grouped.iter_rows()])


def _length(timeframe: str) -> timedelta:
    unit = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}[timeframe[-1]]
    return timedelta(**{unit: int(timeframe[:-1])})


def _from_file(folder: Path | None, file: str, symbol: str | None) -> CandleSet:
    path = safe_path(folder, file)
    try:
        if path.suffix.lower() == ".parquet":
            table = pl.read_parquet(path, glob=False)
        else:
            # As text: what is a number is judged row by row, not guessed from the first hundred.
            table = pl.read_csv(path, infer_schema=False, truncate_ragged_lines=True, glob=False)
    except (pl.exceptions.PolarsError, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
        raise StepFailed("FILE_UNREADABLE", f"{file} cannot be read: {reason}", retryable=False) from error
    return candles_of(table, symbol)


def safe_path(folder: Path | None, file: str) -> Path:
    """Where *file* is inside *folder*, links followed; StepFailed when it is not, or is no file we read."""
    if folder is None:
        raise StepFailed("FLOWS_FILES_NOT_SET", "no folder to read from: set flows.files", retryable=False)
    written = PurePosixPath(file)
    if written.is_absolute() or ".." in written.parts or "\\" in file or "\0" in file:
        raise StepFailed("FILE_OUTSIDE_FOLDER", f"{file!r} is not a path inside flows.files", retryable=False)
    if written.suffix.lower() not in (".csv", ".parquet"):
        raise StepFailed("BAD_INPUTS", f"{file!r} is neither .csv nor .parquet", retryable=False)
    try:
        root = folder.resolve(strict=True)
        path = (root / written).resolve(strict=True)
        if not path.is_relative_to(root):
            raise StepFailed("FILE_OUTSIDE_FOLDER", f"{file!r} leads out of flows.files", retryable=False)
        if not path.is_file():
            raise StepFailed("FILE_MISSING", f"{file!r} is no file", retryable=False)
        size = path.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise StepFailed("FILE_MISSING", f"there is no file {file!r} in flows.files", retryable=False) from error
    if size > FILE_LIMIT:
        raise StepFailed("FILE_TOO_LARGE", f"{file!r} is over {FILE_LIMIT} bytes", retryable=False)
    return path


async def _from_sql(query: Query | None, source: CandleSource, symbol: str | None) -> CandleSet:
    if query is None:
        raise StepFailed("SQL_NOT_ALLOWED", "there is no database to ask", retryable=False)
    try:
        found = await query(str(source.sql), source.params, ROW_LIMIT)
    except PenstockError as error:
        raise StepFailed(error.code, error.message, retryable=isinstance(error, Transient)) from error
    return await asyncio.to_thread(_of_records, found, symbol)


def _of_records(found: Sequence[Mapping[str, Any]], symbol: str | None) -> CandleSet:
    if not found:
        raise StepFailed("NO_CANDLES", "the statement found no rows", retryable=False)
    columns = {name: [_plain(row[name]) for row in found] for name in found[0]}
    return candles_of(pl.DataFrame(columns, strict=False), symbol)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Decimal) else value
