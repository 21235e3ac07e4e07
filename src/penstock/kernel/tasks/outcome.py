"""The outcomes of a work item, as values instead of exceptions."""

from dataclasses import dataclass
from datetime import timedelta

from penstock.kernel.tasks.backoff import FIRST_DELAY, MAX_DELAY, compute_delay
from penstock.kernel.text import make_storable

_UNCOUNTED_ATTEMPT = 4  # an uncounted retry waits as after the fourth failure: not at once, but not long either
REASON_LIMIT = 2_000


@dataclass(frozen=True, slots=True)
class Done:
    """The item is finished; it is not delivered again."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The item is delivered again, after *after* or after the back-off of the queue.

    An uncounted retry is not caused by the item, e.g. a server is down: it is repeated without a limit.
    """

    reason: str
    after: timedelta | None = None
    counts: bool = True

    def wait(self, attempt: int, *, first: timedelta = FIRST_DELAY, limit: timedelta = MAX_DELAY) -> timedelta:
        """Return the delay before the next attempt, after *attempt* attempts. Uncounted retries have a fixed delay."""
        if self.after is not None:
            return self.after
        return compute_delay(attempt if self.counts else _UNCOUNTED_ATTEMPT, first=first, limit=limit)


@dataclass(frozen=True, slots=True)
class Failed:
    """A retry cannot help: the item is dead-lettered with the reason."""

    reason: str


Outcome = Done | Retry | Failed


def sanitize_reason(reason: str) -> str:
    """Return *reason* in a form that every database can store: a bad character must not block the item."""
    return make_storable(reason, REASON_LIMIT)
