"""H3: counts a source by range, cuts it into partitions of about equal size, and proves that they are all there is."""

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, log2

from penstock.harvest.config import PartitionsSection
from penstock.harvest.model import EVERYTHING, WITHOUT_VALUE, Heatmap, PartitionKind, PartitionRange, PlannedPartition
from penstock.kernel.errors import Corrupt, Transient
from penstock.kernel.tasks.wait import gather_or_cancel

Count = Callable[[PartitionRange], Awaitable[int]]
Progress = Callable[[int], Awaitable[None]]

_FARTHEST = 1 << 62  # no cut is made beyond: bounds are kept as 64 bits
_ABSURD = 1 << 50  # more records than any source has, and fewer than a float can tell apart
_OCTAVES = 2  # width of the first cells: prices spread over magnitudes
_FIRST_CUTS = 6
_LEAP = 4  # octaves a cut goes into what has no bound
UNSTABLE = "HEATMAP_UNSTABLE"
_SPLITS = 81  # 16 leaps, 3 guesses and 62 halvings find any value in a source that holds still
_GUESSES = 3  # rounds of guessing where a cut belongs; then cells are halved
_FEW = 3  # cuts of a cell that did not come apart the first time


@dataclass(frozen=True, slots=True)
class _HeatmapCell:
    lower: int | None
    upper: int | None
    count: int
    depth: int = 0  # how often it was split since its bounds are known


async def scan(
    count: Count, section: PartitionsSection, *, at_once: int = 8, progress: Progress | None = None
) -> Heatmap:
    """Cut what *count* counts into n partitions of about total / n records: so many that each has `least`.

    They are at most n ranges that follow one another from no lower bound to no upper one, and the records without a
    value; or everything at once where n is 1. In a source that holds still no range has more than 1.5 × total / n + 1
    records, unless a value alone has more than half of total / n: then none has more than 2 × total / n, except where
    all have one value.

    At most 10 calls to begin with, for each of n - 1 cuts 81 (4 + log2(highest - lowest) when all lies between and
    holds still), and n + 3 for each round of the proof. Transient HEATMAP_UNSTABLE when the parts do not add up.
    """
    asking = _HeatmapBuilder(count, at_once, progress)
    total = await asking.one(EVERYTHING)
    parts = min(-(-total // section.least), section.count)
    if parts <= 1:
        return Heatmap((PlannedPartition(EVERYTHING, total),), total, counts=asking.asked, rounds=1)
    cells = await _first_cells(asking, section)
    if (found := sum(cell.count for cell in cells)) > 2 * total:
        raise _unstable(found, total, total)  # not worth more calls: it does not heed the bounds
    for _ in range(_SPLITS):
        missed = _missed(cells, _ranges(cells, total, parts))
        cuts = [list(_cuts(cell, places, section.lowest)) for cell, places in zip(cells, missed, strict=True)]
        if not any(cuts):
            break
        cells = await _split(asking, cells, cuts)
    merged = _merged(cells, _ranges(cells, total, parts))
    # One range without bounds would be asked for without a filter, and so hold those without a value too.
    return await _proven(asking, [*merged, WITHOUT_VALUE] if len(merged) > 1 else [EVERYTHING], section)


class _HeatmapBuilder:
    """Asks the source, *at_once* times at a time, and tells how often it was asked."""

    def __init__(self, count: Count, at_once: int, progress: Progress | None) -> None:
        self._count = count
        self._slots = asyncio.Semaphore(at_once)
        self._progress = progress
        self._telling = asyncio.Lock()
        self.asked = 0

    async def one(self, range_: PartitionRange) -> int:
        async with self._slots:
            self.asked += 1
            found = await self._count(range_)
        if not 0 <= found < _ABSURD:
            raise Corrupt(
                "HEATMAP_COUNT_INVALID",
                f"the source counts {found} records in {range_}",
                hint="see what it is asked for, and where its answer tells the total",
            )
        if self._progress is not None:
            async with self._telling:  # one after another, so that the number only grows
                await self._progress(self.asked)
        return found

    async def all(self, ranges: Iterable[PartitionRange]) -> list[int]:
        return await gather_or_cancel(map(self.one, ranges))


async def _first_cells(asking: _HeatmapBuilder, section: PartitionsSection) -> list[_HeatmapCell]:
    """Below the lowest, magnitudes up to the highest, and from there on."""
    span = section.highest - section.lowest
    inner = {section.lowest + (span >> _OCTAVES * step) for step in range(_FIRST_CUTS + 1)}
    bounds = [None, *sorted(inner | {section.lowest}), None]
    counts = await asking.all(PartitionRange(PartitionKind.RANGE, lower, upper) for lower, upper in pairwise(bounds))
    return [_HeatmapCell(lower, upper, count) for (lower, upper), count in zip(pairwise(bounds), counts, strict=True)]


def _ranges(cells: Sequence[_HeatmapCell], total: int, parts: int) -> int:
    """How many ranges *cells* make when each has its share of the total; the others are those without a value."""
    valued = sum(cell.count for cell in cells)
    return max(1, min(parts, -(-valued * parts // total)))


def _missed(cells: Sequence[_HeatmapCell], ranges: int) -> Iterator[list[float]]:
    """Where in each cell, from 0 to 1, ranges of the same size would part, when both of its ends are far from there."""
    ends = list(accumulate((cell.count for cell in cells), initial=0))
    share = max(ends[-1], 1) / ranges
    slack = max(share / 4, 0.5)
    for cell, (begin, end) in zip(cells, pairwise(ends), strict=True):
        places = (number * share for number in range(int(begin / share) + 1, min(int(end / share) + 1, ranges)))
        yield [(place - begin) / cell.count for place in places if begin + slack < place < end - slack]


def _cuts(cell: _HeatmapCell, missed: Sequence[float], origin: int) -> Iterator[int]:
    """Where to cut *cell*, inside of it and in order; nowhere if it is one value wide."""
    if not missed:
        return
    if cell.lower is None or cell.upper is None:
        yield from _leap(cell, origin)
    elif cell.depth >= _GUESSES:
        if cell.upper - cell.lower > 1:
            yield (cell.lower + cell.upper) // 2
    else:
        few = missed if cell.depth == 0 else missed[:: ceil(len(missed) / _FEW)]
        low, high = _octave(cell.lower - origin), _octave(cell.upper - origin)
        guesses = (origin + _at_octave(low + (high - low) * place) for place in few)
        inside = {min(max(guess, cell.lower + 1), cell.upper - 1) for guess in guesses}
        yield from sorted(inside - {cell.lower, cell.upper})


def _leap(cell: _HeatmapCell, origin: int) -> Iterator[int]:
    """A cut far out in a cell without a bound; none when there is nowhere left to leap to."""
    if cell.lower is not None:
        cut = min(origin + _at_octave(_octave(cell.lower - origin) + _LEAP), _FARTHEST)
        if cut > cell.lower:
            yield cut
    elif cell.upper is not None:
        cut = max(origin + _at_octave(_octave(cell.upper - origin) - _LEAP), -_FARTHEST)
        if cut < cell.upper:
            yield cut


def _octave(distance: int) -> float:
    """The magnitude of a distance, with its sign: prices are as many from 1 to 2 as from 2 to 4, more or less."""
    return log2(1 + distance) if distance >= 0 else -log2(1 - distance)


def _at_octave(octave: float) -> int:
    """The other way round."""
    return round(2**octave) - 1 if octave >= 0 else 1 - round(2**-octave)


async def _split(
    asking: _HeatmapBuilder, cells: Sequence[_HeatmapCell], cuts: Sequence[Sequence[int]]
) -> list[_HeatmapCell]:
    """The cells after they were cut. The last piece of each is what the others leave: a proof comes at the end."""
    edges = [[cell.lower, *inner, cell.upper] for cell, inner in zip(cells, cuts, strict=True)]
    asked = [PartitionRange(PartitionKind.RANGE, *pair) for bounds in edges for pair in list(pairwise(bounds))[:-1]]
    counts = iter(await asking.all(asked))
    pieces: list[_HeatmapCell] = []
    for cell, bounds in zip(cells, edges, strict=True):
        left, depth = cell.count, cell.depth + (len(bounds) > 2 and None not in bounds)
        for lower, upper in pairwise(bounds[:-1]):
            found = next(counts)
            pieces.append(_HeatmapCell(lower, upper, found, depth))
            left -= found
        pieces.append(_HeatmapCell(bounds[-2], bounds[-1], max(left, 0), depth))
    return pieces


def _merged(cells: Sequence[_HeatmapCell], ranges: int) -> list[PartitionRange]:
    """Neighbours put together to at most so many *ranges*, with the smallest limit that does it."""
    total = sum(cell.count for cell in cells)
    limits = range(-(-total // ranges), total + 1)
    enough = bisect_left(limits, True, key=lambda limit: len(_filled(cells, limit)) <= ranges)
    return [
        PartitionRange(PartitionKind.RANGE, lower, upper)
        for lower, upper in pairwise([*_filled(cells, limits[enough]), None])
    ]


def _filled(cells: Sequence[_HeatmapCell], most: int) -> list[int | None]:
    """Where ranges begin when each takes neighbours up to *most* records; a cell with more takes only empty ones."""
    starts, held = [cells[0].lower], 0
    for cell in cells:
        if held and cell.count and held + cell.count > most:
            starts.append(cell.lower)
            held = 0
        held += cell.count
    return starts


async def _proven(asking: _HeatmapBuilder, ranges: Sequence[PartitionRange], section: PartitionsSection) -> Heatmap:
    """Count the parts until their sum is the total before and after; else near enough, in the last round."""
    after = await asking.one(EVERYTHING)
    for number in range(1, section.rounds + 1):
        before, counts = after, await asking.all(ranges)
        after = await asking.one(EVERYTHING)
        off = max(abs(sum(counts) - before), abs(sum(counts) - after))
        if off == 0 or (number == section.rounds and off <= section.tolerance * after):
            parts = tuple(PlannedPartition(range_, count) for range_, count in zip(ranges, counts, strict=True))
            return Heatmap(parts, after, counts=asking.asked, rounds=number)
    raise _unstable(sum(counts), before, after)


def _unstable(found: int, before: int, after: int) -> Transient:
    return Transient(
        UNSTABLE,
        f"the parts have {found} records together, the source {before} before and {after} after they were counted",
        hint="if it changes all the time, allow for it: partitions.tolerance; if it holds still, it leaves out records"
        " without a value or does not heed the bounds: see how the source is asked for them",
        total=after,
        sum=found,
    )
