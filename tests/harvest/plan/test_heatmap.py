"""The heatmap cuts any source into parts that are all of it, once, and about equal; or says why it cannot."""

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
from penstock.harvest.plan.heatmap import scan
from penstock.kernel.errors import Corrupt, Transient
from tests.support.soak import examples

MILLION = 1_000_000
STOCK = dict.fromkeys(range(3_000), 10)
NULLS = st.integers(0, 3) | st.integers(0, MILLION)


class PriceSource:
    """A source that knows how many records it has at each price, and how often it was asked."""

    def __init__(self, prices: Mapping[int, int], nulls: int = 0) -> None:
        self.nulls = nulls
        self.calls = 0
        self.under_way = 0
        self.most_under_way = 0
        self.has(prices)

    def has(self, prices: Mapping[int, int]) -> None:
        self.prices = {price: number for price, number in prices.items() if number}
        self._sorted = sorted(self.prices)
        self._below = [0, *accumulate(self.prices[price] for price in self._sorted)]

    @property
    def total(self) -> int:
        return self._below[-1] + self.nulls

    async def count(self, range_: PartitionRange) -> int:
        self.calls += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            return self.answer(range_)
        finally:
            self.under_way -= 1

    def answer(self, range_: PartitionRange) -> int:
        if range_.kind is not PartitionKind.RANGE:
            return self.nulls if range_.kind is PartitionKind.NULL else self.total
        begin = 0 if range_.lower is None else self._below[bisect_left(self._sorted, range_.lower)]
        end = self._below[-1] if range_.upper is None else self._below[bisect_left(self._sorted, range_.upper)]
        return end - begin


class Busy(PriceSource):
    """A shop that changes when it is asked."""

    def __init__(self, prices: Mapping[int, int], change: "Callable[[Busy], None]", nulls: int = 0) -> None:
        super().__init__(prices, nulls)
        self._change = change

    async def count(self, range_: PartitionRange) -> int:
        self._change(self)
        return await super().count(range_)


def holds(range_: PartitionRange, price: int | None) -> bool:
    """Whether a record at *price* belongs to the range, by the words of `PartitionRange`."""
    if range_.kind is not PartitionKind.RANGE or price is None:
        return range_.kind is PartitionKind.ALL or (price is None and range_.kind is PartitionKind.NULL)
    return (range_.lower is None or price >= range_.lower) and (range_.upper is None or price < range_.upper)


def covers(heatmap: Heatmap, price_source: PriceSource) -> None:
    """Every record there is or may come belongs to one part."""
    ranges = [part.range for part in heatmap.parts]
    bounds = {bound for range_ in ranges for bound in (range_.lower, range_.upper) if bound is not None}
    near = {place + step for place in {*price_source.prices, *bounds} for step in (-1, 0, 1)}
    for price in (None, -(10**30), 10**30, *near):
        assert sum(holds(range_, price) for range_ in ranges) == 1, price


def is_a_cut(heatmap: Heatmap, price_source: PriceSource) -> None:
    """The parts cover it, and each has the records it is said to have."""
    covers(heatmap, price_source)
    for part in heatmap.parts:
        brute = sum(number for price, number in price_source.prices.items() if holds(part.range, price))
        assert part.count == brute + price_source.nulls * holds(part.range, None), part
    assert heatmap.sum == heatmap.total == price_source.total


def is_balanced(heatmap: Heatmap, price_source: PriceSource, section: PartitionsSection) -> None:
    """The bounds `scan` promises in a source that holds still."""
    parts = max(1, min(-(-price_source.total // section.least), section.count))
    target = price_source.total / parts
    ranges = [part for part in heatmap.parts if part.range.kind is PartitionKind.RANGE]
    heaviest = max(price_source.prices.values(), default=0)
    assert (
        len(ranges)
        <= max(1, ceil((price_source.total - price_source.nulls) * parts / max(price_source.total, 1)))
        <= parts
    )
    for part in ranges:
        values = sum(holds(part.range, price) for price in price_source.prices)
        limit = 1.5 * target + 1 if heaviest <= target / 2 else 2 * target
        assert part.count <= limit or values == 1, (part, target)
    inside = all(section.lowest <= price < section.highest for price in price_source.prices)
    for_a_cut = 4 + log2(section.highest - section.lowest) if inside else 81
    assert heatmap.counts <= 10 + for_a_cut * (parts - 1) + (parts + 3)


async def cut(price_source: PriceSource, **options: Any) -> Heatmap:
    section = PartitionsSection(**options)
    heatmap = await scan(price_source.count, section)
    assert heatmap.counts == price_source.calls
    assert heatmap.rounds == 1
    is_a_cut(heatmap, price_source)
    is_balanced(heatmap, price_source, section)
    return heatmap


PRICES = st.integers(0, 9_999_999) | st.integers(-20, 20) | st.integers(-(2**40), 2**40) | st.integers(-(2**61), 2**61)
SPIKES = st.dictionaries(PRICES, st.integers(1, 9) | st.integers(1, MILLION), max_size=60)
OPTIONS = st.fixed_dictionaries(
    {"count": st.integers(1, 60), "least": st.integers(1, 9) | st.integers(1, 5_000)},
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
@example({}, 1, {"least": 1})
@example({5: 1}, 0, {"least": 1})
@example({5: 1}, 1, {"least": 1})
@example({}, 50_000, {})
@example({123_456: 770_000}, 0, {})
@example({123_456: 770_000, 123_457: 1, 123_455: 1}, 7, {})
@example({9_999_999: 40_000, 10_000_000: 40_000, 0: 40_000, -1: 40_000}, 0, {})
@example({2**61: 50_000, 2**61 - 1: 50_000, -(2**61): 50_000}, 0, {})
@example({0: 37, 9_999_999: 63}, 0, {"count": 2, "least": 1})  # where guesses come near only slowly
@example(dict.fromkeys(range(60), 1), 60, {"least": 4})  # half of the parts are for those without a value
@example({price * 1_000: 967 for price in range(31)}, 0, {})  # one value more than there may be ranges
@settings(max_examples=examples(150, soak=5_000))
async def test_whatever_the_prices_the_parts_are_all_of_it_once_and_about_equal(
    prices: dict[int, int], nulls: int, options: dict[str, int]
) -> None:
    """H3: half-open ranges without gap or overlap, one for null, their sum the total, within the bounds of size."""
    await cut(PriceSource(prices, nulls), **options)


@pytest.mark.soak
@given(st.sampled_from(sorted(DRAWS)), st.integers(0, 2**32), st.integers(1, 3_000), NULLS, OPTIONS)
@settings(max_examples=examples(60, soak=2_000))
async def test_whatever_the_shape_the_parts_are_all_of_it_once_and_about_equal(
    shape: str, seed: int, size: int, nulls: int, options: dict[str, int]
) -> None:
    """H3: the same for the shapes prices have, each price many times or once."""
    chance = Random(seed)
    weight = chance.choice([1, 1, 40])
    prices = Counter(DRAWS[shape](chance) for _ in range(size))
    await cut(PriceSource({price: number * weight for price, number in prices.items()}, nulls), **options)


@pytest.mark.full
@pytest.mark.parametrize("shape", ["log-normal", "log-normal, narrow", "whole dollars", "pareto", "pareto, no mean"])
async def test_few_calls_are_enough_for_prices(shape: str) -> None:
    """H3: half a million records in 30 partitions: at most 60 calls to cut them, and each counted once as proof."""
    chance = Random(7)
    prices = Counter(DRAWS[shape](chance) for _ in range(50_000))
    heatmap = await cut(PriceSource({price: 10 * number for price, number in prices.items()}, nulls=1_000))
    assert len(heatmap.parts) == 31
    assert heatmap.counts <= 60 + 31 + 2
    assert max(part.count for part in heatmap.parts) <= 1.4 * heatmap.total / 30


async def test_one_price_for_all_ends_soon() -> None:
    """H3: 770,000 records nobody can part are one part, found by halving; those without a value are in it too."""
    heatmap = await cut(PriceSource({123_456: 770_000}, nulls=30))
    assert [(part.range, part.count) for part in heatmap.parts] == [(EVERYTHING, 770_030)]
    assert heatmap.counts <= 70


async def test_a_heavy_value_does_not_swallow_the_rest() -> None:
    """H3: what lies beside a value that is too heavy is cut as if it were not there."""
    heatmap = await cut(PriceSource({0: 300_000} | dict.fromkeys(range(1_000, 301_000, 100), 100)))
    assert max(part.count for part in heatmap.parts) == 300_000
    assert len(heatmap.parts) >= 15


@pytest.mark.full
@pytest.mark.parametrize(("total", "parts"), [(0, 1), (1, 1), (1_000, 1), (1_001, 3), (29_001, 31), (90_000, 31)])
async def test_a_small_source_has_fewer_parts(total: int, parts: int) -> None:
    """H3: so many that each has `least`; one part is everything, with a value or without, for a single call."""
    heatmap = await cut(PriceSource(dict.fromkeys(range(total), 1)))
    assert len(heatmap.parts) == parts
    if parts == 1:
        assert heatmap.parts[0].range == EVERYTHING
        assert heatmap.counts == 1


async def test_the_null_part_is_there_when_it_is_empty() -> None:
    """H3: a record may lose its price before its partition is fetched."""
    heatmap = await cut(PriceSource(dict.fromkeys(range(5_000), 1)))
    assert heatmap.parts[-1].range == WITHOUT_VALUE


async def test_calls_run_at_once_but_not_too_many() -> None:
    """H3: as many as allowed are under way, never more, and progress is told in a number that only grows."""
    price_source, told = PriceSource(dict.fromkeys(range(90_000), 1)), []

    async def tell(calls: int) -> None:
        told.append(calls)

    heatmap = await scan(price_source.count, PartitionsSection(), at_once=5, progress=tell)
    assert price_source.most_under_way == 5
    assert told == sorted(told)
    assert len(told) == told[-1] == heatmap.counts == price_source.calls


CHANGES = st.lists(st.tuples(PRICES | st.none(), PRICES | st.none(), st.integers(0, 2)), max_size=40)


@pytest.mark.soak
@given(SPIKES, NULLS, OPTIONS, CHANGES, st.integers(1, 5))
@settings(max_examples=examples(80, soak=1_000))
async def test_a_source_that_comes_to_rest_is_counted_exactly(
    prices: dict[int, int],
    nulls: int,
    options: dict[str, int],
    changes: list[tuple[int | None, int | None, int]],
    every: int,
) -> None:
    """H3: records that come, go and change their price while it is scanned are each in one part in the end."""
    todo, changed = iter(changes), [0]

    def change(price_source: Busy) -> None:
        if price_source.calls % every or (step := next(todo, None)) is None:
            return
        changed.append(price_source.calls)
        gone, come, new = step
        records = Counter(price_source.prices)
        if gone is None:
            price_source.nulls = max(price_source.nulls - 1, 0)
        elif records:
            records[min(records, key=lambda price: abs(price - gone))] -= 1
        if come is None:
            price_source.nulls += new
        else:
            records[come] += new
        price_source.has(records)

    price_source = Busy(
        {0: 50} | prices, change, nulls + 50
    )  # more than may come: a source that doubles is not believed
    heatmap = await scan(price_source.count, PartitionsSection(**options, rounds=100))
    covers(heatmap, price_source)
    assert heatmap.sum == heatmap.total
    if heatmap.counts > 1 and changed[-1] < heatmap.counts - len(heatmap.parts) - 2:  # it rested in the last round
        is_a_cut(heatmap, price_source)


def grow(price_source: Busy) -> None:
    price_source.has({price: number + (price == 500) for price, number in price_source.prices.items()})


def get_cheap(price_source: Busy) -> None:
    """A record at one price goes, one at another comes: the total tells nothing of it."""
    price_source.has(price_source.prices | {10: price_source.prices[10] + 1, 2_900: price_source.prices[2_900] - 1})


@pytest.mark.parametrize("change", [grow, get_cheap])
async def test_a_source_that_never_rests_is_refused(change: Callable[[Busy], None]) -> None:
    """H3: no work starts on parts that do not add up; the error tells by how much, and what can be done."""
    price_source = Busy(STOCK | {2_900: 1_000}, change)
    with pytest.raises(Transient) as raised:
        await scan(price_source.count, PartitionsSection(rounds=3))
    assert raised.value.code == "HEATMAP_UNSTABLE"
    assert raised.value.details["sum"] != raised.value.details["total"]
    assert str(raised.value.details["sum"]) in raised.value.message
    assert str(raised.value.details["total"]) in raised.value.message
    assert "partitions.tolerance" in str(raised.value.hint)


async def test_a_source_that_never_rests_is_taken_within_the_tolerance() -> None:
    """H3: as near as was allowed is enough, but only after every round was tried."""
    price_source = Busy(STOCK, grow)
    section = PartitionsSection(rounds=3, tolerance=0.01)
    heatmap = await scan(price_source.count, section)
    assert heatmap.rounds == 3
    assert 0 < abs(heatmap.sum - heatmap.total) <= 0.01 * heatmap.total
    assert sum(holds(part.range, 500) for part in heatmap.parts) == 1
    with pytest.raises(Transient):
        await scan(price_source.count, section.model_copy(update={"tolerance": 0.0001}))


@pytest.mark.parametrize("is_after", [False, True])
async def test_a_total_that_moved_beside_the_parts_is_counted_again(is_after: bool) -> None:
    """H3: the total before the parts has to be the one after them, and both their sum."""

    def change(price_source: Busy) -> None:
        if price_source.calls == moment:
            grow(price_source)

    first = await cut(PriceSource(STOCK))
    moment = first.counts - (1 if is_after else len(first.parts) + 1)
    price_source = Busy(STOCK, change)
    heatmap = await scan(price_source.count, PartitionsSection())
    assert heatmap.rounds == 2
    is_a_cut(heatmap, price_source)


async def test_nulls_that_cannot_be_asked_for_are_not_lost_silently() -> None:
    """H3: a total with records no part has is refused, however often it is counted."""

    class Mute(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            return 0 if range_.kind is PartitionKind.NULL else super().answer(range_)

    with pytest.raises(Transient) as raised:
        await scan(Mute(STOCK, nulls=1).count, PartitionsSection())
    assert raised.value.code == "HEATMAP_UNSTABLE"
    assert raised.value.details == {"total": 30_001, "sum": 30_000}
    assert "without a value" in str(raised.value.hint)


async def test_a_source_that_does_not_heed_bounds_is_refused_at_once() -> None:
    """H3: one that answers every count with its total is not asked a thousand times."""

    class Deaf(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            return self.total

    price_source = Deaf(STOCK)
    with pytest.raises(Transient, match="together") as raised:
        await scan(price_source.count, PartitionsSection())
    assert "bounds" in str(raised.value.hint)
    assert price_source.calls <= 10


@pytest.mark.soak
@given(st.integers(0, 2**32), st.sampled_from([1, 1_000, 20_000, MILLION]))
@settings(max_examples=examples(15, soak=500))
async def test_a_source_that_makes_no_sense_is_not_asked_for_ever(seed: int, most: int) -> None:
    """H3: the number of calls has a bound whatever the answers are, and nothing comes of them."""
    chance = Random(seed)

    class Erratic(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            if range_.kind is PartitionKind.ALL:
                return 100_000
            return chance.randrange(20_000 if self.calls <= 10 else most)  # with sense at first: else it ends there

    price_source = Erratic({})
    with pytest.raises(Transient):
        await scan(price_source.count, PartitionsSection(rounds=2))
    assert price_source.calls <= 10 + 81 * 29 + 2 * 33


async def test_parts_are_whole_though_cells_are_not_split_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """H3: splitting has an end, and what is not as equal as it might be is still all there is."""
    monkeypatch.setattr("penstock.harvest.plan.heatmap._SPLITS", 1)
    price_source = PriceSource({123_456: 40_000, 5_000_000: 40_000})
    heatmap = await scan(price_source.count, PartitionsSection())
    is_a_cut(heatmap, price_source)
    assert heatmap.counts <= 10 + 29 + 33


@pytest.mark.parametrize("answer", [-1, 2**50])
@pytest.mark.parametrize("kind", PartitionKind)
async def test_an_absurd_count_is_refused(kind: PartitionKind, answer: int) -> None:
    """H3: an answer no count can be is an error with a code of its own."""

    class Absurd(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            return answer if range_.kind is kind else super().answer(range_)

    price_source = Absurd(STOCK)
    with pytest.raises(Corrupt) as raised:
        await scan(price_source.count, PartitionsSection())
    assert raised.value.code == "HEATMAP_COUNT_INVALID"


async def test_a_call_that_fails_stops_the_others() -> None:
    """H3: the caller sees the source's own error, and the source no further calls."""

    class Broken(PriceSource):
        def answer(self, range_: PartitionRange) -> int:
            if self.calls >= 12:
                raise ConnectionResetError
            return super().answer(range_)

    price_source = Broken(STOCK)
    with pytest.raises(ConnectionResetError):
        await scan(price_source.count, PartitionsSection(), at_once=2)
    assert price_source.calls <= 14
    assert price_source.under_way == 0
