"""What became of a piece of work: outcomes are values, not exceptions."""

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class Done:
    """The work is finished; it will not be handed out again."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Not now: hand it out again, after *after* or after the queue's own back-off."""

    reason: str
    after: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Trying again will not help; set it aside with the reason."""

    reason: str


Outcome = Done | Retry | Failed
