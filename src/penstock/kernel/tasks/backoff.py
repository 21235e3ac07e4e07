"""Exponential back-off with jitter."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import random

FIRST_DELAY = timedelta(milliseconds=100)
MAX_DELAY = timedelta(seconds=30)

Sleep = Callable[[float], Awaitable[None]]  # asyncio.sleep, or its replacement in a test


@dataclass
class Backoff:
    """The delays after consecutive failures; `reset` after a success."""

    first: timedelta = FIRST_DELAY
    limit: timedelta = MAX_DELAY
    factor: float = 2.0
    _tries: int = field(default=0, init=False)

    def compute_next(self) -> timedelta:
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
    """Return the delay after failure number *attempt*: half of it random, so that many clients do not retry in step."""
    # Counted in seconds: a timedelta overflows long before the limit is applied to it.
    full = min(first.total_seconds() * factor ** min(attempt - 1, 60), limit.total_seconds())
    return timedelta(seconds=full / 2 + full / 2 * random())  # noqa: S311 - jitter, not secrecy
