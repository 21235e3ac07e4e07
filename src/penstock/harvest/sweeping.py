"""H10: before anything is called gone, what changed while a full run was under way is fetched once more.

A record that moves from a partition not read yet to one read already is in neither when they are read. It changed, so
the source can be asked for it; all others were where the run looked for them.
"""

from datetime import datetime

from penstock.harvest import records
from penstock.harvest.contract import PartitionState, RunState, RunType
from penstock.harvest.feeds import Feed
from penstock.harvest.model import ALWAYS, EVERYTHING, Position, Window
from penstock.harvest.store import RunRow, Task
from penstock.kernel.db import Database

NAME = "sweep"


async def sweep(db: Database, feed: Feed, run: RunRow) -> bool:
    """Whether all records that the source has are seen by *run* now, as far as can be known."""
    if not feed.source.has_windows:
        return await feed.source.count(EVERYTHING, ALWAYS) == await _seen(db, run)
    changed = Window(after=run.upper_bound - feed.section.overlap)
    for scan in range(1, feed.section.limits.passes + 1):
        before = await feed.source.count(EVERYTHING, changed)
        seen = await _pass(db, feed, run, changed, scan) if before else 0
        if before == seen == await feed.source.count(EVERYTHING, changed):
            return True
    return False


async def _pass(db: Database, feed: Feed, run: RunRow, window: Window, scan: int) -> int:
    position, seen = Position(), 0
    while True:
        page = await feed.source.fetch(EVERYTHING, window, position, feed.section.page_size)
        found, rejects = feed.reader.read(page.records)
        async with db.transaction() as tx:
            now = db.clock.now()
            kept, refused = await records.keep(tx, _task(run, scan, now), found, now)
            await records.reject(tx, run.feed, run.run_id, [*rejects, *refused], now)
        seen += kept.seen
        if page.next is None:
            return seen
        position = page.next


def _task(run: RunRow, scan: int, now: datetime) -> Task:
    return Task(
        run_id=run.run_id,
        partition_id=NAME,
        feed=run.feed,
        run_type=RunType.FULL,
        run_state=RunState.CONSOLIDATING,
        range=EVERYTHING,
        position=Position(),
        scan=scan,
        scan_started_at=now,
        last_scan_at=None,
        counted=0,
        seen=0,
        missed=0,
        completed=False,
        status=PartitionState.RUNNING,
        watermark_before=None,
        upper_bound=run.upper_bound,
        trace_id=run.trace_id,
    )


async def _seen(db: Database, run: RunRow) -> int:
    query = "SELECT count(*) FROM raw_record WHERE feed = $1 AND seen_run = $2"
    return int(await db.fetchval(query, run.feed, run.run_id))
