"""Seeded records of the simulator: selection by price and time, pages, and random changes. No I/O."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise, product
from math import exp
from random import Random
from statistics import NormalDist

import orjson

from penstock.kernel.clock import Clock

_SHIFT = 30
_NUMBER = (1 << _SHIFT) - 1
_NO_PRICE = 1 << 40  # greater than every price: records without a price are sorted last
_SELECTIONS = 256
_ONE_BY_ONE = 1_000  # below this fraction of a list, insertion and deletion per key cost less than a new sort
_BITS = 64  # random bits per record
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
FIRST_MOMENT = (datetime(2026, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_STEPS = 4_096
_LOWEST, _USUAL, _SPREAD = 20_000, 200_000, 1.2
_GRADES, _COLORS = ("EX", "EX", "VG", "G"), "DEFGHIJK"
_CLARITIES = ("IF", "VVS1", "VVS2", "VS1", "VS2", "SI1", "SI2", "I1")
_AVAILABILITIES = ("AVAILABLE", "AVAILABLE", "AVAILABLE", "ON_HOLD")
# A record consists of prepared parts, each selected by some of the bits. This halves the time to make records.
_DISCOUNTS = [f"-{percent}.{quarter:02d}" for percent in range(64) for quarter in (0, 25, 50, 75)]
_LOCATIONS = [
    f'{{"country":"{country}","city":"{city}"}}'
    for country, city in (("IN", "Surat"), ("IN", "Mumbai"), ("BE", "Antwerp"), ("US", "New York"))
]
_LABS = ("GIA", "GIA", "IGI", "HRD")
_SHAPES = ("ROUND", "ROUND", "ROUND", "OVAL", "CUSHION", "PEAR", "EMERALD", "PRINCESS")
_CARATS = [(30 + step // 14) / 100 for step in range(_STEPS)]  # by the bits of the price: large stones cost more
_SIDES = [f'"length":{4.1 + carats:.2f},"width":{4 + carats:.2f}' for carats in _CARATS]
_LOOKS = [
    f'"color":"{color}","clarity":"{clarity}","cut":"{cut}","polish":"{polish}","symmetry":"{symmetry}"'
    for color, clarity, cut, polish, symmetry in product(_COLORS, _CLARITIES, _GRADES, _GRADES, _GRADES)
]
_GLOWS = ("NON", "NON", "FNT", "MED")
_DEPTHS = [
    f'"depth":{depth / 10},"table":{table / 10},"labgrown":{labgrown}'
    for depth, table, labgrown in product(range(590, 654, 4), range(540, 604, 4), ("false", "false", "false", "true"))
]


class PriceFormat(StrEnum):
    """Distribution of prices."""

    HEAVY = "heavy"
    EQUAL = "equal"
    UNIFORM = "uniform"


class RecordOrder(StrEnum):
    """Sort order of pages."""

    PRICE = "price"
    ID = "id"


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Select prices in [*lower*, *upper*), or only records without (True) or with (False) a price, and changes in
    (*after*, *upto*], in microseconds."""

    lower: int | None = None
    upper: int | None = None
    is_null: bool | None = None
    after: int | None = None
    upto: int | None = None


@dataclass(frozen=True, slots=True)
class RecordSlice:
    """Result of a filter: a slice of a list of sorted keys, valid until the next change."""

    keys: list[int]
    first: int
    end: int

    @property
    def total(self) -> int:
        return self.end - self.first

    def count_up_to(self, key: int) -> int:
        """Return the number of rows up to and including *key*, which may have been deleted."""
        return bisect_right(self.keys, key, self.first, self.end) - self.first

    def slice_keys(self, offset: int, limit: int) -> list[int]:
        start = self.first + offset
        return self.keys[start : min(start + limit, self.end)] if offset < self.total else []


@dataclass(frozen=True, slots=True)
class DatasetChange:
    """Ids of the records of one change."""

    updated: Sequence[str]
    inserted: Sequence[str]
    deleted: Sequence[str]


class Dataset:
    """Records and changes that depend on the seed only, except for the time of a change."""

    def __init__(self, size: int, seed: int, prices: PriceFormat, order: RecordOrder, clock: Clock) -> None:
        self.order = order
        self.generation = 0
        self._clock = clock
        self._random = Random(seed)  # noqa: S311 - repeatable on purpose
        self._price_of = _make_price_function(prices)
        # Indexed by record number, from 1. A deleted record leaves an empty body.
        self._bodies, self._prices, self._moments = [b""], [0], [0]
        self._last_moment = FIRST_MOMENT
        for _ in range(size):
            self._make(self._last_moment + 1)
        numbers = range(1, size + 1)
        self._by_price = sorted(map(self._make_price_key, numbers))
        self._by_moment = list(map(self._make_moment_key, numbers))
        self._selections: dict[RecordFilter, RecordSlice] = {}

    @property
    def total(self) -> int:
        return len(self._by_price)

    def select(self, filter_: RecordFilter) -> RecordSlice:
        """Return the rows of a filter, valid until the next change."""
        rows = self._selections.get(filter_)
        if rows is None:
            if len(self._selections) >= _SELECTIONS:
                self._selections.clear()
            rows = self._selections[filter_] = self._select(filter_)
        return rows

    def encode_records(self, keys: Iterable[int]) -> list[bytes]:
        """Return the records at these keys, as JSON."""
        bodies = self._bodies
        return [bodies[key & _NUMBER] for key in keys]

    def list_truth(self) -> list[bytes]:
        """Return all present records, sorted by id."""
        return [body for body in self._bodies if body]

    def find_ids_after(self, moment: datetime) -> set[str]:
        """Return the ids of the present records that were inserted or updated after *moment*."""
        rows = self.select(RecordFilter(after=convert_to_micros(moment)))
        return {_format_record_id(key & _NUMBER) for key in rows.slice_keys(0, rows.total)}

    def change_records(self, updates: int = 0, inserts: int = 0, deletes: int = 0) -> DatasetChange:
        """Change random records at once, at most all present ones."""
        chosen = self._random.sample(range(self.total), min(updates + deletes, self.total))
        numbers = [self._by_price[place] & _NUMBER for place in chosen]
        deleted, updated = numbers[:deletes], numbers[deletes:]
        prices, moments = set(map(self._make_price_key, numbers)), set(map(self._make_moment_key, numbers))
        for number in updated:
            self._update(number)
        inserted = [self._make(self._make_next_moment()) for _ in range(inserts)]
        for number in deleted:
            self._bodies[number] = b""
        present = [*updated, *inserted]
        _exchange(self._by_price, prices, [self._make_price_key(number) for number in present])
        _exchange(self._by_moment, moments, [self._make_moment_key(number) for number in present])
        if numbers or inserted:
            self.generation += 1
            self._selections.clear()
        return DatasetChange(
            *([_format_record_id(number) for number in changed] for changed in (updated, inserted, deleted))
        )

    def _make(self, moment: int) -> int:
        number, bits = len(self._bodies), self._random.getrandbits(_BITS)
        price = self._price_of(bits)
        self._bodies.append(_make_record(number, bits, price, moment))
        self._prices.append(_NO_PRICE if price is None else price)
        self._moments.append(moment)
        self._last_moment = moment
        return number

    def _update(self, number: int) -> None:
        bits, moment = self._random.getrandbits(_BITS), self._make_next_moment()
        price = self._price_of(bits)
        self._bodies[number] = _change_record(self._bodies[number], bits, price, moment)
        self._prices[number] = _NO_PRICE if price is None else price
        self._moments[number] = self._last_moment = moment

    def _make_next_moment(self) -> int:
        return max(self._last_moment + 1, convert_to_micros(self._clock.now()))

    def _make_price_key(self, number: int) -> int:
        return self._prices[number] << _SHIFT | number

    def _make_moment_key(self, number: int) -> int:
        return self._moments[number] << _SHIFT | number

    def _select(self, filter_: RecordFilter) -> RecordSlice:
        low, high = _make_price_keys(filter_)
        first, end = bisect_left(self._by_price, low), bisect_left(self._by_price, high)
        since = 0 if filter_.after is None else bisect_left(self._by_moment, filter_.after + 1 << _SHIFT)
        until = self.total if filter_.upto is None else bisect_left(self._by_moment, filter_.upto + 1 << _SHIFT)
        until = max(since, until)
        is_always = until - since == self.total
        if is_always and self.order is RecordOrder.PRICE:
            return RecordSlice(self._by_price, first, max(first, end))
        if until - since < end - first:
            numbers = (key & _NUMBER for key in self._by_moment[since:until])
            keys = [key for key in map(self._make_price_key, numbers) if low <= key < high]
        else:
            after, upto = filter_.after or 0, self._last_moment if filter_.upto is None else filter_.upto
            keys = [key for key in self._by_price[first:end] if after < self._moments[key & _NUMBER] <= upto]
        keys = sorted(key & _NUMBER for key in keys) if self.order is RecordOrder.ID else sorted(keys)
        return RecordSlice(keys, 0, len(keys))


def convert_to_micros(moment: datetime) -> int:
    """Return the microseconds since 1970, which compare exactly."""
    return (moment - _EPOCH) // _MICROSECOND


def _make_price_keys(filter_: RecordFilter) -> tuple[int, int]:
    """Return the first key of the price range of a filter, and the first key after the range."""
    if filter_.is_null:
        return _NO_PRICE << _SHIFT, _NO_PRICE + 1 << _SHIFT
    is_ranged = filter_.is_null is False or filter_.lower is not None or filter_.upper is not None
    limit = _NO_PRICE if is_ranged else _NO_PRICE + 1
    lower = 0 if filter_.lower is None else min(max(filter_.lower, 0), limit)
    upper = limit if filter_.upper is None else min(max(filter_.upper, 0), limit)
    return lower << _SHIFT, upper << _SHIFT


def _exchange(keys: list[int], removed: Set[int], added: Sequence[int]) -> None:
    """Remove keys from a sorted list and insert others."""
    if len(removed) + len(added) > len(keys) // _ONE_BY_ONE:
        keys[:] = [key for key in keys if key not in removed]
        keys += added
        keys.sort()
        return
    for key in removed:
        del keys[bisect_left(keys, key)]
    for key in added:
        insort(keys, key)


def _format_record_id(number: int) -> str:
    """Return the id of a record number. Ids sort as numbers do."""
    return f"DIAMOND/{number:09d}"


def _make_record(number: int, bits: int, price: int | None, moment: int) -> bytes:
    """Return a new record, as JSON."""
    digits, step = f"{number:09d}", bits & 4095
    return (
        f'{{"id":"DIAMOND/{digits}","price":{"null" if price is None else price},'
        f'"discount":"{_DISCOUNTS[bits >> 12 & 255]}","updatedAt":"{_format_moment(moment)}",'
        f'"diamond":{{"id":"{digits}",'
        f'"availability":"{_AVAILABILITIES[bits >> 20 & 3]}","supplierStockId":"S{bits >> 44}",'
        f'"image":"https://img.example.com/{digits}.jpg","video":"https://vid.example.com/{digits}.mp4",'
        f'"location":{_LOCATIONS[bits >> 22 & 3]},"certificate":{{"id":"C{digits}","lab":"{_LABS[bits >> 24 & 3]}",'
        f'"certNumber":"1{digits}","shape":"{_SHAPES[bits >> 26 & 7]}","carats":{_CARATS[step]},'
        f'{_LOOKS[bits >> 29 & 4095]},"floInt":"{_GLOWS[bits >> 41 & 3]}",{_SIDES[step]},'
        f"{_DEPTHS[bits >> 43 & 1023]}}}}}}}"
    ).encode()


def _change_record(record: bytes, bits: int, price: int | None, moment: int) -> bytes:
    """Return the record with another price, discount, availability and time of change."""
    changed = orjson.loads(record)
    changed |= {"price": price, "discount": _DISCOUNTS[bits >> 12 & 255], "updatedAt": _format_moment(moment)}
    changed["diamond"]["availability"] = _AVAILABILITIES[bits >> 20 & 3]
    return orjson.dumps(changed)


def _make_price_function(prices: PriceFormat) -> Callable[[int], int | None]:
    """Return the function from bits to a price. Of 1,000 records about two have no price, and about one costs 0."""
    spread: dict[PriceFormat, Callable[[int], int]] = {
        PriceFormat.HEAVY: _make_heavy_prices(),
        PriceFormat.EQUAL: lambda _: 500_000,
        PriceFormat.UNIFORM: lambda bits: bits % 10_000_000,
    }
    make_usual = spread[prices]

    def compute_price(bits: int) -> int | None:
        rare = bits >> 54
        if rare > 2:
            return make_usual(bits)
        return None if rare else 0

    return compute_price


def _make_heavy_prices() -> Callable[[int], int]:
    """Return the function from bits to a price of a log-normal distribution, by a table of quantiles."""
    normal = NormalDist()
    deviations = (normal.inv_cdf((step + 0.5) / (_STEPS + 1)) for step in range(_STEPS + 1))
    quantiles = [_LOWEST + int(_USUAL * exp(_SPREAD * deviation)) for deviation in deviations]
    cells = [(low, high - low) for low, high in pairwise(quantiles)]

    def compute_price(bits: int) -> int:
        low, width = cells[bits & 4095]
        return low + (width * (bits >> 12 & 4095) >> 12)

    return compute_price


def _format_moment(moment: int) -> str:
    second, rest = divmod(moment, 1_000_000)
    return f"{_format_second(second)}.{rest:06d}Z"


@lru_cache(maxsize=16)
def _format_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).replace(tzinfo=None).isoformat()
