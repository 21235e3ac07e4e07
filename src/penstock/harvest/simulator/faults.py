"""H17: how the local source fails, by rates and a seeded generator: the same requests fail in every run."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Annotated

import msgspec

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class Kind(StrEnum):
    """What can go wrong with a request."""

    THROTTLED = "429"
    ERROR = "500"
    TIMEOUT = "timeout"
    SHORT = "short"
    GARBAGE = "garbage"
    CUT = "cut"


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How slow and how bad the source is. A time-out never ends, unless it is told `timeout_for` how many seconds."""

    latency_ms: Amount = 0
    rate_429: Rate = 0
    retry_after: Amount = 1
    rate_500: Rate = 0
    rate_timeout: Rate = 0
    timeout_for: Amount | None = None
    rate_short: Rate = 0
    rate_garbage: Rate = 0
    rate_cut: Rate = 0


NO_FAULTS = Faults()


@dataclass(frozen=True, slots=True)
class Fault:
    """One that was dealt; *share* says how much of a short page is left."""

    kind: Kind
    share: float


class Dealer:
    """Deals faults to requests, at most one to each, and counts those that were given."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._seed = seed
        self.given: Counter[Kind] = Counter()
        self.set(faults)

    def set(self, faults: Faults) -> None:
        """Fail as *faults* say from now on, beginning with the first throw of the dice."""
        self.faults = faults
        self._random = Random(self._seed)  # noqa: S311 - repeatable on purpose
        rates = ((kind, getattr(faults, f"rate_{kind.value}")) for kind in Kind)
        self._rates = [(kind, rate) for kind, rate in rates if rate > 0]

    def deal(self) -> Fault | None:
        for kind, rate in self._rates:
            if self._random.random() < rate:
                return Fault(kind, self._random.random())
        return None

    def left_of(self, rows: int, fault: Fault | None) -> int:
        """How many of a page's rows are sent: a short page has one at least, and one less than it could."""
        if fault is None or fault.kind is not Kind.SHORT or rows < 2:
            return rows
        self.given[Kind.SHORT] += 1
        return 1 + int(fault.share * (rows - 1))
