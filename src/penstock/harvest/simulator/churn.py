"""H17: records that change all the time, so that rows move between pages while somebody reads them."""

import asyncio
from typing import Annotated

import msgspec

from penstock.harvest.simulator.dataset import Dataset

TICK = 0.05
Speed = Annotated[float, msgspec.Meta(ge=0, le=100_000)]


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes a second."""

    updates: Speed = 0
    inserts: Speed = 0
    deletes: Speed = 0


STILL = Rates()


class Churn:
    """Changes a data set in the background, at rates that can be set at any time."""

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
        due = [have + rate * TICK for have, rate in zip(self._due, msgspec.structs.astuple(rates), strict=True)]
        whole = [int(one) for one in due]
        self._due = [have - now for have, now in zip(due, whole, strict=True)]
        self._dataset.change(*whole)
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)
