"""A paged API into PostgreSQL: ours beside dlt's REST source, from the same local source, in pages of 30.

Ours is a whole run: counted, cut into 30 partitions, fetched page by page with progress that survives any crash,
recounted, kept raw, mapped and priced, watermarked. dlt fetches, and merges the records as they are by their key.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial

from benchmarks.harness import Bench, Figure, Group, Measure, Shared, ratio
from benchmarks.harvest_consolidation import fetched, rate
from benchmarks.harvest_place import Place, place
from benchmarks.session import Session
from penstock.harvest.config import ConsolidationMode

US, DLT, DLT_PARALLEL = "Penstock", "dlt", "dlt in parallel"
LATE = 20  # milliseconds
_WANTED_RATE = 60_000
Took = Mapping[str, float]
Run = Callable[[], Awaitable[Took]]
_OURS = {"plan": "planning", "fetch": "fetching", "consolidate": "consolidating", "worker": "its processor time"}
_THEIRS = {"extract": "extracting", "normalize": "normalizing", "load": "loading", "processor": "its processor time"}


@dataclass(frozen=True)
class Sizes:
    """Records of the source, and how late its answers are; the seconds that a run of them shall take at most."""

    records: int
    latencies: Sequence[int] = (0, LATE)
    wanted_seconds: float | None = None
    dlt_waits: bool = True  # with many records, one late answer after another would be sheer waiting


def conclusions(figures: Sequence[Figure], _sizes: Sizes) -> list[str]:
    """Return how many times the others' speed ours is."""
    lines = []
    for what in dict.fromkeys(figure.bench.name.partition(": ")[0] for figure in figures):
        for other in (DLT, DLT_PARALLEL):
            times = ratio(figures, _name(what, other), _name(what, US))
            if times is not None:
                lines.append(f"{what}: {times:.2f} times {other}")
    return lines


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open harvests from a source that answers at once and from one that answers late, and consolidation alone."""
    records, has_dlt = sizes.records, session.has_peers(DLT, DLT_PARALLEL)
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(place(session, records))
        platform = await stack.enter_async_context(fetched(found))
        harvests: list[Bench] = []
        for latency in sizes.latencies:
            what = f"{records:,} records" + (f", every answer {latency} ms late" if latency else "")
            harvests += _ours(what, found, latency, None if latency else sizes.wanted_seconds)
            harvests += _dlt(what, found, latency, in_turn=sizes.dlt_waits or not latency) if has_dlt else []
        ways = {"set-based": ConsolidationMode.SETS, "batch-wise": ConsolidationMode.BATCHES}
        yield [
            *harvests,
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


GROUP = Group(benches, full=Sizes(50_000), smoke=Sizes(100, latencies=(LATE,)), conclude=conclusions)
LARGE_GROUP = Group(
    benches,
    full=Sizes(500_000, wanted_seconds=60, dlt_waits=False),
    smoke=Sizes(200, latencies=()),  # the same harvests are in the smoke form of harvest
    conclude=conclusions,
)


def _ours(what: str, found: Place, latency_ms: int, target: float | None) -> list[Bench]:
    async def run() -> Took:
        return asdict(await found.harvested(latency_ms))

    return _figures(what, US, run, _OURS, target)


def _dlt(what: str, found: Place, latency_ms: int, *, in_turn: bool) -> list[Bench]:
    """Return the figures of dlt in parallel, and *in_turn* also those of one request after another."""
    ways = {DLT: False, DLT_PARALLEL: True} if in_turn else {DLT_PARALLEL: True}
    return [
        bench
        for name, in_parallel in ways.items()
        for bench in _figures(what, name, partial(found.harvested_by_dlt, latency_ms, in_parallel=in_parallel), _THEIRS)
    ]


def _figures(what: str, who: str, run: Run, parts: Mapping[str, str], target: float | None = None) -> list[Bench]:
    """The seconds of a run, and what they were spent on."""
    shared = Shared(run)
    return [
        Bench(_name(what, who), "s", _seconds(shared, "seconds"), target, is_duration=True),
        *(
            Bench(f"{_name(what, who)}, {lines}", "s", _seconds(shared, part), is_duration=True)
            for part, lines in parts.items()
        ),
    ]


def _seconds(shared: Shared[Took], part: str) -> Measure:
    async def measure() -> float:
        return (await shared.result(part))[part]

    return measure


def _name(what: str, who: str) -> str:
    return f"{what}: {who}"
