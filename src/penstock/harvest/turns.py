"""H4, H16: one turn at a partition: some pages of its source, and at its end the question whether it held still."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.harvest.contract import RunType
from penstock.harvest.feeds import Feed
from penstock.harvest.model import ALWAYS, Page, Position, Window
from penstock.harvest.source import SourceFailed
from penstock.harvest.store import Task


@dataclass(frozen=True, slots=True)
class Ending:
    """What the source says when a pass is at its end: how many records there are, and how many changed meanwhile."""

    count: int
    changed: int


@dataclass(slots=True)
class Turn:
    """What was fetched from *begin* on, up to *position*.

    *ending* is there when the end was reached, *failure* when the source gave out before.
    """

    begin: Position
    position: Position
    raws: list[bytes] = field(default_factory=list)
    pages: int = 0
    ending: Ending | None = None
    failure: SourceFailed | None = None

    @property
    def has_progress(self) -> bool:
        # The empty page at the end is none: a source that gives it and does not count would be asked for it forever.
        return self.position != self.begin or self.ending is not None


def window(run_type: RunType, task: Task) -> Window:
    """H9: a full run takes all there is, an incremental one what changed up to its upper bound."""
    return ALWAYS if run_type is RunType.FULL else Window(task.watermark_before, task.upper_bound)


async def take_turn(feed: Feed, task: Task, stopping: asyncio.Event) -> Turn:
    """Fetch the next pages of a partition; whatever the source does, what it gave is kept."""
    turn = Turn(task.position, task.position)
    try:
        fetch = _seek if feed.source.is_seekable else _follow
        if await fetch(feed, task, turn, stopping):
            turn.ending = await _ending(feed, task)
    except SourceFailed as failure:
        turn.failure = failure
    return turn


async def _seek(feed: Feed, task: Task, turn: Turn, _stopping: asyncio.Event) -> bool:
    """Pages side by side, where any offset can be asked for; whether the end was reached."""
    size, begin = feed.section.page_size, task.position.offset
    left = max(task.counted - begin, 0)
    # One more than is needed for what was counted: the empty page that says it is the end.
    count = min(-(-left // size) + 1, feed.section.pages_per_turn)
    asked = [Position(begin + number * size) for number in range(count)]
    requests = (feed.source.fetch(task.range, window(task.run_type, task), one, size) for one in asked)
    answers = await asyncio.gather(*requests, return_exceptions=True)
    return _in_order(turn, asked, answers)


def _in_order(turn: Turn, asked: Sequence[Position], answers: Sequence[Page | BaseException]) -> bool:
    """Take pages up to the first that failed or is short: what follows a short one is not where it was asked for."""
    for position, answer in zip(asked, answers, strict=True):
        if position != turn.position:
            return False
        if isinstance(answer, BaseException):
            raise answer
        if _take(turn, answer):
            return True
    return False


async def _follow(feed: Feed, task: Task, turn: Turn, stopping: asyncio.Event) -> bool:
    """Pages one after another, each by the cursor the last one gave."""
    while turn.pages < feed.section.pages_per_turn and not stopping.is_set():
        asked = window(task.run_type, task)
        page = await feed.source.fetch(task.range, asked, turn.position, feed.section.page_size)
        if _take(turn, page):
            return True
    return False


def _take(turn: Turn, page: Page) -> bool:
    turn.raws.extend(page.records)
    turn.pages += 1
    turn.position = page.next or Position(turn.position.offset + len(page.records))
    return page.next is None


async def _ending(feed: Feed, task: Task) -> Ending:
    """H16: the recount. What leaves a window of the past cannot come back, so only a full run can change unnoticed."""
    source = feed.source
    count = await source.count(task.range, window(task.run_type, task))
    if task.run_type is RunType.INCREMENTAL or not source.has_windows:
        return Ending(count, 0)
    return Ending(count, await source.count(task.range, Window(after=task.scan_started_at)))
