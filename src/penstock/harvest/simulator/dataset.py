"""The records of the local source: ranges of price, windows of time, pages, and random changes. No I/O."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from random import Random

from penstock.harvest.simulator import records
from penstock.harvest.simulator.records import Prices
from penstock.kernel.clock import Clock

FIRST_MOMENT = records.micros(datetime(2026, 1, 1, tzinfo=UTC))
_SHIFT = 30
_NUMBER = (1 << _SHIFT) - 1
_NO_PRICE = 1 << 40  # behind every price: records without one come last
_SELECTIONS = 256
_ONE_BY_ONE = 1_000  # up to a so-many-th part of a list, moving its rest for each key is cheaper than sorting it anew


class Order(StrEnum):
    """How pages are sorted."""

    PRICE = "price"
    ID = "id"


@dataclass(frozen=True, slots=True)
class Filter:
    """Records at least *lower* and below *upper*, or with (False) or without (True) a price at all, that changed
    after *after* and not after *upto*, in microseconds."""

    lower: int | None = None
    upper: int | None = None
    is_null: bool | None = None
    after: int | None = None
    upto: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """What a filter selects, in order, until the next change: a part of a list of sorted keys."""

    keys: list[int]
    first: int
    end: int

    @property
    def total(self) -> int:
        return self.end - self.first

    def after(self, key: int) -> int:
        """How many come up to and with *key*, whether that is still there or not."""
        return bisect_right(self.keys, key, self.first, self.end) - self.first

    def some(self, offset: int, limit: int) -> list[int]:
        start = self.first + offset
        return self.keys[start : min(start + limit, self.end)] if offset < self.total else []


@dataclass(frozen=True, slots=True)
class Changed:
    """What a change did, by id."""

    updated: Sequence[str]
    inserted: Sequence[str]
    deleted: Sequence[str]


class Dataset:
    """Seeded records, the same for the same seed; so are changes, but for the moments at which they happen."""

    def __init__(self, size: int, seed: int, prices: Prices, order: Order, clock: Clock) -> None:
        self.order = order
        self.generation = 0
        self._clock = clock
        self._random = Random(seed)  # noqa: S311 - repeatable on purpose
        self._price_of = records.pricing(prices)
        # By number, from 1 on; what was deleted leaves a gap.
        self._bodies, self._prices, self._moments = [b""], [0], [0]
        self._last_moment = FIRST_MOMENT
        for _ in range(size):
            self._make(self._last_moment + 1)
        numbers = range(1, size + 1)
        self._by_price = sorted(map(self._price_key, numbers))
        self._by_moment = list(map(self._moment_key, numbers))
        self._selections: dict[Filter, Rows] = {}

    @property
    def total(self) -> int:
        return len(self._by_price)

    def select(self, asked: Filter) -> Rows:
        """The rows of a filter; good until the next change."""
        rows = self._selections.get(asked)
        if rows is None:
            if len(self._selections) >= _SELECTIONS:
                self._selections.clear()
            rows = self._selections[asked] = self._select(asked)
        return rows

    def bodies(self, keys: Iterable[int]) -> list[bytes]:
        """The records at these keys, as JSON."""
        held = self._bodies
        return [held[key & _NUMBER] for key in keys]

    def truth(self) -> list[bytes]:
        """All there is now, by id."""
        return [body for body in self._bodies if body]

    def ids_after(self, moment: datetime) -> set[str]:
        """What is there now and changed, or came, after *moment*."""
        rows = self.select(Filter(after=records.micros(moment)))
        return {records.key(key & _NUMBER) for key in rows.some(0, rows.total)}

    def change(self, updates: int = 0, inserts: int = 0, deletes: int = 0) -> Changed:
        """Change random records, at once; never more than there are."""
        chosen = self._random.sample(range(self.total), min(updates + deletes, self.total))
        numbers = [self._by_price[place] & _NUMBER for place in chosen]
        gone, changed = numbers[:deletes], numbers[deletes:]
        prices, moments = set(map(self._price_key, numbers)), set(map(self._moment_key, numbers))
        for number in changed:
            self._update(number)
        come = [self._make(self._next_moment()) for _ in range(inserts)]
        for number in gone:
            self._bodies[number] = b""
        there = [*changed, *come]
        _exchange(self._by_price, prices, [self._price_key(number) for number in there])
        _exchange(self._by_moment, moments, [self._moment_key(number) for number in there])
        if numbers or come:
            self.generation += 1
            self._selections.clear()
        return Changed(*([records.key(number) for number in some] for some in (changed, come, gone)))

    def _make(self, moment: int) -> int:
        number, bits = len(self._bodies), self._random.getrandbits(records.BITS)
        price = self._price_of(bits)
        self._bodies.append(records.make(number, bits, price, moment))
        self._prices.append(_NO_PRICE if price is None else price)
        self._moments.append(moment)
        self._last_moment = moment
        return number

    def _update(self, number: int) -> None:
        bits, moment = self._random.getrandbits(records.BITS), self._next_moment()
        price = self._price_of(bits)
        self._bodies[number] = records.change(self._bodies[number], bits, price, moment)
        self._prices[number] = _NO_PRICE if price is None else price
        self._moments[number] = self._last_moment = moment

    def _next_moment(self) -> int:
        return max(self._last_moment + 1, records.micros(self._clock.now()))

    def _price_key(self, number: int) -> int:
        return self._prices[number] << _SHIFT | number

    def _moment_key(self, number: int) -> int:
        return self._moments[number] << _SHIFT | number

    def _select(self, asked: Filter) -> Rows:
        low, high = _price_keys(asked)
        first, end = bisect_left(self._by_price, low), bisect_left(self._by_price, high)
        since, until = self._window(asked)
        is_always = until - since == self.total
        if is_always and self.order is Order.PRICE:
            return Rows(self._by_price, first, max(first, end))
        if until - since < end - first:
            found = (key & _NUMBER for key in self._by_moment[since:until])
            keys = [key for key in map(self._price_key, found) if low <= key < high]
        else:
            after, upto = asked.after or 0, self._last_moment if asked.upto is None else asked.upto
            keys = [key for key in self._by_price[first:end] if after < self._moments[key & _NUMBER] <= upto]
        keys = sorted(key & _NUMBER for key in keys) if self.order is Order.ID else sorted(keys)
        return Rows(keys, 0, len(keys))

    def _window(self, asked: Filter) -> tuple[int, int]:
        """Where the records of its window lie, by moment."""
        since = 0 if asked.after is None else bisect_left(self._by_moment, asked.after + 1 << _SHIFT)
        until = self.total if asked.upto is None else bisect_left(self._by_moment, asked.upto + 1 << _SHIFT)
        return since, max(since, until)


def _price_keys(asked: Filter) -> tuple[int, int]:
    """The first key of its range, and the first behind it."""
    if asked.is_null:
        return _NO_PRICE << _SHIFT, _NO_PRICE + 1 << _SHIFT
    is_ranged = asked.is_null is False or asked.lower is not None or asked.upper is not None
    most = _NO_PRICE if is_ranged else _NO_PRICE + 1
    lower = 0 if asked.lower is None else min(max(asked.lower, 0), most)
    upper = most if asked.upper is None else min(max(asked.upper, 0), most)
    return lower << _SHIFT, upper << _SHIFT


def _exchange(keys: list[int], gone: Set[int], come: Sequence[int]) -> None:
    """Take keys out of a sorted list, and others in."""
    if len(gone) + len(come) > len(keys) // _ONE_BY_ONE:
        keys[:] = [key for key in keys if key not in gone]
        keys += come
        keys.sort()
        return
    for key in gone:
        del keys[bisect_left(keys, key)]
    for key in come:
        insort(keys, key)
