"""A claimed row, as the loop of a daemon receives it."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.kernel.tasks.backoff import compute_delay
from penstock.kernel.tasks.outcome import sanitize_reason
from penstock.tracking.client import RowResult
from penstock.tracking.contract import DELAY_LIMIT, StageReportKind


@dataclass(eq=False)
class Item:
    """A row that this daemon has claimed, until it is ended or lost."""

    filename: str
    shard: int
    attempt: int
    fence: int
    _end: Callable[["Item", RowResult], None] = field(repr=False)
    is_ended: bool = False
    is_lost: bool = False  # another worker may have claimed it: stop working on it

    def done(self) -> None:
        """Report that the work is finished."""
        self._report(StageReportKind.DONE)

    def fail(self, error: str) -> None:
        """Report that the item cannot be processed; it stays failed until an operator retries it."""
        self._report(StageReportKind.FAILED, error)

    def retry(self, error: str, *, after: float | None = None) -> None:
        """Return the item to the queue for a later attempt, after *after* seconds or a delay that grows per attempt."""
        seconds = compute_delay(self.attempt).total_seconds() if after is None else after
        self._report(StageReportKind.RETRY, error, seconds)

    def release(self, error: str | None = None, *, after: float | None = None) -> None:
        """Return the item to the queue without costing an attempt, e.g. at a stop or when a database is down."""
        self._report(StageReportKind.RELEASE, error, after)

    def make_thread_safe(self, loop: asyncio.AbstractEventLoop, thread: int | None) -> "Item":
        """Return the item for use outside *thread*, in which *loop* runs."""
        end = self._end

        def end_in_loop(item: Item, result: RowResult) -> None:
            if threading.get_ident() == thread:
                end(item, result)
            else:
                loop.call_soon_threadsafe(end, item, result)

        self._end = end_in_loop
        return self

    def _report(self, outcome: StageReportKind, error: str | None = None, after: float | None = None) -> None:
        if not self.is_ended:
            self.is_ended = True
            text = sanitize_reason(error) if error else None
            wait = None if after is None else min(max(after, 0.0), DELAY_LIMIT)
            self._end(self, RowResult(self.filename, self.shard, self.fence, outcome, text, wait))
