"""H4: one turn at a partition: some pages of its source, and at its end what the source says of it."""

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
    """What was fetched from *begin* on. *ending* is there at the end, *failure* when the source gave out before it."""

    begin: PagePosition
    pages: list[RecordPage] = field(default_factory=list)
    ending: PassEnding | None = None
    failure: SourceFailed | None = None

    @property
    def position(self) -> PagePosition:
        """Where the next turn begins."""
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


def window(task: PartitionTask) -> TimeWindow:
    """H9: a full run takes all there is, an incremental one what changed up to its upper bound."""
    return ALWAYS if task.run_type is HarvestRunType.FULL else TimeWindow(task.watermark_before, task.upper_bound)


async def take_turn(feed: Feed, task: PartitionTask, stopping: asyncio.Event) -> FetchTurn:
    """Fetch the next pages of a partition; whatever the source does, what it gave is kept."""
    turn = FetchTurn(task.position)
    try:
        if feed.source.is_seekable:
            await _seek(feed, task, turn)
        else:
            await _follow(feed, task, turn, stopping)
        if turn.is_at_end:
            turn.ending = await _ending(feed, task)
    except SourceFailed as failure:
        turn.failure = failure
        if turn.is_at_end:
            turn.pages.pop()  # an end that cannot be judged is fetched again
    return turn


async def _seek(feed: Feed, task: PartitionTask, turn: FetchTurn) -> None:
    """Pages side by side, where any offset can be asked for."""
    size, begin = feed.section.page_size, task.position.offset
    left = max(task.counted - begin, 0)
    # One more than is needed for what was counted: the empty page that says it is the end.
    count = min(-(-left // size) + 1, feed.section.pages_per_turn)
    asked = [PagePosition(begin + number * size) for number in range(count)]
    requests = (feed.source.fetch(task.range, window(task), one, size) for one in asked)
    _in_order(turn, asked, await asyncio.gather(*requests, return_exceptions=True))


def _in_order(turn: FetchTurn, asked: Sequence[PagePosition], answers: Sequence[RecordPage | BaseException]) -> None:
    """Take pages up to the first that failed or is short: what follows a short one is not where it was asked for."""
    for position, answer in zip(asked, answers, strict=True):
        if position != turn.position or turn.is_at_end:
            return
        if isinstance(answer, BaseException):
            raise answer
        turn.pages.append(answer)


async def _follow(feed: Feed, task: PartitionTask, turn: FetchTurn, stopping: asyncio.Event) -> None:
    """Pages one after another, each by the cursor the last one gave."""
    while len(turn.pages) < feed.section.pages_per_turn and not turn.is_at_end and not stopping.is_set():
        page = await feed.source.fetch(task.range, window(task), turn.position, feed.section.page_size)
        turn.pages.append(page)


async def _ending(feed: Feed, task: PartitionTask) -> PassEnding:
    """H16: the recount. What leaves a window of the past cannot come back, so only a full run can change unnoticed."""
    source = feed.source
    count = await source.count(task.range, window(task))
    if task.run_type is HarvestRunType.INCREMENTAL or not source.has_windows:
        return PassEnding(count, 0)
    # The source's clock may be behind ours.
    since = task.scan_started_at - feed.section.overlap
    return PassEnding(count, await source.count(task.range, TimeWindow(after=since)))
