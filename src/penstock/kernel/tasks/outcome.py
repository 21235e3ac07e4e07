"""What became of a piece of work: outcomes are values, not exceptions."""

from dataclasses import dataclass
from datetime import timedelta

from penstock.kernel.tasks.backoff import FIRST_DELAY, MAX_DELAY, compute_delay
from penstock.kernel.text import make_storable

_UNCOUNTED = 4  # waits as after the fourth failure: not at once, and not long after the trouble is over
REASON_LIMIT = 2_000


@dataclass(frozen=True, slots=True)
class Done:
    """The work is finished; it will not be handed out again."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Not now: hand it out again, after *after* or after the queue's own back-off.

    One that does not count is nobody's fault here (a server is down): it is tried again for as long as it takes.
    """

    reason: str
    after: timedelta | None = None
    counts: bool = True

    def wait(self, attempt: int, *, first: timedelta = FIRST_DELAY, limit: timedelta = MAX_DELAY) -> timedelta:
        """How long until the next try, after *attempt* of them. What does not count has no number to grow with."""
        if self.after is not None:
            return self.after
        return compute_delay(attempt if self.counts else _UNCOUNTED, first=first, limit=limit)


@dataclass(frozen=True, slots=True)
class Failed:
    """Trying again will not help; set it aside with the reason."""

    reason: str


Outcome = Done | Retry | Failed


def clean_reason(reason: str) -> str:
    """*reason* as every store can keep it: whatever a handler said, its work must not be stuck for it."""
    return make_storable(reason, REASON_LIMIT)
