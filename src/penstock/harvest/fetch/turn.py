"""H4: a turn at a partition: some pages of its source, and the counts of the source at the end of a pass."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.harvest.contract import HarvestRunType
from penstock.harvest.feed.feeds import Feed
from penstock.harvest.fetch.completeness import PassEnding
from penstock.harvest.fetch.partitions import PartitionTask
from penstock.harvest.model import ALWAYS, PagePosition, RecordPage, TimeWindow
from penstock.harvest.sources.port import SourceFailed


@dataclass(slots=True)
class FetchTurn:
    """Pages from *begin* on. *ending* is set at the end of a pass, *failure* if the source failed before it."""

    begin: PagePosition
    pages: list[RecordPage] = field(default_factory=list)
    ending: PassEnding | None = None
    failure: SourceFailed | None = None

    @property
    def position(self) -> PagePosition:
        """The start of the next turn."""
        if not self.pages:
            return self.begin
        return self.pages[-1].next or PagePosition(self.begin.offset + sum(len(page.records) for page in self.pages))

    @property
    def raws(self) -> list[bytes]:
        return [record for page in self.pages for record in page.records]

    @property
    def is_at_end(self) -> bool:
        return bool(self.pages) and self.pages[-1].next is None

    @property
    def has_progress(self) -> bool:
        return bool(self.pages)


def make_window(task: PartitionTask) -> TimeWindow:
    """H9: return the window of all records for a full run, and up to the upper bound for an incremental one."""
    return ALWAYS if task.run_type is HarvestRunType.FULL else TimeWindow(task.watermark_before, task.upper_bound)


async def take_turn(feed: Feed, task: PartitionTask, stopping: asyncio.Event) -> FetchTurn:
    """Fetch the next pages of a partition. Pages before a failure are part of the turn."""
    turn = FetchTurn(task.position)
    try:
        if feed.source.is_seekable:
            await _fetch_concurrently(feed, task, turn)
        else:
            await _fetch_by_cursor(feed, task, turn, stopping)
        if turn.is_at_end:
            turn.ending = await _recount(feed, task)
    except SourceFailed as failure:
        turn.failure = failure
        if turn.is_at_end:
            turn.pages.pop()  # without the counts, the last page is fetched again
    return turn


async def _fetch_concurrently(feed: Feed, task: PartitionTask, turn: FetchTurn) -> None:
    """Fetch pages concurrently, from a source with offsets."""
    size, begin = feed.section.page_size, task.position.offset
    left = max(task.counted - begin, 0)
    # One page more than the count requires: the empty page that proves the end.
    count = min(-(-left // size) + 1, feed.section.pages_per_turn)
    positions = [PagePosition(begin + number * size) for number in range(count)]
    requests = (feed.source.fetch(task.range, make_window(task), position, size) for position in positions)
    _append_in_order(turn, positions, await asyncio.gather(*requests, return_exceptions=True))


def _append_in_order(
    turn: FetchTurn, positions: Sequence[PagePosition], results: Sequence[RecordPage | BaseException]
) -> None:
    """Append pages up to the first failed or short one: the pages after a short one start at a wrong offset."""
    for position, result in zip(positions, results, strict=True):
        if position != turn.position or turn.is_at_end:
            return
        if isinstance(result, BaseException):
            raise result
        turn.pages.append(result)


async def _fetch_by_cursor(feed: Feed, task: PartitionTask, turn: FetchTurn, stopping: asyncio.Event) -> None:
    """Fetch pages one after another, each by the cursor of the page before."""
    while len(turn.pages) < feed.section.pages_per_turn and not turn.is_at_end and not stopping.is_set():
        page = await feed.source.fetch(task.range, make_window(task), turn.position, feed.section.page_size)
        turn.pages.append(page)


async def _recount(feed: Feed, task: PartitionTask) -> PassEnding:
    """H16: count again. Records that leave a past window do not return, so only a full run needs the changes."""
    source = feed.source
    count = await source.count(task.range, make_window(task))
    if task.run_type is HarvestRunType.INCREMENTAL or not source.has_windows:
        return PassEnding(count, 0)
    # The clock of the source may be behind.
    since = task.scan_started_at - feed.section.overlap
    return PassEnding(count, await source.count(task.range, TimeWindow(after=since)))
