"""H14: the source port, and how a source can fail."""

from datetime import timedelta
from typing import Protocol

from penstock.harvest.model import PagePosition, PartitionRange, RecordPage, TimeWindow


class HarvestSource(Protocol):
    """A paged API. Every call is one request, throttled together with all others of the feed (H15)."""

    is_seekable: bool  # whether any offset can be fetched; else pages come one after another, each by its cursor
    has_windows: bool  # whether it can be asked for what changed

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        """How many records there are in *range_* that changed in *window*."""

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        """Up to *limit* records at *position*, in an order that changes only when records do."""


class SourceFailed(Exception):
    """The source did not answer, or not with what was asked for; trying again may help."""

    def __init__(self, code: str, message: str, *, after: timedelta | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.after = after  # when it is worth trying again, where that is known


class SourcePaused(SourceFailed):
    """The source asked for a pause (429): nobody's failure, it does not count."""


class SourceRefused(SourceFailed):
    """The source will not answer this, however often it is asked: a wrong password, a request it does not know."""
