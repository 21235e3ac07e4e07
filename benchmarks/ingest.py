"""Price lists into facts: ours beside DuckDB in SQL, dlt, openpyxl and calamine, each in a process of its own.

All contenders map, type, hash and write the same rows, and finds the same row ids. Ours also hashes the file, looks for
repeated keys, judges, syncs and publishes. floe-python is not here: it writes no JSON, and turns no text into numbers.
"""

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.harness import Bench, Figure, Group, Measure, Shared, ratio
from benchmarks.ingest_data import write_csv, write_xlsx
from benchmarks.peers import ingest_env
from benchmarks.session import Session

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


@dataclass(frozen=True)
class Workbook:
    """Rows of a workbook, spread over its sheets."""

    rows: int
    sheets: int


@dataclass(frozen=True)
class Sizes:
    """Rows of each CSV; a workbook whose rate is measured, and one of many sheets whose seconds are."""

    csv: Sequence[int]
    xlsx: tuple[Workbook, Workbook] | None = None


Peers = Mapping[str, tuple[Path, Sequence[str]]]  # the script of each, and what follows its input and output
_CSV_PEERS: Peers = {
    DUCKDB: (ingest_env.DUCKDB, []),
    DUCKDB_BOUND: (ingest_env.DUCKDB, ["300MB"]),
    DLT: (ingest_env.DLT, ["rows"]),
    DLT_ARROW: (ingest_env.DLT, ["arrow"]),
}
_XLSX_PEERS: Peers = {OPENPYXL: (ingest_env.OPENPYXL, []), CALAMINE: (ingest_env.CALAMINE, [])}


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Write the price lists, and open their ingest for each contender."""
    found, contenders = list[Bench](), await _contenders(session, _CSV_PEERS)
    for rows in sizes.csv:
        found += _benches(f"{rows:,} rows of CSV", await _csv(session.folder, rows), rows, contenders)
    yield [*found, *(await _workbooks(session, sizes.xlsx) if sizes.xlsx else [])]


def conclusions(figures: Sequence[Figure], _sizes: Sizes) -> list[str]:
    """Return how many times the others' rate ours is."""
    lines = []
    for what in sorted({figure.bench.name.partition(": ")[0] for figure in figures}):
        for other in (DUCKDB, DUCKDB_BOUND, DLT, DLT_ARROW, OPENPYXL, CALAMINE):
            times = ratio(figures, f"{what}: {US}", f"{what}: {other}")
            if times is not None:
                lines.append(f"{what}: {times if 'sheets' not in what else 1 / times:.2f} times {other}")
    return lines


GROUP = Group(
    benches,
    full=Sizes(csv=(100_000, 1_000_000), xlsx=(Workbook(100_000, sheets=1), Workbook(23_000, sheets=39))),
    smoke=Sizes(csv=(1_000,), xlsx=(Workbook(1_000, sheets=1), Workbook(90, sheets=3))),
    conclude=conclusions,
)
LARGE_GROUP = Group(benches, full=Sizes(csv=(10_000_000,)), smoke=Sizes(csv=(2_000,)), conclude=conclusions)


async def _contenders(session: Session, others: Peers) -> list[Contender]:
    """Return our own ingest, and the others' where the run includes peers; their environment is made first."""
    ours = Contender(US, Path(sys.executable), OURS)
    if not session.has_peers(*others):
        return [ours]
    python = await ingest_env.python()
    return [ours, *(Contender(name, python, script, args) for name, (script, args) in others.items())]


async def _workbooks(session: Session, books: tuple[Workbook, Workbook]) -> list[Bench]:
    contenders = await _contenders(session, _XLSX_PEERS)
    single, many = books
    source, sheets = await _xlsx(session.folder, single), await _xlsx(session.folder, many)
    return [
        *_benches(f"{single.rows:,} rows of XLSX", source, single.rows, contenders),
        *(_seconds(f"{many.sheets} sheets, {many.rows:,} rows", sheets, each) for each in contenders),
    ]


async def _csv(folder: Path, rows: int) -> Path:
    print(f"writing {rows:,} rows", file=sys.stderr)
    path = folder / f"{rows}.csv"
    await write_csv(path, rows)
    return path


async def _xlsx(folder: Path, book: Workbook) -> Path:
    print(f"writing a workbook of {book.rows:,} rows", file=sys.stderr)
    path = folder / f"{book.rows}-{book.sheets}.xlsx"
    await write_xlsx(path, book.rows, book.sheets)
    return path


def _benches(what: str, source: Path, rows: int, contenders: Sequence[Contender]) -> list[Bench]:
    found: list[Bench] = []
    is_large_csv = source.suffix == ".csv" and rows >= 1_000_000
    for contender in contenders:
        run = Shared(lambda contender=contender: _run(contender, source))  # type: ignore[misc]
        is_ours = contender.name == US and is_large_csv
        rate, peak = f"{what}: {contender.name}{RATE}", f"{what}: {contender.name}{PEAK}"
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
    """Return how many seconds it took, and how many megabytes; the output lies beside the file itself."""
    out = Path(tempfile.mkdtemp(dir=source.parent))
    try:
        result = await peers.ask(contender.python, contender.script, str(source), str(out), *contender.args)
    finally:
        for path in out.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(out)
    return float(result["seconds"]), float(result["peak_mb"])
