"""H17: faults and background changes of the simulator. A seed makes the same requests fail in every run."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Annotated

import msgspec

from penstock.harvest.simulator.dataset import Dataset

TICK = 0.05
Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Speed = Annotated[float, msgspec.Meta(ge=0, le=100_000)]


class FaultKind(StrEnum):
    """Kind of fault of one request."""

    THROTTLED = "429"
    ERROR = "500"
    TIMEOUT = "timeout"
    SHORT = "short"
    GARBAGE = "garbage"
    CUT = "cut"


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Latency and rates of faults. A time-out never ends unless `timeout_for` states the seconds."""

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
    """Fault of one request. *share* is the part of a short page that is sent."""

    kind: FaultKind
    share: float


class FaultInjector:
    """Assigns at most one fault to each request, and counts the faults that took effect."""

    def __init__(self, faults: Faults, seed: int) -> None:
        self._seed = seed
        self.injected: Counter[FaultKind] = Counter()
        self.set(faults)

    def set(self, faults: Faults) -> None:
        """Apply *faults* from now on, and restart the random sequence."""
        self.faults = faults
        self._random = Random(self._seed)  # noqa: S311 - repeatable on purpose
        rates = ((kind, getattr(faults, f"rate_{kind.value}")) for kind in FaultKind)
        self._rates = [(kind, rate) for kind, rate in rates if rate > 0]

    def inject(self) -> Fault | None:
        for kind, rate in self._rates:
            if self._random.random() < rate:
                return Fault(kind, self._random.random())
        return None

    def count_rows(self, rows: int, fault: Fault | None) -> int:
        """Return the number of rows to send: a short page lacks at least one row, and has at least one."""
        if fault is None or fault.kind is not FaultKind.SHORT or rows < 2:
            return rows
        self.injected[FaultKind.SHORT] += 1
        return 1 + int(fault.share * (rows - 1))


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes per second."""

    updates: Speed = 0
    inserts: Speed = 0
    deletes: Speed = 0


STILL = Rates()


class Churn:
    """Changes a dataset in the background, so that rows move between pages while a client reads them."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.rates = STILL
        self._due = [0.0, 0.0, 0.0]
        self._timer: asyncio.TimerHandle | None = None

    def set(self, rates: Rates) -> None:
        self.stop()
        self.rates = rates
        if rates != STILL:
            self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.rates = None, STILL

    def _tick(self) -> None:
        rates = self.rates
        due = [rest + rate * TICK for rest, rate in zip(self._due, msgspec.structs.astuple(rates), strict=True)]
        changes = [int(number) for number in due]
        self._due = [number - change for number, change in zip(due, changes, strict=True)]
        self._dataset.change_records(*changes)
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
