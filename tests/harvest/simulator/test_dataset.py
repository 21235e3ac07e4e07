"""H17: the dataset of the simulator, compared with plain Python."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.harvest.simulator.dataset import (
    FIRST_MOMENT,
    Dataset,
    PriceFormat,
    RecordFilter,
    RecordOrder,
    convert_to_micros,
)
from penstock.harvest.simulator.rest import read_moment
from penstock.kernel.clock import ManualClock
from tests.support.soak import examples

Record = dict[str, Any]
SIZES = st.sampled_from((0, 1, 40, 3_000))  # many changes of the largest one sort again
STEPS = st.lists(st.tuples(*[st.sampled_from((0, 0, 1, 2, 50))] * 3), max_size=4)
ORDERS = st.sampled_from(list(RecordOrder))
SPREADS = st.sampled_from(list(PriceFormat))


def make_dataset(
    size: int, seed: int = 7, spread: PriceFormat = PriceFormat.HEAVY, order: RecordOrder = RecordOrder.PRICE
) -> Dataset:
    return Dataset(size, seed, spread, order, ManualClock())


def records_of(dataset: Dataset) -> list[Record]:
    return [orjson.loads(body) for body in dataset.list_truth()]


def select_pages(dataset: Dataset, asked: RecordFilter, limit: int) -> list[Record]:
    """Return the records of all pages, one after another."""
    rows, records = dataset.select(asked), list[Record]()
    while keys := rows.slice_keys(len(records), limit):
        records += map(orjson.loads, dataset.encode_records(keys))
    assert len(records) == rows.total
    return records


def select_plainly(records: list[Record], asked: RecordFilter, order: RecordOrder) -> list[Record]:
    """Return the same records without an index."""
    selected = [record for record in records if has_price(record["price"], asked) and is_in_window(record, asked)]
    if order is RecordOrder.ID:
        return sorted(selected, key=lambda record: str(record["id"]))
    return sorted(selected, key=lambda record: (record["price"] is None, record["price"] or 0, record["id"]))


def has_price(price: int | None, asked: RecordFilter) -> bool:
    if asked.is_null is not None and (price is None) != asked.is_null:
        return False
    if price is None:
        return asked.is_null is True or (asked.lower is None and asked.upper is None)
    return (asked.lower is None or price >= asked.lower) and (asked.upper is None or price < asked.upper)


def is_in_window(record: Record, asked: RecordFilter) -> bool:
    moment = read_moment(record["updatedAt"])
    return (asked.after is None or moment > asked.after) and (asked.upto is None or moment <= asked.upto)


@st.composite
def filters(draw: st.DrawFn, records: list[Record]) -> RecordFilter:
    """Generate filters with bounds at, next to, and far from existing values."""
    prices = [record["price"] for record in records if record["price"] is not None] or [5]
    moments = [read_moment(record["updatedAt"]) for record in records] or [FIRST_MOMENT]
    near = st.sampled_from((-1, 0, 1))
    price = st.none() | st.builds(int.__add__, st.sampled_from(prices), near) | st.sampled_from((-9, 0, 1 << 60))
    moment = st.none() | st.builds(int.__add__, st.sampled_from(moments), near) | st.just(0)
    if draw(st.booleans()):
        return RecordFilter(draw(price), draw(price), draw(st.sampled_from((None, False))), draw(moment), draw(moment))
    return RecordFilter(is_null=draw(st.booleans()), after=draw(moment), upto=draw(moment))


@pytest.mark.full
@pytest.mark.soak
@settings(max_examples=examples(60, soak=2_000))
@given(st.data(), SIZES, STEPS, SPREADS, ORDERS)
def test_every_filter_equals_a_plain_search(
    data: st.DataObject, size: int, steps: list[tuple[int, int, int]], spread: PriceFormat, order: RecordOrder
) -> None:
    """H17: after any changes, for any filter, the pages have the matching records in order, and the count is exact."""
    clock = ManualClock()
    dataset = Dataset(size, 3, spread, order, clock)
    for updates, inserts, deletes in steps:
        clock.advance(timedelta(seconds=1))
        dataset.select(RecordFilter())  # a selection is not reused after a change
        dataset.change_records(updates, inserts, deletes)
    records = records_of(dataset)
    assert len(records) == dataset.total
    for _ in range(4):
        asked = data.draw(filters(records))
        assert select_pages(dataset, asked, data.draw(st.integers(1, 40))) == select_plainly(records, asked, order)


@pytest.mark.soak
@settings(max_examples=examples(30, soak=500))
@given(st.lists(st.integers(-5, 12_000_000), max_size=12), ORDERS)
def test_adjacent_ranges_are_complete(cuts: list[int], order: RecordOrder) -> None:
    """H17: adjacent half-open ranges and the records without a price have each record once."""
    dataset = make_dataset(1_500, order=order)
    bounds = [None, *sorted(cuts), None]
    parts = [RecordFilter(lower, upper, is_null=False) for lower, upper in pairwise(bounds)]
    ids = [
        record["id"] for part in (*parts, RecordFilter(is_null=True)) for record in select_pages(dataset, part, 1_000)
    ]
    assert sorted(ids) == [record["id"] for record in records_of(dataset)]


@pytest.mark.soak
@settings(max_examples=examples(30, soak=500))
@given(STEPS)
def test_change_reports_its_effect(steps: list[tuple[int, int, int]]) -> None:
    """H17: the reported updates, inserts and deletes are exact, with strictly increasing times."""
    dataset = make_dataset(60)
    for step in steps:
        before, last, generation = dict(by_id(dataset)), dataset._last_moment, dataset.generation
        changed = dataset.change_records(*step)
        after = by_id(dataset)
        assert set(changed.deleted) == before.keys() - after.keys()
        assert set(changed.inserted) == after.keys() - before.keys()
        common = before.keys() & after.keys()
        assert set(changed.updated) == {name for name in common if before[name] != after[name]}
        moments = [read_moment(after[name]["updatedAt"]) for name in (*changed.updated, *changed.inserted)]
        assert moments == sorted(set(moments))
        assert all(moment > last for moment in moments)
        assert dataset.generation == generation + any((changed.updated, changed.inserted, changed.deleted))


def by_id(dataset: Dataset) -> dict[str, Record]:
    return {record["id"]: record for record in records_of(dataset)}


def test_changes_have_the_time_of_the_clock() -> None:
    """H17: a changed record has the time of its change, and the changes since a time can be listed."""
    clock = ManualClock()
    dataset = Dataset(50, 7, PriceFormat.HEAVY, RecordOrder.PRICE, clock)
    clock.advance(timedelta(days=1))
    moment = clock.now() - timedelta(microseconds=1)
    changed = dataset.change_records(updates=3, inserts=2, deletes=1)
    records = by_id(dataset)
    times = sorted(read_moment(records[name]["updatedAt"]) for name in (*changed.updated, *changed.inserted))
    assert times == [convert_to_micros(clock.now()) + step for step in range(5)]
    assert dataset.find_ids_after(moment) == {*changed.updated, *changed.inserted}


def test_records_and_changes_depend_on_the_seed() -> None:
    """H17: the same seed makes the same records and changes; another seed makes others."""
    dataset, same, other = make_dataset(500), make_dataset(500), make_dataset(500, seed=8)
    assert dataset.list_truth() == same.list_truth() != other.list_truth()
    assert dataset.change_records(5, 5, 5) == same.change_records(5, 5, 5)
    assert dataset.list_truth() == same.list_truth()


def test_updates_move_rows() -> None:
    """H17: an update changes the price, so that a row moves to another page."""
    dataset = make_dataset(1_000)
    before = [record["id"] for record in select_pages(dataset, RecordFilter(), 30)]
    moved = dataset.change_records(updates=20).updated
    after = [record["id"] for record in select_pages(dataset, RecordFilter(), 30)]
    assert sorted(before) == sorted(after)
    assert sum(abs(before.index(name) - after.index(name)) > 30 for name in moved) > 10


@pytest.mark.parametrize(
    ("spread", "distinct"), [(PriceFormat.EQUAL, 1), (PriceFormat.HEAVY, 9_000), (PriceFormat.UNIFORM, 9_000)]
)
def test_distributions_of_prices(spread: PriceFormat, distinct: int) -> None:
    """H17: heavy-tailed prices have a median far below the mean; about 2 in 1,000 have none, some are 0."""
    all_prices = [record["price"] for record in records_of(make_dataset(10_000, spread=spread))]
    prices = sorted(price for price in all_prices if price)
    assert 5 <= all_prices.count(None) <= 50
    assert all_prices.count(0) >= 1
    assert len(set(prices)) >= distinct
    mean, median = sum(prices) / len(prices), prices[len(prices) // 2]
    assert (mean > 1.5 * median) is (spread is PriceFormat.HEAVY)
    if spread is PriceFormat.HEAVY:
        assert prices[0] >= 20_000
        assert prices[-1] > 5_000_000
