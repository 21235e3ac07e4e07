"""Price lists into facts: ours beside DuckDB in SQL, dlt, openpyxl and calamine, each in a process of its own.

Everybody maps, types, hashes and writes the same rows, and finds the same row ids. Ours also hashes the file, looks for
repeated keys, judges, syncs and publishes. floe-python is not here: it writes no JSON, and turns no text into numbers.
"""

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.harness import Bench, Figure, Measure, Shared, ratio
from benchmarks.ingest_data import write_csv, write_xlsx
from benchmarks.peers import ingest_env

OURS = Path(__file__).with_name("ingest_ours.py")
US, DUCKDB, DLT, OPENPYXL, CALAMINE = "Penstock", "DuckDB in SQL", "dlt", "openpyxl", "calamine and Python"
DUCKDB_BOUND, DLT_ARROW = "DuckDB, memory_limit 300MB", "dlt over pyarrow"
RATE, PEAK = "", ", peak memory"
_WANTED_RATE, _WANTED_MB, _WANTED_SECONDS = 300_000, 300, 3


@dataclass(frozen=True)
class Contender:
    """Who does it, and how it is started."""

    name: str
    python: Path
    script: Path
    args: Sequence[str] = ()


def _csv_contenders() -> list[Contender]:
    python = ingest_env.python()
    return [
        Contender(US, Path(sys.executable), OURS),
        Contender(DUCKDB, python, ingest_env.DUCKDB),
        Contender(DUCKDB_BOUND, python, ingest_env.DUCKDB, ["300MB"]),
        Contender(DLT, python, ingest_env.DLT, ["rows"]),
        Contender(DLT_ARROW, python, ingest_env.DLT, ["arrow"]),
    ]


def _xlsx_contenders() -> list[Contender]:
    python = ingest_env.python()
    return [
        Contender(US, Path(sys.executable), OURS),
        Contender(OPENPYXL, python, ingest_env.OPENPYXL),
        Contender(CALAMINE, python, ingest_env.CALAMINE),
    ]


@asynccontextmanager
async def benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """A hundred thousand and a million rows of CSV, a hundred thousand of XLSX, and the workbook of 39 sheets."""
    folder.mkdir()
    found: list[Bench] = []
    for rows in (100_000, 1_000_000):
        found += _benches(f"{rows:,} rows of CSV", _csv(folder, rows), rows, _csv_contenders())
    found += _benches("100,000 rows of XLSX", _xlsx(folder, 100_000, 1), 100_000, _xlsx_contenders())
    sheets = _xlsx(folder, 23_000, 39)
    yield [*found, *(_seconds("39 sheets, 23,000 rows", sheets, one) for one in _xlsx_contenders())]


@asynccontextmanager
async def large_benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """Ten million rows of CSV."""
    folder.mkdir()
    rows = 10_000_000
    yield _benches(f"{rows:,} rows of CSV", _csv(folder, rows), rows, _csv_contenders())


def conclusions(figures: Sequence[Figure]) -> list[str]:
    """How many times the others' rate ours is."""
    said = []
    for what in sorted({figure.bench.name.partition(": ")[0] for figure in figures}):
        for other in (DUCKDB, DUCKDB_BOUND, DLT, DLT_ARROW, OPENPYXL, CALAMINE):
            times = ratio(figures, f"{what}: {US}", f"{what}: {other}")
            if times is not None:
                said.append(f"{what}: {times if 'sheets' not in what else 1 / times:.2f} times {other}")
    return said


def _csv(folder: Path, rows: int) -> Path:
    print(f"writing {rows:,} rows", file=sys.stderr)
    path = folder / f"{rows}.csv"
    write_csv(path, rows)
    return path


def _xlsx(folder: Path, rows: int, sheets: int) -> Path:
    print(f"writing a workbook of {rows:,} rows", file=sys.stderr)
    path = folder / f"{rows}-{sheets}.xlsx"
    write_xlsx(path, rows, sheets)
    return path


def _benches(what: str, source: Path, rows: int, contenders: Sequence[Contender]) -> list[Bench]:
    found: list[Bench] = []
    is_large_csv = source.suffix == ".csv" and rows >= 1_000_000
    for one in contenders:
        run = Shared(lambda one=one: _run(one, source))  # type: ignore[misc]
        is_ours = one.name == US and is_large_csv
        rate, peak = f"{what}: {one.name}{RATE}", f"{what}: {one.name}{PEAK}"
        found += [
            Bench(rate, "rows", _rate(run, rate, rows), _WANTED_RATE if is_ours else None),
            Bench(peak, "MB", _peak(run, peak), _WANTED_MB if is_ours else None, is_duration=True),
        ]
    return found


def _seconds(what: str, source: Path, contender: Contender) -> Bench:
    async def measure() -> float:
        return (await _run(contender, source))[0]

    target = _WANTED_SECONDS if contender.name == US else None
    return Bench(f"{what}: {contender.name}", "s", measure, target, is_duration=True)


def _rate(run: Shared[tuple[float, float]], figure: str, rows: int) -> Measure:
    async def measure() -> float:
        return rows / (await run.result(figure))[0]

    return measure


def _peak(run: Shared[tuple[float, float]], figure: str) -> Measure:
    async def measure() -> float:
        return (await run.result(figure))[1]

    return measure


async def _run(contender: Contender, source: Path) -> tuple[float, float]:
    """How many seconds it took, and how many megabytes, beside the file itself."""
    out = Path(tempfile.mkdtemp(dir=source.parent))
    try:
        told = await peers.ask(contender.python, contender.script, str(source), str(out), *contender.args)
    finally:
        for path in out.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(out)
    return float(told["seconds"]), float(told["peak_mb"])
