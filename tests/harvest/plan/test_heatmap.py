"""The heatmap: it divides any source into complete and about equal parts, or reports why it cannot."""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from math import ceil, log2
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.harvest.config import PartitionsSection
from penstock.harvest.model import EVERYTHING, WITHOUT_VALUE, Heatmap, PartitionKind, PartitionRange
from penstock.harvest.plan.heatmap import make_heatmap
from penstock.kernel.errors import Corrupt, Transient
from tests.support.soak import examples

MILLION = 1_000_000
STOCK = dict.fromkeys(range(3_000), 10)
NULLS = st.integers(0, 3) | st.integers(0, MILLION)


class PriceSource:
    """A source with a number of records per price, which counts its calls."""

    def __init__(self, prices: Mapping[int, int], nulls: int = 0) -> None:
        self.nulls = nulls
        self.calls = 0
        self.running = 0
        self.most_running = 0
        self.set_prices(prices)

    def set_prices(self, prices: Mapping[int, int]) -> None:
        self.prices = {price: number for price, number in prices.items() if number}
        self._sorted = sorted(self.prices)
        self._below = [0, *accumulate(self.prices[price] for price in self._sorted)]

    @property
    def total(self) -> int:
        return self._below[-1] + self.nulls

    async def count(self, range_: PartitionRange) -> int:
        self.calls += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)
            return self.answer(range_)
        finally:
            self.running -= 1

    def answer(self, range_: PartitionRange) -> int:
        if range_.kind is not PartitionKind.RANGE:
            return self.nulls if range_.kind is PartitionKind.NULL else self.total
        begin = 0 if range_.lower is None else self._below[bisect_left(self._sorted, range_.lower)]
        end = self._below[-1] if range_.upper is None else self._below[bisect_left(self._sorted, range_.upper)]
        return end - begin


class ChangingSource(PriceSource):
    """A source that changes with every call."""

    def __init__(self, prices: Mapping[int, int], change: "Callable[[ChangingSource], None]", nulls: int = 0) -> None:
        super().__init__(prices, nulls)
        self._change = change

    async def count(self, range_: PartitionRange) -> int:
        self._change(self)
        return await super().count(range_)


def contains(range_: PartitionRange, price: int | None) -> bool:
    """Return whether a record at *price* belongs to the range, as defined by `PartitionRange`."""
    if range_.kind is not PartitionKind.RANGE or price is None:
        return range_.kind is PartitionKind.ALL or (price is None and range_.kind is PartitionKind.NULL)
    return (range_.lower is None or price >= range_.lower) and (range_.upper is None or price < range_.upper)


def check_coverage(heatmap: Heatmap, source: PriceSource) -> None:
    """Check that every possible record belongs to exactly one part."""
    ranges = [part.range for part in heatmap.parts]
    bounds = {bound for range_ in ranges for bound in (range_.lower, range_.upper) if bound is not None}
    near = {value + step for value in {*source.prices, *bounds} for step in (-1, 0, 1)}
    for price in (None, -(10**30), 10**30, *near):
        assert sum(contains(range_, price) for range_ in ranges) == 1, price


def check_parts(heatmap: Heatmap, source: PriceSource) -> None:
    """Check that the parts cover the source, and that their counts are right."""
    check_coverage(heatmap, source)
    for part in heatmap.parts:
        expected = sum(number for price, number in source.prices.items() if contains(part.range, price))
        assert part.count == expected + source.nulls * contains(part.range, None), part
    assert heatmap.sum == heatmap.total == source.total


def check_balance(heatmap: Heatmap, source: PriceSource, section: PartitionsSection) -> None:
    """Check the limits of sizes and calls that `make_heatmap` guarantees for an unchanging source."""
    parts = max(1, min(-(-source.total // section.min_records), section.count))
    target = source.total / parts
    ranges = [part for part in heatmap.parts if part.range.kind is PartitionKind.RANGE]
    heaviest = max(source.prices.values(), default=0)
    assert len(ranges) <= max(1, ceil((source.total - source.nulls) * parts / max(source.total, 1))) <= parts
    for part in ranges:
        values = sum(contains(part.range, price) for price in source.prices)
        limit = 1.5 * target + 1 if heaviest <= target / 2 else 2 * target
        assert part.count <= limit or values == 1, (part, target)
    inside = all(section.lowest <= price < section.highest for price in source.prices)
    for_a_cut = 4 + log2(section.highest - section.lowest) if inside else 81
    assert heatmap.counts <= 10 + for_a_cut * (parts - 1) + (parts + 3)


async def make_checked(source: PriceSource, **options: Any) -> Heatmap:
    section = PartitionsSection(**options)
    heatmap = await make_heatmap(source.count, section)
    assert heatmap.counts == source.calls
    assert heatmap.rounds == 1
    check_parts(heatmap, source)
    check_balance(heatmap, source, section)
    return heatmap


PRICES = st.integers(0, 9_999_999) | st.integers(-20, 20) | st.integers(-(2**40), 2**40) | st.integers(-(2**61), 2**61)
SPIKES = st.dictionaries(PRICES, st.integers(1, 9) | st.integers(1, MILLION), max_size=60)
OPTIONS = st.fixed_dictionaries(
    {"count": st.integers(1, 60), "min_records": st.integers(1, 9) | st.integers(1, 5_000)},
    optional={"lowest": st.integers(-1_000, 1_000), "highest": st.integers(1_001, 10**8)},
)
DRAWS: Mapping[str, Callable[[Random], int]] = {
    "log-normal": lambda chance: int(chance.lognormvariate(12.2, 1.2)),
    "log-normal, narrow": lambda chance: int(chance.lognormvariate(11, 0.4)),
    "whole dollars": lambda chance: 100 * int(chance.lognormvariate(7.5, 1.2)),
    "pareto": lambda chance: int(10_000 * chance.paretovariate(1.16)),
    "pareto, no mean": lambda chance: int(1_000 * chance.paretovariate(0.7)),
    "uniform": lambda chance: chance.randrange(10_000_000),
    "few prices": lambda chance: chance.randrange(40),
    "many zeros": lambda chance: max(0, int(chance.gauss(0, 300_000))),
    "negative": lambda chance: -int(chance.lognormvariate(12.2, 1.2)),
    "both signs": lambda chance: int(chance.gauss(0, 1_000_000)),
    "overflow": lambda chance: 10**9 + chance.randrange(10**8),
    "far underflow": lambda chance: -(2**61) + chance.randrange(10**12),
}


@pytest.mark.soak
@given(SPIKES, NULLS, OPTIONS)
@example({}, 0, {})
@example({}, 1, {"min_records": 1})
@example({5: 1}, 0, {"min_records": 1})
@example({5: 1}, 1, {"min_records": 1})
@example({}, 50_000, {})
@example({123_456: 770_000}, 0, {})
@example({123_456: 770_000, 123_457: 1, 123_455: 1}, 7, {})
@example({9_999_999: 40_000, 10_000_000: 40_000, 0: 40_000, -1: 40_000}, 0, {})
@example({2**61: 50_000, 2**61 - 1: 50_000, -(2**61): 50_000}, 0, {})
@example({0: 37, 9_999_999: 63}, 0, {"count": 2, "min_records": 1})  # guesses converge slowly
@example(dict.fromkeys(range(60), 1), 60, {"min_records": 4})  # half of the records have no value
@example({price * 1_000: 967 for price in range(31)}, 0, {})  # one value more than the maximum of ranges
@settings(max_examples=examples(150, soak=5_000))
async def test_parts_of_any_prices_are_complete_and_about_equal(
    prices: dict[int, int], nulls: int, options: dict[str, int]
) -> None:
    """H3: half-open ranges without gap or overlap, one for null; their sum is the total, and their size is limited."""
    await make_checked(PriceSource(prices, nulls), **options)


@pytest.mark.soak
@given(st.sampled_from(sorted(DRAWS)), st.integers(0, 2**32), st.integers(1, 3_000), NULLS, OPTIONS)
@settings(max_examples=examples(60, soak=2_000))
async def test_parts_of_any_distribution_are_complete_and_about_equal(
    shape: str, seed: int, size: int, nulls: int, options: dict[str, int]
) -> None:
    """H3: the same for typical distributions of prices, each price many times or once."""
    chance = Random(seed)
    weight = chance.choice([1, 1, 40])
    prices = Counter(DRAWS[shape](chance) for _ in range(size))
    await make_checked(PriceSource({price: number * weight for price, number in prices.items()}, nulls), **options)


@pytest.mark.full
@pytest.mark.parametrize("shape", ["log-normal", "log-normal, narrow", "whole dollars", "pareto", "pareto, no mean"])
async def test_number_of_calls(shape: str) -> None:
    """H3: half a million records in 30 partitions need at most 60 calls, and one per partition as proof."""
    chance = Random(7)
    prices = Counter(DRAWS[shape](chance) for _ in range(50_000))
    heatmap = await make_checked(PriceSource({price: 10 * number for price, number in prices.items()}, nulls=1_000))
    assert len(heatmap.parts) == 31
    assert heatmap.counts <= 60 + 31 + 2
    assert max(part.count for part in heatmap.parts) <= 1.4 * heatmap.total / 30


async def test_single_price_is_one_part() -> None:
    """H3: 770,000 records of one price are one part, found by halving, together with the records without a price."""
    heatmap = await make_checked(PriceSource({123_456: 770_000}, nulls=30))
    assert [(part.range, part.count) for part in heatmap.parts] == [(EVERYTHING, 770_030)]
    assert heatmap.counts <= 70


async def test_heavy_value_does_not_affect_other_parts() -> None:
    """H3: the values beside a too heavy value are divided as if it were not there."""
    heatmap = await make_checked(PriceSource({0: 300_000} | dict.fromkeys(range(1_000, 301_000, 100), 100)))
    assert max(part.count for part in heatmap.parts) == 300_000
    assert len(heatmap.parts) >= 15


@pytest.mark.full
@pytest.mark.parametrize(("total", "parts"), [(0, 1), (1, 1), (1_000, 1), (1_001, 3), (29_001, 31), (90_000, 31)])
async def test_small_source_has_fewer_parts(total: int, parts: int) -> None:
    """H3: each part has `min_records`; a single part needs one call and includes the records without a value."""
    heatmap = await make_checked(PriceSource(dict.fromkeys(range(total), 1)))
    assert len(heatmap.parts) == parts
    if parts == 1:
        assert heatmap.parts[0].range == EVERYTHING
        assert heatmap.counts == 1


async def test_empty_null_part_exists() -> None:
    """H3: a record may lose its price before its partition is fetched, so the part without a price always exists."""
    heatmap = await make_checked(PriceSource(dict.fromkeys(range(5_000), 1)))
    assert heatmap.parts[-1].range == WITHOUT_VALUE


async def test_concurrent_calls_are_limited() -> None:
    """H3: the maximum of concurrent calls is used, never more, and the reported progress only grows."""
    source, reported = PriceSource(dict.fromkeys(range(90_000), 1)), []

    async def report(calls: int) -> None:
        reported.append(calls)

    heatmap = await make_heatmap(source.count, PartitionsSection(), concurrency=5, progress=report)
    assert source.most_running == 5
    assert reported == sorted(reported)
    assert len(reported) == reported[-1] == heatmap.counts == source.calls


CHANGES = st.lists(st.tuples(PRICES | st.none(), PRICES | st.none(), st.integers(0, 2)), max_size=40)


@pytest.mark.soak
@given(SPIKES, NULLS, OPTIONS, CHANGES, st.integers(1, 5))
@settings(max_examples=examples(80, soak=1_000))
async def test_source_that_stops_changing_is_counted_exactly(
    prices: dict[int, int],
    nulls: int,
    options: dict[str, int],
    changes: list[tuple[int | None, int | None, int]],
    every: int,
) -> None:
    """H3: records that are inserted, deleted and changed during the count are in exactly one part at the end."""
    todo, changed = iter(changes), [0]

    def change(source: ChangingSource) -> None:
        if source.calls % every or (step := next(todo, None)) is None:
            return
        changed.append(source.calls)
        deleted, inserted, number = step
        records = Counter(source.prices)
        if deleted is None:
            source.nulls = max(source.nulls - 1, 0)
        elif records:
            records[min(records, key=lambda price: abs(price - deleted))] -= 1
        if inserted is None:
            source.nulls += number
        else:
            records[inserted] += number
        source.set_prices(records)

    source = ChangingSource(
        {0: 50} | prices, change, nulls + 50
    )  # more than are inserted: a source that doubles counts as unstable
    heatmap = await make_heatmap(source.count, PartitionsSection(**options, rounds=100))
    check_coverage(heatmap, source)
    assert heatmap.sum == heatmap.total
    if heatmap.counts > 1 and changed[-1] < heatmap.counts - len(heatmap.parts) - 2:  # no change in the last round
        check_parts(heatmap, source)


def grow(source: ChangingSource) -> None:
    source.set_prices({price: number + (price == 500) for price, number in source.prices.items()})


def move_record(source: ChangingSource) -> None:
    """Move a record to another price: the total does not change."""
    source.set_prices(source.prices | {10: source.prices[10] + 1, 2_900: source.prices[2_900] - 1})


@pytest.mark.parametrize("change", [grow, move_record])
async def test_source_that_always_changes_is_unstable(change: Callable[[ChangingSource], None]) -> None:
    """H3: parts that do not add up are an error with the difference and a hint."""
    source = ChangingSource(STOCK | {2_900: 1_000}, change)
    with pytest.raises(Transient) as raised:
        await make_heatmap(source.count, PartitionsSection(rounds=3))
    assert raised.value.code == "HEATMAP_UNSTABLE"
    assert raised.value.details["sum"] != raised.value.details["total"]
    assert str(raised.value.details["sum"]) in raised.value.message
    assert str(raised.value.details["total"]) in raised.value.message
    assert "partitions.tolerance" in str(raised.value.hint)


async def test_tolerance_accepts_a_changing_source() -> None:
    """H3: a difference within the tolerance is accepted after the last round."""
    source = ChangingSource(STOCK, grow)
    section = PartitionsSection(rounds=3, tolerance=0.01)
    heatmap = await make_heatmap(source.count, section)
    assert heatmap.rounds == 3
    assert 0 < abs(heatmap.sum - heatmap.total) <= 0.01 * heatmap.total
    assert sum(contains(part.range, 500) for part in heatmap.parts) == 1
    with pytest.raises(Transient):
        await make_heatmap(source.count, section.model_copy(update={"tolerance": 0.0001}))


@pytest.mark.parametrize("is_after", [False, True])
async def test_change_of_the_total_repeats_the_count(is_after: bool) -> None:
    """H3: the totals before and after the parts must both be their sum."""

    def change(source: ChangingSource) -> None:
        if source.calls == call:
            grow(source)

    first = await make_checked(PriceSource(STOCK))
    call = first.counts - (1 if is_after else len(first.parts) + 1)
    source = ChangingSource(STOCK, change)
    heatmap = await make_heatmap(source.count, PartitionsSection())
    assert heatmap.rounds == 2
    check_parts(heatmap, source)


async def test_records_outside_of_all_parts_are_an_error() -> None:
    """H3: a source with records that no part contains is unstable."""

    class NoNullsSource(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            return 0 if range_.kind is PartitionKind.NULL else super().answer(range_)

    with pytest.raises(Transient) as raised:
        await make_heatmap(NoNullsSource(STOCK, nulls=1).count, PartitionsSection())
    assert raised.value.code == "HEATMAP_UNSTABLE"
    assert raised.value.details == {"total": 30_001, "sum": 30_000}
    assert "source.null_param" in str(raised.value.hint)


async def test_source_that_ignores_bounds_is_unstable_after_few_calls() -> None:
    """H3: a sum that is a multiple of the total names the parameters, and the setting for a source without them."""

    class UnboundedSource(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            return self.total

    source = UnboundedSource(STOCK)
    with pytest.raises(Transient, match="the source seems to ignore lower_param and upper_param") as raised:
        await make_heatmap(source.count, PartitionsSection())
    assert "9 times the total" in raised.value.message
    assert "partitions: {count: 1}" in str(raised.value.hint)
    assert "source.lower_param and source.upper_param" in str(raised.value.hint)
    assert source.calls <= 10


@pytest.mark.soak
@given(st.integers(0, 2**32), st.sampled_from([1, 1_000, 20_000, MILLION]))
@settings(max_examples=examples(15, soak=500))
async def test_number_of_calls_of_an_erratic_source_is_limited(seed: int, most: int) -> None:
    """H3: the number of calls is limited whatever the counts are."""
    chance = Random(seed)

    class ErraticSource(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            if range_.kind is PartitionKind.ALL:
                return 100_000
            return chance.randrange(20_000 if self.calls <= 10 else most)  # plausible at first

    source = ErraticSource({})
    with pytest.raises(Transient):
        await make_heatmap(source.count, PartitionsSection(rounds=2))
    assert source.calls <= 10 + 81 * 29 + 2 * 33


async def test_parts_are_complete_when_splitting_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """H3: splitting is limited; less equal parts are still complete."""
    monkeypatch.setattr("penstock.harvest.plan.heatmap._SPLITS", 1)
    source = PriceSource({123_456: 40_000, 5_000_000: 40_000})
    heatmap = await make_heatmap(source.count, PartitionsSection())
    check_parts(heatmap, source)
    assert heatmap.counts <= 10 + 29 + 33


@pytest.mark.parametrize("answer", [-1, 2**50])
@pytest.mark.parametrize("kind", PartitionKind)
async def test_impossible_count_is_an_error(kind: PartitionKind, answer: int) -> None:
    """H3: an impossible count is an error with its own code."""

    class ImpossibleSource(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            return answer if range_.kind is kind else super().answer(range_)

    source = ImpossibleSource(STOCK)
    with pytest.raises(Corrupt) as raised:
        await make_heatmap(source.count, PartitionsSection())
    assert raised.value.code == "HEATMAP_COUNT_INVALID"


async def test_failed_call_stops_the_others() -> None:
    """H3: the error of the source is raised, and no further call is made."""

    class BrokenSource(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            if self.calls >= 12:
                raise ConnectionResetError
            return super().answer(range_)

    source = BrokenSource(STOCK)
    with pytest.raises(ConnectionResetError):
        await make_heatmap(source.count, PartitionsSection(), concurrency=2)
    assert source.calls <= 14
    assert source.running == 0
