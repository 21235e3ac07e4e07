"""H10: before a full run deletes records, the changes since its start are fetched again.

A record that moves from an unread partition to a partition that was read before is missed by both. It has changed, so
it is among the changes since the start; all other records were in the partition where the run read them.
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

NAME = "late-changes"
_SLACK = 1_000


class LateChangesStopped(Exception):
    """The fetch must end: the process stops, or the run is not consolidating any more."""


async def fetch_late_changes(db: Database, feed: Feed, run: RunRow, stopping: asyncio.Event) -> bool:
    """Fetch the changes since the start of *run*; return whether the counts of the source prove that all were read."""
    if not feed.source.has_windows:
        return False
    changed = TimeWindow(after=run.upper_bound - feed.section.overlap)
    for scan in range(1, feed.section.limits.passes + 1):
        before = await feed.source.count(EVERYTHING, changed)
        received = await _fetch_pass(db, feed, run, changed, scan, before, stopping) if before else 0
        if before == received == await feed.source.count(EVERYTHING, changed):
            return True
    return False


async def _fetch_pass(
    db: Database, feed: Feed, run: RunRow, window: TimeWindow, scan: int, counted: int, stopping: asyncio.Event
) -> int:
    position, received = PagePosition(), 0
    while received <= 2 * counted + _SLACK:
        if stopping.is_set():
            raise LateChangesStopped
        page = await feed.source.fetch(EVERYTHING, window, position, feed.section.page_size)
        records, rejects = feed.reader.read(page.records)
        async with db.transaction() as tx:
            now = db.clock.now()
            # Under this lock no later run can start, so records that it sees are not marked as seen by this run.
            if await tx.fetchval(SQL["touch_consolidating"], run.run_id, now) is None:
                raise LateChangesStopped
            task = _make_task(run, scan, now)
            _, refused = await raw_store.store_records(tx, task, records, now)
            await raw_store.store_rejects(tx, task, [*rejects, *refused], now)
        received += len(page.records)
        if page.next is None:
            return received
        position = page.next
    raise SourceFailed(
        "SOURCE_PAGING_ENDLESS", f"{counted} records counted, {received} received, and the pages do not end"
    )


def _make_task(run: RunRow, scan: int, now: datetime) -> PartitionTask:
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
        received=0,
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
