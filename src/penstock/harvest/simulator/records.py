"""What one record of the local source looks like, and how it is made of a number and some random bits."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise, product
from math import exp
from statistics import NormalDist

import orjson

BITS = 64  # how many random ones a record is made of
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_STEPS = 4_096
_LOWEST, _USUAL, _SPREAD = 20_000, 200_000, 1.2
_GRADES, _COLORS = ("EX", "EX", "VG", "G"), "DEFGHIJK"
_CLARITIES = ("IF", "VVS1", "VVS2", "VS1", "VS2", "SI1", "SI2", "I1")
_AVAILABILITIES = ("AVAILABLE", "AVAILABLE", "AVAILABLE", "ON_HOLD")
# Records are made of ready pieces, each chosen by some of the bits: half a million of them take three seconds, not six.
_DISCOUNTS = [f"-{percent}.{quarter:02d}" for percent in range(64) for quarter in (0, 25, 50, 75)]
_LOCATIONS = [
    f'{{"country":"{country}","city":"{city}"}}'
    for country, city in (("IN", "Surat"), ("IN", "Mumbai"), ("BE", "Antwerp"), ("US", "New York"))
]
_LABS = ("GIA", "GIA", "IGI", "HRD")
_SHAPES = ("ROUND", "ROUND", "ROUND", "OVAL", "CUSHION", "PEAR", "EMERALD", "PRINCESS")
_CARATS = [(30 + step // 14) / 100 for step in range(_STEPS)]  # by the bits that make the price: large ones are dear
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


class Prices(StrEnum):
    """How prices are spread."""

    HEAVY = "heavy"
    EQUAL = "equal"
    UNIFORM = "uniform"


def key(number: int) -> str:
    """What the record with this number is called; keys sort as their numbers do."""
    return f"DIAMOND/{number:09d}"


def micros(moment: datetime) -> int:
    """Microseconds since 1970: moments that are compared exactly."""
    return (moment - _EPOCH) // _MICROSECOND


def make(number: int, bits: int, price: int | None, moment: int) -> bytes:
    """A new record, as JSON."""
    digits, step = f"{number:09d}", bits & 4095
    return (
        f'{{"id":"DIAMOND/{digits}","price":{"null" if price is None else price},'
        f'"discount":"{_DISCOUNTS[bits >> 12 & 255]}","updatedAt":"{_told(moment)}","diamond":{{"id":"{digits}",'
        f'"availability":"{_AVAILABILITIES[bits >> 20 & 3]}","supplierStockId":"S{bits >> 44}",'
        f'"image":"https://img.example.com/{digits}.jpg","video":"https://vid.example.com/{digits}.mp4",'
        f'"location":{_LOCATIONS[bits >> 22 & 3]},"certificate":{{"id":"C{digits}","lab":"{_LABS[bits >> 24 & 3]}",'
        f'"certNumber":"1{digits}","shape":"{_SHAPES[bits >> 26 & 7]}","carats":{_CARATS[step]},'
        f'{_LOOKS[bits >> 29 & 4095]},"floInt":"{_GLOWS[bits >> 41 & 3]}",{_SIDES[step]},'
        f"{_DEPTHS[bits >> 43 & 1023]}}}}}}}"
    ).encode()


def change(record: bytes, bits: int, price: int | None, moment: int) -> bytes:
    """The same record at another price, and what else changes with time."""
    told = orjson.loads(record)
    told |= {"price": price, "discount": _DISCOUNTS[bits >> 12 & 255], "updatedAt": _told(moment)}
    told["diamond"]["availability"] = _AVAILABILITIES[bits >> 20 & 3]
    return orjson.dumps(told)


def pricing(prices: Prices) -> Callable[[int], int | None]:
    """What makes a price of a record's bits: one in 500 has none, one in 1,000 is 0."""
    spread: dict[Prices, Callable[[int], int]] = {
        Prices.HEAVY: _heavy(),
        Prices.EQUAL: lambda _: 500_000,
        Prices.UNIFORM: lambda bits: bits % 10_000_000,
    }
    usual = spread[prices]

    def price_of(bits: int) -> int | None:
        rare = bits >> 54
        if rare > 2:
            return usual(bits)
        return None if rare else 0

    return price_of


def _heavy() -> Callable[[int], int]:
    """Many cheap ones, few dear ones: log-normal, by a table of its quantiles."""
    normal = NormalDist()
    deviations = (normal.inv_cdf((step + 0.5) / (_STEPS + 1)) for step in range(_STEPS + 1))
    quantiles = [_LOWEST + int(_USUAL * exp(_SPREAD * one)) for one in deviations]
    cells = [(low, high - low) for low, high in pairwise(quantiles)]

    def price_of(bits: int) -> int:
        low, width = cells[bits & 4095]
        return low + (width * (bits >> 12 & 4095) >> 12)

    return price_of


def _told(moment: int) -> str:
    second, rest = divmod(moment, 1_000_000)
    return f"{_told_second(second)}.{rest:06d}Z"


@lru_cache(maxsize=16)
def _told_second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).replace(tzinfo=None).isoformat()
