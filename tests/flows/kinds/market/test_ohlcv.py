"""F13: candles from CSV, Parquet and SQL, resampled; rejected rows are counted and reported."""

import os
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.flows.config import FlowsSection
from penstock.flows.kinds.market.candles import parse_candles, read_series
from penstock.flows.kinds.market.ohlcv import OHLCV_EXPORT, resample
from penstock.flows.kinds.market.workers import kinds, make_workers
from penstock.flows.kinds.query import make_query
from penstock.flows.model import StepError
from penstock.flows.step import KindContext, Workers
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Invalid
from tests.flows.kinds.market.run_step_io import RunStepIO
from tests.support.soak import examples
from tests.support.types import Json

HEAD = "time,open,high,low,close,volume"
FIVE = [
    "2026-01-05T09:00Z,10,12,9,11,100",
    "2026-01-05T09:05Z,11,11.5,10.5,11.2,50",
    "2026-01-05T10:00Z,11.2,13,11,12.5,70",
    "2026-01-05T15:30Z,12.5,12.6,8,8.5,30",
    "2026-01-12T09:00Z,9,9.5,8.75,9.25,10",
]


@pytest.fixture
def workers(tmp_path: Path) -> Workers:
    return make_workers(KindContext(FlowsSection(files=tmp_path)))


@pytest.fixture
def step_io() -> RunStepIO:
    return RunStepIO()


def export_inputs(*timeframes: str, file: str = "candles.csv", **more: Any) -> Json:
    return {"source": {"file": file}, "timeframes": list(timeframes) or ["1h"], **more}


def write_rows(folder: Path, *rows: str, head: str = HEAD, name: str = "candles.csv") -> None:
    (folder / name).write_text("\n".join([head, *rows, ""]))


async def test_candles_are_resampled_to_each_timeframe(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13, F6: one artifact per timeframe; first open, last close, and no candles for gaps."""
    write_rows(tmp_path, *FIVE)
    outputs = await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h", "1d", "1w"))
    assert [file["path"] for file in outputs["files"]] == [f"runs/run-1/ohlcv/{t}.json" for t in ("1h", "1d", "1w")]
    assert step_io.document("ohlcv", "1h.json")["candles"] == [
        ["2026-01-05T09:00:00Z", 10, 12, 9, 11.2, 150],
        ["2026-01-05T10:00:00Z", 11.2, 13, 11, 12.5, 70],
        ["2026-01-05T15:00:00Z", 12.5, 12.6, 8, 8.5, 30],
        ["2026-01-12T09:00:00Z", 9, 9.5, 8.75, 9.25, 10],
    ]
    assert step_io.document("ohlcv", "1w.json")["candles"] == [
        ["2026-01-05T00:00:00Z", 10, 13, 8, 8.5, 250],
        ["2026-01-12T00:00:00Z", 9, 9.5, 8.75, 9.25, 10],
    ]
    assert outputs["files"][1] == {
        "step": "ohlcv",
        "name": "1d.json",
        "timeframe": "1d",
        "path": "runs/run-1/ohlcv/1d.json",
        "candles": 2,
        "first": "2026-01-05T00:00:00Z",
        "last": "2026-01-12T00:00:00Z",
    }
    assert outputs["rejected"]["count"] == 0


async def test_equal_input_has_equal_bytes(tmp_path: Path, workers: Workers) -> None:
    """F6, F13: the artifacts do not depend on the order of the rows, or on the time of the export."""
    rng = random.Random(5)
    times = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=n) for n in range(3_000)]
    rows = [f"{at:%Y-%m-%dT%H:%MZ},1.1,1.3,1.0,1.2,{rng.random()}" for at in times]
    artifacts = []
    for _ in range(3):
        write_rows(tmp_path, *rows)
        step_io = RunStepIO()
        await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("15m", "1d"))
        artifacts.append(step_io.artifacts)
        rng.shuffle(rows)
    assert artifacts[0] == artifacts[1] == artifacts[2]


async def test_invalid_rows_are_counted(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: invalid rows are rejected with a reason; of two rows with the same time the later one counts."""
    bad = [
        "yesterday,1,1,1,1,1",
        "2026-02-30T00:00Z,1,1,1,1,1",
        "2026-01-06T00:00Z,x,1,1,1,1",
        "2026-01-06T01:00Z,1,1,1,1,",
        "2026-01-06T02:00Z,1,1,1,nan,1",
        "2026-01-06T03:00Z,1,1,1,inf,1",
        "2026-01-06T03:30Z,1,1e300,1,1,1",
        "2026-01-06T04:00Z,2,1,1,1,1",
        "2026-01-06T05:00Z,1,2,1.5,2,1",
        "2026-01-06T06:00Z,1,1,1,1,-1",
        "2026-01-06T07:00Z,1",
    ]
    again = "2026-01-12T09:00Z,9,9.5,8.75,9.5,20"
    write_rows(tmp_path, *FIVE, *bad, again)
    outputs = await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    assert outputs["rejected"]["reasons"] == {
        "BAD_NUMBER": 6,
        "BAD_TIME": 2,
        "DUPLICATE": 1,
        "HIGH_LOW_CROSSED": 2,
        "NEGATIVE_VOLUME": 1,
    }
    assert outputs["rejected"]["count"] == 12
    assert outputs["rejected"]["examples"][0] == {"row": 5, "reason": "DUPLICATE"}
    assert outputs["rejected"]["examples"][1] == {"row": 6, "reason": "BAD_TIME"}
    assert outputs["rows"] == 17
    assert step_io.document("ohlcv", "1h.json")["candles"][-1] == ["2026-01-12T09:00:00Z", 9, 9.5, 8.75, 9.5, 20]
    assert any("12 of 17 rows were rejected" in line for line in step_io.logs["ohlcv"])


async def test_volumes_are_rounded(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F6, F13: the last digits of a sum would depend on the machine."""
    write_rows(tmp_path, *(f"2026-01-05T09:0{n}Z,1,1,1,1,0.{n}" for n in (1, 2)))
    await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    assert step_io.document("ohlcv", "1h.json")["candles"][0][5] == 0.3


@pytest.mark.parametrize(
    "written",
    [
        "2026-03-01",
        "2026-03-01 00:00",
        "2026-03-01T00:00:00",
        "2026-03-01T00:00:00.000Z",
        "2026-03-01T05:30:00+05:30",
        "2026-02-28T19:00-0500",
        "1772323200",
        "1772323200000",
        "1772323200000000",
    ],
)
async def test_times_are_in_utc(tmp_path: Path, workers: Workers, step_io: RunStepIO, written: str) -> None:
    """F13: a time with a zone, without a zone, or as an epoch is the same candle."""
    write_rows(tmp_path, f"{written},1,2,1,2,3")
    await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    assert step_io.document("ohlcv", "1h.json")["candles"] == [["2026-03-01T00:00:00Z", 1, 2, 1, 2, 3]]


async def test_symbol_selects_rows(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: rows of other symbols are ignored; without `symbol` several symbols are an error."""
    rows = ["AAA,2026-01-05T09:00Z,1,2,1,2,3", "BBB,2026-01-05T09:00Z,5,6,5,6,7", "BBB,rubbish,5,6,5,6,7"]
    write_rows(tmp_path, *rows, head=f"Symbol,{HEAD.upper()}")
    outputs = await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h", symbol="AAA"))
    assert (outputs["symbol"], outputs["rows"], outputs["rejected"]["count"]) == ("AAA", 1, 0)
    error = await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    assert (error.code, error.details) == ("SYMBOL_MISSING", {"symbols": ["AAA", "BBB"]})
    assert (
        await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("1h", symbol="CCC"))
    ).code == "NO_CANDLES"


async def test_parquet_is_read_like_csv(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: typed columns have the same artifact as text."""
    write_rows(tmp_path, *FIVE)
    await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    times = [datetime.fromisoformat(row.split(",")[0]) for row in FIVE]
    numbers = list(zip(*(map(float, row.split(",")[1:]) for row in FIVE), strict=True))
    columns = dict(zip(HEAD.split(",")[1:], numbers, strict=True))
    local = pl.Series("time", times).dt.convert_time_zone("Asia/Kolkata")
    pl.DataFrame({"time": local, **columns}).write_parquet(tmp_path / "candles.parquet")
    await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h", file="candles.parquet"), "again")
    assert step_io.artifacts["again", "1h.json"] == step_io.artifacts["ohlcv", "1h.json"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("../secret.csv", "FILE_OUTSIDE_FOLDER"),
        ("a/../../secret.csv", "FILE_OUTSIDE_FOLDER"),
        ("/etc/passwd.csv", "FILE_OUTSIDE_FOLDER"),
        ("..\\secret.csv", "FILE_OUTSIDE_FOLDER"),
        ("link.csv", "FILE_OUTSIDE_FOLDER"),
        ("folder/secret.csv", "FILE_OUTSIDE_FOLDER"),
        ("nul\0.csv", "FILE_OUTSIDE_FOLDER"),
        ("missing.csv", "FILE_MISSING"),
        ("circle.csv", "FILE_MISSING"),
        ("pipe.csv", "FILE_MISSING"),
        ("*.csv", "FILE_MISSING"),
        ("candles.xlsx", "BAD_INPUTS"),
        ("rubbish.parquet", "FILE_UNREADABLE"),
        ("empty.csv", "FILE_UNREADABLE"),
        ("latin.csv", "FILE_UNREADABLE"),
    ],
)
async def test_files_outside_the_folder_are_refused(tmp_path: Path, step_io: RunStepIO, file: str, code: str) -> None:
    """F13: paths and links out of `flows.files`, and files of other formats, are errors."""
    inside = tmp_path / "inside"
    inside.mkdir()
    write_rows(tmp_path, *FIVE, name="secret.csv")
    (inside / "link.csv").symlink_to(tmp_path / "secret.csv")
    (inside / "folder").symlink_to(tmp_path)
    (inside / "circle.csv").symlink_to(inside / "circle.csv")
    os.mkfifo(inside / "pipe.csv")
    (inside / "rubbish.parquet").write_bytes(b"PAR1 nothing")
    (inside / "empty.csv").touch()
    (inside / "latin.csv").write_bytes(HEAD.encode() + b"\n\xff\xfe\xfa,1,1,1,1,1\n")
    workers = make_workers(KindContext(FlowsSection(files=inside)))
    error = await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("1h", file=file))
    assert error.code == code
    assert not step_io.artifacts


async def test_links_inside_the_folder_are_followed(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: only the target of a link must be inside the folder."""
    write_rows(tmp_path, *FIVE)
    (tmp_path / "newest.csv").symlink_to("candles.csv")
    assert (await step_io.run_step(workers, OHLCV_EXPORT, export_inputs("1h", file="newest.csv")))["rows"] == 5


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"timeframes": ["1h"]}, "inputs.source"),
        ({"source": {}, "timeframes": ["1h"]}, "either `file` or `sql`"),
        ({"source": {"file": "a.csv", "sql": "SELECT 1"}, "timeframes": ["1h"]}, "either `file` or `sql`"),
        (export_inputs("7m"), "inputs.timeframes.0"),
        (export_inputs("1h", "1h"), "must be unique"),
        ({"source": {"file": "a.csv"}, "timeframes": []}, "inputs.timeframes"),
        (export_inputs("1h", symbol=""), "inputs.symbol"),
        (export_inputs("1h", colour="red"), "inputs.colour"),
    ],
)
async def test_invalid_inputs_are_named(
    workers: Workers, step_io: RunStepIO, inputs: dict[str, Any], named: str
) -> None:
    """F13: BAD_INPUTS has the path of the input, when the run is created and when the step runs."""
    error = await step_io.run_failing_step(workers, OHLCV_EXPORT, inputs)
    assert error.code == "BAD_INPUTS"
    assert named in error.message
    with pytest.raises(Invalid, match=r"inputs"):
        kinds.input_checks[OHLCV_EXPORT](inputs)


async def test_missing_columns_are_named(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: missing and duplicate columns are errors."""
    write_rows(tmp_path, "2026-01-05T09:00Z,1,2", head="time,open,last")
    error = await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    assert (error.code, error.details) == ("BAD_COLUMNS", {"missing": ["high", "low", "close", "volume"]})
    write_rows(tmp_path, "2026-01-05T09:00Z,1,2,1,2,3,4", head=f"{HEAD},Open")
    assert (await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("1h"))).code == "BAD_COLUMNS"


async def test_export_without_candles_is_an_error(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: an empty export would look like a market without trade."""
    write_rows(tmp_path, "x,1,1,1,1,1")
    error = await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("1h"))
    assert (error.code, error.details["rejected"]["reasons"]) == ("NO_CANDLES", {"BAD_TIME": 1})


async def test_finer_timeframes_are_refused(tmp_path: Path, workers: Workers, step_io: RunStepIO) -> None:
    """F13: hourly candles cannot be exported by the minute."""
    write_rows(tmp_path, *(f"2026-01-05T{hour:02}:00Z,1,1,1,1,1" for hour in range(5)))
    assert (await step_io.run_failing_step(workers, OHLCV_EXPORT, export_inputs("30m"))).code == "TIMEFRAME_TOO_FINE"


async def test_sources_must_be_configured(step_io: RunStepIO) -> None:
    """F13: files and SQL are refused without their settings."""
    nothing = make_workers(KindContext(FlowsSection()))
    assert (await step_io.run_failing_step(nothing, OHLCV_EXPORT, export_inputs("1h"))).code == "FLOWS_FILES_NOT_SET"
    sql = {"source": {"sql": "SELECT 1"}, "timeframes": ["1h"]}
    assert (await step_io.run_failing_step(nothing, OHLCV_EXPORT, sql)).code == "SQL_NOT_ALLOWED"


async def _export_sql(db: Database, step_io: RunStepIO, sql: str, *params: Any) -> Json:
    workers = make_workers(KindContext(FlowsSection(), make_query(db)))
    inputs = {"source": {"sql": sql, "params": list(params)}, "timeframes": ["1h"]}
    return await step_io.run_step(workers, OHLCV_EXPORT, inputs)


async def _fail_sql(db: Database, step_io: RunStepIO, sql: str, *params: Any) -> StepError:
    workers = make_workers(KindContext(FlowsSection(), make_query(db)))
    inputs = {"source": {"sql": sql, "params": list(params)}, "timeframes": ["1h"]}
    return await step_io.run_failing_step(workers, OHLCV_EXPORT, inputs)


async def test_candles_from_sql(db: Database, step_io: RunStepIO) -> None:
    """F13: a statement with parameters on a real database; numeric and timestamptz are converted."""
    await db.execute("CREATE TABLE trade (name text, at timestamptz, price numeric, size bigint)")
    at = datetime(2026, 1, 5, 9, tzinfo=UTC)
    for n, price in enumerate(["1.5", "1.7", "1.6"]):
        await db.execute("INSERT INTO trade VALUES ('AAA', $1, $2, 10)", at + timedelta(minutes=n), Decimal(price))
    sql = """SELECT at AS time, price AS open, price AS high, price AS low, price AS close, size AS volume
             FROM trade -- all there is
             WHERE name = $1;
    """
    outputs = await _export_sql(db, step_io, sql, "AAA")
    assert outputs["rows"] == 3
    assert step_io.document("ohlcv", "1h.json")["candles"] == [["2026-01-05T09:00:00Z", 1.5, 1.7, 1.5, 1.6, 30]]
    assert (await _fail_sql(db, step_io, sql, "BBB")).code == "NO_CANDLES"


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE flow_run",
        "DELETE FROM flow_run RETURNING *",
        "WITH gone AS (DELETE FROM flow_run RETURNING id) SELECT * FROM gone",
        "SELECT 1) AS a; DROP TABLE flow_run; SELECT (1",
        "SELECT nextval(pg_get_serial_sequence('flow_run', 'id'))",
        "COPY flow_run TO STDOUT",
        "SELECT * FROM nowhere",
        "SELECT $1::int",
    ],
)
async def test_statements_are_read_only(db: Database, step_io: RunStepIO, sql: str) -> None:
    """F13: no statement changes the database, and its error has no traceback."""
    params = ["no number"] if "$1" in sql else []
    error = await _fail_sql(db, step_io, sql, *params)
    assert error.code in ("SQL_FAILED", "DATABASE_BUSY")
    assert "Traceback" not in error.message
    assert await db.fetchval("SELECT count(*) FROM flow_run") == 0


PRICE = st.floats(0.01, 1e6)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@settings(max_examples=examples(60, soak=2_000), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(0, 20_000), PRICE, PRICE, st.integers(0, 10**6)), min_size=1, max_size=60),
    st.sampled_from(["5m", "1h", "4h", "1d", "1w"]),
)
def test_resampling_agrees_with_the_model(rows: list[tuple[int, float, float, int]], timeframe: str) -> None:
    """F13: for all rows, each candle is computed from its rows, and there are no other candles."""
    begin = datetime(2026, 1, 5, tzinfo=UTC)  # a Monday
    candles = {minute: (open_, close, volume) for minute, open_, close, volume in rows}
    size = int(timeframe[:-1]) * {"m": 1, "h": 60, "d": 1_440, "w": 10_080}[timeframe[-1]]
    if len(candles) > 1 and min(b - a for a, b in zip(sorted(candles), sorted(candles)[1:], strict=False)) > size:
        return
    groups: dict[int, list[tuple[float, float, int]]] = {}
    for minute in sorted(candles):
        groups.setdefault(minute // size, []).append(candles[minute])
    table = pl.DataFrame(
        {
            "time": [begin + timedelta(minutes=row[0]) for row in rows],
            "open": [row[1] for row in rows],
            "high": [max(row[1:3]) for row in rows],
            "low": [min(row[1:3]) for row in rows],
            "close": [row[2] for row in rows],
            "volume": [row[3] for row in rows],
        }
    )
    series = read_series(resample(parse_candles(table, None), timeframe).as_bytes())
    assert [tuple(candle) for candle in series.candles] == [
        (
            begin + timedelta(minutes=place * size),
            group[0][0],
            max(max(each[:2]) for each in group),
            min(min(each[:2]) for each in group),
            group[-1][1],
            float(sum(each[2] for each in group)),
        )
        for place, group in sorted(groups.items())
    ]
