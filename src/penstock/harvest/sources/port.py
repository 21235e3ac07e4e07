"""H14: the port of sources, and the failures of a source."""

from datetime import timedelta
from typing import Protocol

from penstock.harvest.model import PagePosition, PartitionRange, RecordPage, TimeWindow

INVALID_RESPONSE = "SOURCE_INVALID_RESPONSE"


class HarvestSource(Protocol):
    """A paged API. Every call is one request, limited together with all other requests of the feed (H15)."""

    is_seekable: bool  # whether any offset can be fetched; otherwise each page needs the cursor of the page before
    has_windows: bool  # whether records can be filtered by their time of change

    async def count(self, range_: PartitionRange, window: TimeWindow) -> int:
        """Return the number of records in *range_* that changed in *window*."""

    async def fetch(self, range_: PartitionRange, window: TimeWindow, position: PagePosition, limit: int) -> RecordPage:
        """Return up to *limit* records at *position*, in an order that changes only if records change."""


class SourceFailed(Exception):
    """The source did not respond, or sent an invalid response. A retry may help."""

    def __init__(self, code: str, message: str, *, after: timedelta | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.after = after  # the delay before a useful retry, if known


class SourcePaused(SourceFailed):
    """The source requested a pause (429). It does not count as a failure."""


class SourceRefused(SourceFailed):
    """The source rejects the request, e.g. because of a wrong password. A retry does not help."""
