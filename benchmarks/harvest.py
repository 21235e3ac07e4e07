"""A paged API into PostgreSQL: ours beside dlt's REST source, from the same local source, in pages of 30.

Ours is a whole run: counted, cut into 30 partitions, fetched page by page with progress that survives any crash,
recounted, kept raw, mapped and priced, watermarked. dlt fetches, and merges the records as they are by their key.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.harness import Bench, Figure, Measure, Shared, ratio
from benchmarks.harvest_consolidation import fetched, rate
from benchmarks.harvest_place import Place, place
from penstock.harvest.config import ConsolidationMode

US, DLT, DLT_PARALLEL = "Penstock", "dlt", "dlt in parallel"
LATE = 20  # milliseconds
SMALL, LARGE = 50_000, 500_000
_WANTED_SECONDS, _WANTED_RATE = 60, 60_000
Took = Mapping[str, float]
Run = Callable[[], Awaitable[Took]]
_OURS = {"plan": "planning", "fetch": "fetching", "consolidate": "consolidating", "worker": "its processor time"}
_THEIRS = {"extract": "extracting", "normalize": "normalizing", "load": "loading", "processor": "its processor time"}


@asynccontextmanager
async def benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """As many records as everybody can take in every round."""
    async with _benches(folder, SMALL) as found:
        yield found


@asynccontextmanager
async def large_benches(folder: Path) -> AsyncIterator[list[Bench]]:
    """As many as are asked for."""
    async with _benches(folder, LARGE) as found:
        yield found


def conclusions(figures: Sequence[Figure]) -> list[str]:
    """How many times the others' speed ours is."""
    said = []
    for what in dict.fromkeys(figure.bench.name.partition(": ")[0] for figure in figures):
        for other in (DLT, DLT_PARALLEL):
            times = ratio(figures, _name(what, other), _name(what, US))
            if times is not None:
                said.append(f"{what}: {times:.2f} times {other}")
    return said


@asynccontextmanager
async def _benches(folder: Path, records: int) -> AsyncIterator[list[Bench]]:
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(place(folder, records))
        platform = await stack.enter_async_context(fetched(found))
        ways = {"set-based": ConsolidationMode.SETS, "batch-wise": ConsolidationMode.BATCHES}
        yield [
            *_contest(f"{records:,} records", found, 0),
            *_contest(f"{records:,} records, every answer {LATE} ms late", found, LATE),
            *(
                Bench(
                    f"consolidation of {records:,} records, {way}",
                    "records",
                    partial(rate, platform, records, mode),
                    _WANTED_RATE if mode is ConsolidationMode.SETS else None,
                )
                for way, mode in ways.items()
            ),
        ]


def _contest(what: str, found: Place, latency_ms: int) -> list[Bench]:
    async def ours() -> Took:
        return asdict(await found.harvested(latency_ms))

    is_large = found.records == LARGE
    benches = _figures(what, US, ours, _OURS, _WANTED_SECONDS if is_large and not latency_ms else None)
    if not (is_large and latency_ms):  # one request after another would be sheer waiting
        benches += _figures(what, DLT, partial(found.harvested_by_dlt, latency_ms, in_parallel=False), _THEIRS)
    in_parallel = partial(found.harvested_by_dlt, latency_ms, in_parallel=True)
    return [*benches, *_figures(what, DLT_PARALLEL, in_parallel, _THEIRS)]


def _figures(what: str, who: str, run: Run, parts: Mapping[str, str], target: float | None = None) -> list[Bench]:
    """The seconds of a run, and what they were spent on."""
    shared = Shared(run)
    return [
        Bench(_name(what, who), "s", _seconds(shared, "seconds"), target, is_duration=True),
        *(
            Bench(f"{_name(what, who)}, {said}", "s", _seconds(shared, part), is_duration=True)
            for part, said in parts.items()
        ),
    ]


def _seconds(shared: Shared[Took], part: str) -> Measure:
    async def measure() -> float:
        return (await shared.result(part))[part]

    return measure


def _name(what: str, who: str) -> str:
    return f"{what}: {who}"
