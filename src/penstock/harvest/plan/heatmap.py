"""H3: count a source by range, divide it into partitions of about equal size, and prove that they are complete."""

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

_FARTHEST = 1 << 62  # limit of cuts: bounds are stored as 64 bits
_MAX_COUNT = 1 << 50  # more records than any source has, and still exact as a float
_OCTAVES = 2  # width of the first cells: prices spread over orders of magnitude
_FIRST_CUTS = 6
_LEAP = 4  # octaves between a bound and the next cut in an unbounded cell
UNSTABLE = "HEATMAP_UNSTABLE"
_SPLITS = 81  # 16 leaps, 3 guesses and 62 halvings find any value in an unchanging source
_GUESSES = 3  # rounds with an interpolated cut; later rounds halve the cell
_FEW = 3  # maximum number of cuts of a cell that has been split before


@dataclass(frozen=True, slots=True)
class _HeatmapCell:
    lower: int | None
    upper: int | None
    count: int
    depth: int = 0  # number of splits since both bounds are known


async def make_heatmap(
    count: Count, section: PartitionsSection, *, concurrency: int = 8, progress: Progress | None = None
) -> Heatmap:
    """Divide the records that *count* counts into n partitions of about total / n, each of at least `min_records`.

    The result is one partition if n is 1; otherwise at most n adjacent ranges without an outer bound, and the records
    without a value. In an unchanging source no range has more than 1.5 × total / n + 1 records, unless a single value
    has more than half of total / n: then no range has more than 2 × total / n, except for a single value with more.

    The number of calls is at most 10 at the start, 81 for each of n - 1 cuts (4 + log2(highest - lowest) if all values
    of an unchanging source are in between), and n + 3 for each round of the proof. Raise Transient HEATMAP_UNSTABLE
    if the partitions do not add up.
    """
    counter = _HeatmapBuilder(count, concurrency, progress)
    total = await counter.count(EVERYTHING)
    parts = min(-(-total // section.min_records), section.count)
    if parts <= 1:
        return Heatmap((PlannedPartition(EVERYTHING, total),), total, counts=counter.calls, rounds=1)
    cells = await _count_first_cells(counter, section)
    if (cell_sum := sum(cell.count for cell in cells)) > 2 * total:
        raise _make_unstable_error(cell_sum, total, total)  # the source ignores the bounds: more calls are useless
    for _ in range(_SPLITS):
        missing = _find_missing_cuts(cells, _count_ranges(cells, total, parts))
        cuts = [list(_choose_cuts(cell, points, section.lowest)) for cell, points in zip(cells, missing, strict=True)]
        if not any(cuts):
            break
        cells = await _split_cells(counter, cells, cuts)
    merged = _merge_cells(cells, _count_ranges(cells, total, parts))
    # One range without bounds has no filter, and so contains the records without a value too.
    return await _prove(counter, [*merged, WITHOUT_VALUE] if len(merged) > 1 else [EVERYTHING], section)


class _HeatmapBuilder:
    """Counts ranges of the source, up to *concurrency* at a time, and counts its calls."""

    def __init__(self, count: Count, concurrency: int, progress: Progress | None) -> None:
        self._count = count
        self._slots = asyncio.Semaphore(concurrency)
        self._progress = progress
        self._progress_lock = asyncio.Lock()
        self.calls = 0

    async def count(self, range_: PartitionRange) -> int:
        async with self._slots:
            self.calls += 1
            number = await self._count(range_)
        if not 0 <= number < _MAX_COUNT:
            raise Corrupt(
                "HEATMAP_COUNT_INVALID",
                f"the source counts {number} records in the range {range_}",
                hint="check source.total of the feed: the path of the total number of records in a response",
            )
        if self._progress is not None:
            async with self._progress_lock:  # sequentially, so that the reported number only grows
                await self._progress(self.calls)
        return number

    async def count_all(self, ranges: Iterable[PartitionRange]) -> list[int]:
        return await gather_or_cancel(map(self.count, ranges))


async def _count_first_cells(counter: _HeatmapBuilder, section: PartitionsSection) -> list[_HeatmapCell]:
    """Count the cell below the lowest value, orders of magnitude up to the highest one, and the cell above it."""
    span = section.highest - section.lowest
    inner = {section.lowest + (span >> _OCTAVES * step) for step in range(_FIRST_CUTS + 1)}
    bounds = [None, *sorted(inner | {section.lowest}), None]
    counts = await counter.count_all(
        PartitionRange(PartitionKind.RANGE, lower, upper) for lower, upper in pairwise(bounds)
    )
    return [_HeatmapCell(lower, upper, count) for (lower, upper), count in zip(pairwise(bounds), counts, strict=True)]


def _count_ranges(cells: Sequence[_HeatmapCell], total: int, parts: int) -> int:
    """Return the number of ranges for *cells*, proportional to the records with a value."""
    valued = sum(cell.count for cell in cells)
    return max(1, min(parts, -(-valued * parts // total)))


def _find_missing_cuts(cells: Sequence[_HeatmapCell], ranges: int) -> Iterator[list[float]]:
    """Yield, for each cell, the relative positions (0 to 1) of ideal cuts that are far from both ends of the cell."""
    ends = list(accumulate((cell.count for cell in cells), initial=0))
    share = max(ends[-1], 1) / ranges
    slack = max(share / 4, 0.5)
    for cell, (begin, end) in zip(cells, pairwise(ends), strict=True):
        points = (number * share for number in range(int(begin / share) + 1, min(int(end / share) + 1, ranges)))
        yield [(point - begin) / cell.count for point in points if begin + slack < point < end - slack]


def _choose_cuts(cell: _HeatmapCell, points: Sequence[float], origin: int) -> Iterator[int]:
    """Yield cuts inside of *cell*, in order; none if the cell is one value wide."""
    if not points:
        return
    if cell.lower is None or cell.upper is None:
        yield from _make_leap_cut(cell, origin)
    elif cell.depth >= _GUESSES:
        if cell.upper - cell.lower > 1:
            yield (cell.lower + cell.upper) // 2
    else:
        few = points if cell.depth == 0 else points[:: ceil(len(points) / _FEW)]
        low, high = _compute_octave(cell.lower - origin), _compute_octave(cell.upper - origin)
        guesses = (origin + _invert_octave(low + (high - low) * point) for point in few)
        inside = {min(max(guess, cell.lower + 1), cell.upper - 1) for guess in guesses}
        yield from sorted(inside - {cell.lower, cell.upper})


def _make_leap_cut(cell: _HeatmapCell, origin: int) -> Iterator[int]:
    """Yield a cut far from the bound of a half-open cell; none if the limit of cuts is reached."""
    if cell.lower is not None:
        cut = min(origin + _invert_octave(_compute_octave(cell.lower - origin) + _LEAP), _FARTHEST)
        if cut > cell.lower:
            yield cut
    elif cell.upper is not None:
        cut = max(origin + _invert_octave(_compute_octave(cell.upper - origin) - _LEAP), -_FARTHEST)
        if cut < cell.upper:
            yield cut


def _compute_octave(distance: int) -> float:
    """Return the signed magnitude of a distance: about as many prices are between 1 and 2 as between 2 and 4."""
    return log2(1 + distance) if distance >= 0 else -log2(1 - distance)


def _invert_octave(octave: float) -> int:
    """Return the distance of a magnitude: the inverse of `_compute_octave`."""
    return round(2**octave) - 1 if octave >= 0 else 1 - round(2**-octave)


async def _split_cells(
    counter: _HeatmapBuilder, cells: Sequence[_HeatmapCell], cuts: Sequence[Sequence[int]]
) -> list[_HeatmapCell]:
    """Count the pieces of cells. The last piece of a cell is computed as the rest; the proof verifies it at the end."""
    edges = [[cell.lower, *inner, cell.upper] for cell, inner in zip(cells, cuts, strict=True)]
    ranges = [PartitionRange(PartitionKind.RANGE, *pair) for bounds in edges for pair in list(pairwise(bounds))[:-1]]
    counts = iter(await counter.count_all(ranges))
    pieces: list[_HeatmapCell] = []
    for cell, bounds in zip(cells, edges, strict=True):
        rest, depth = cell.count, cell.depth + (len(bounds) > 2 and None not in bounds)
        for lower, upper in pairwise(bounds[:-1]):
            number = next(counts)
            pieces.append(_HeatmapCell(lower, upper, number, depth))
            rest -= number
        pieces.append(_HeatmapCell(bounds[-2], bounds[-1], max(rest, 0), depth))
    return pieces


def _merge_cells(cells: Sequence[_HeatmapCell], ranges: int) -> list[PartitionRange]:
    """Merge adjacent cells into at most *ranges* ranges, with the smallest sufficient limit of records."""
    total = sum(cell.count for cell in cells)
    limits = range(-(-total // ranges), total + 1)
    enough = bisect_left(limits, True, key=lambda limit: len(_fill_ranges(cells, limit)) <= ranges)
    return [
        PartitionRange(PartitionKind.RANGE, lower, upper)
        for lower, upper in pairwise([*_fill_ranges(cells, limits[enough]), None])
    ]


def _fill_ranges(cells: Sequence[_HeatmapCell], limit: int) -> list[int | None]:
    """Return the lower bounds of ranges of up to *limit* records; a larger cell is a range of its own."""
    starts, size = [cells[0].lower], 0
    for cell in cells:
        if size and cell.count and size + cell.count > limit:
            starts.append(cell.lower)
            size = 0
        size += cell.count
    return starts


async def _prove(counter: _HeatmapBuilder, ranges: Sequence[PartitionRange], section: PartitionsSection) -> Heatmap:
    """Count the parts until their sum is the total before and after it; the last round accepts the tolerance."""
    after = await counter.count(EVERYTHING)
    for number in range(1, section.rounds + 1):
        before, counts = after, await counter.count_all(ranges)
        after = await counter.count(EVERYTHING)
        difference = max(abs(sum(counts) - before), abs(sum(counts) - after))
        if difference == 0 or (number == section.rounds and difference <= section.tolerance * after):
            parts = tuple(PlannedPartition(range_, count) for range_, count in zip(ranges, counts, strict=True))
            return Heatmap(parts, after, counts=counter.calls, rounds=number)
    raise _make_unstable_error(sum(counts), before, after)


def _make_unstable_error(parts_sum: int, before: int, after: int) -> Transient:
    message = (
        f"the partitions contain {parts_sum} records, but the source counts {before} before and {after} after them"
    )
    hint = "if the source changes continuously, set partitions.tolerance; otherwise check source.lower_param, "
    hint += "source.upper_param and source.null_param, or set partitions: {count: 1}"
    if after and parts_sum > after and parts_sum % after == 0:
        message += f": {parts_sum // after} times the total, so the source seems to ignore lower_param and upper_param"
        hint = "set source.lower_param and source.upper_param to parameters that the source supports, "
        hint += "or set partitions: {count: 1}"
    return Transient(UNSTABLE, message, hint=hint, total=after, sum=parts_sum)
