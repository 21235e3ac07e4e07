"""H10: before anything is called gone, what changed while a full run was under way is fetched once more.

A record that moves from a partition not read yet to one read already is in neither when they are read. It changed, so
the source can be asked for it; all others were where the run looked for them.
"""

import asyncio
from datetime import datetime

from penstock.harvest.contract import HarvestRunState, HarvestRunType, PartitionState
from penstock.harvest.feed.feeds import Feed
from penstock.harvest.fetch import raw_store
from penstock.harvest.fetch.partitions import PartitionTask
from penstock.harvest.model import EVERYTHING, PagePosition, TimeWindow
from penstock.harvest.sources.port import SourceFailed
from penstock.harvest.store import SQL, RunRow
from penstock.kernel.db.database import Database

NAME = "sweep"
_SLACK = 1_000


class LateChangesStopped(Exception):
    """The sweep is not to go on: the process stops, or another has taken the run over."""


async def sweep(db: Database, feed: Feed, run: RunRow, stopping: asyncio.Event) -> bool:
    """Whether *run* has now seen all that changed while it was under way, as far as the source tells."""
    if not feed.source.has_windows:
        return False
    changed = TimeWindow(after=run.upper_bound - feed.section.overlap)
    for scan in range(1, feed.section.limits.passes + 1):
        before = await feed.source.count(EVERYTHING, changed)
        told = await _pass(db, feed, run, changed, scan, before, stopping) if before else 0
        if before == told == await feed.source.count(EVERYTHING, changed):
            return True
    return False


async def _pass(
    db: Database, feed: Feed, run: RunRow, window: TimeWindow, scan: int, counted: int, stopping: asyncio.Event
) -> int:
    position, told = PagePosition(), 0
    while told <= 2 * counted + _SLACK:
        if stopping.is_set():
            raise LateChangesStopped
        page = await feed.source.fetch(EVERYTHING, window, position, feed.section.page_size)
        found, rejects = feed.reader.read(page.records)
        async with db.transaction() as tx:
            now = db.clock.now()
            # Under this lock no later run can begin: what it has seen must not be called seen by this one.
            if await tx.fetchval(SQL["touch_consolidating"], run.run_id, now) is None:
                raise LateChangesStopped
            task = _task(run, scan, now)
            _, refused = await raw_store.keep(tx, task, found, now)
            await raw_store.reject(tx, task, [*rejects, *refused], now)
        told += len(page.records)
        if page.next is None:
            return told
        position = page.next
    raise SourceFailed("SOURCE_PAGING_ENDLESS", f"{counted} records counted, {told} given, and no end")


def _task(run: RunRow, scan: int, now: datetime) -> PartitionTask:
    return PartitionTask(
        run_id=run.run_id,
        partition_id=NAME,
        feed=run.feed,
        run_type=HarvestRunType.FULL,
        run_state=HarvestRunState.CONSOLIDATING,
        range=EVERYTHING,
        position=PagePosition(),
        scan=scan,
        scan_started_at=now,
        last_scan_at=None,
        counted=0,
        told=0,
        seen=0,
        missed=0,
        was_clean=False,
        completed=False,
        rescues=0,
        status=PartitionState.RUNNING,
        watermark_before=None,
        upper_bound=run.upper_bound,
        trace_id=run.trace_id,
    )
