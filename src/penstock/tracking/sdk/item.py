"""One row to work on, as a daemon's loop sees it."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.kernel.tasks.backoff import compute_delay
from penstock.kernel.tasks.outcome import clean_reason
from penstock.tracking.client import RowResult
from penstock.tracking.contract import DELAY_LIMIT, StageReportKind


@dataclass(eq=False)
class Item:
    """One row to work on, held for this daemon until it is ended or lost."""

    filename: str
    shard: int
    attempt: int
    fence: int
    _end: Callable[["Item", RowResult], None] = field(repr=False)
    is_ended: bool = False
    is_lost: bool = False  # somebody else may have it by now: stop working on it

    def done(self) -> None:
        """The work is finished."""
        self._say(StageReportKind.DONE)

    def fail(self, error: str) -> None:
        """It cannot be done; it stays failed until somebody retries it."""
        self._say(StageReportKind.FAILED, error)

    def retry(self, error: str, *, after: float | None = None) -> None:
        """Not now: hand it out again, after so many seconds or after a while that grows with its attempts."""
        seconds = compute_delay(self.attempt).total_seconds() if after is None else after
        self._say(StageReportKind.RETRY, error, seconds)

    def release(self, error: str | None = None, *, after: float | None = None) -> None:
        """Not begun, or not its own fault: hand it out again, as if it had never been claimed; costs no attempt."""
        self._say(StageReportKind.RELEASE, error, after)

    def ended_from(self, loop: asyncio.AbstractEventLoop, thread: int | None) -> "Item":
        """The item, for another thread than that of *loop*."""
        end = self._end

        def hand_over(item: Item, how: RowResult) -> None:
            if threading.get_ident() == thread:
                end(item, how)
            else:
                loop.call_soon_threadsafe(end, item, how)

        self._end = hand_over
        return self

    def _say(self, outcome: StageReportKind, error: str | None = None, after: float | None = None) -> None:
        if not self.is_ended:
            self.is_ended = True
            said = clean_reason(error) if error else None
            wait = None if after is None else min(max(after, 0.0), DELAY_LIMIT)
            self._end(self, RowResult(self.filename, self.shard, self.fence, outcome, said, wait))
