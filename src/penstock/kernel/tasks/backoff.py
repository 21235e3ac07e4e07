"""Waiting longer after each failure, with jitter, up to a limit."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import random

FIRST_DELAY = timedelta(milliseconds=100)
MAX_DELAY = timedelta(seconds=30)

Sleep = Callable[[float], Awaitable[None]]  # asyncio.sleep, or what a test waits with


@dataclass
class Backoff:
    """Gives the next delay; `reset` when things work again."""

    first: timedelta = FIRST_DELAY
    limit: timedelta = MAX_DELAY
    factor: float = 2.0
    _tries: int = field(default=0, init=False)

    def next(self) -> timedelta:
        self._tries += 1
        return compute_delay(self._tries, first=self.first, limit=self.limit, factor=self.factor)

    def reset(self) -> None:
        self._tries = 0


def compute_delay(
    attempt: int,
    *,
    first: timedelta = FIRST_DELAY,
    limit: timedelta = MAX_DELAY,
    factor: float = 2.0,
) -> timedelta:
    """How long to wait after failure number *attempt*: half of it sure, half of it chance, so that crowds part."""
    # Counted in seconds: a timedelta overflows long before the limit is applied to it.
    full = min(first.total_seconds() * factor ** min(attempt - 1, 60), limit.total_seconds())
    return timedelta(seconds=full / 2 + full / 2 * random())  # noqa: S311 - chance, not secrecy
