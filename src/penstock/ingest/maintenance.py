"""Periodic tasks of ingest in the database. The files of a tree are removed by the watcher."""

from collections.abc import Sequence
from datetime import timedelta

from penstock.ingest.config import IngestSection
from penstock.ingest.run import store
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.periodic import PeriodicTask

_AT_ONCE = 1_000


def chores(section: IngestSection, db: Database) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
    """Return the periodic tasks, each with its name and its interval."""
    return [("ingest retention", lambda: forget_old_runs(section, db), timedelta(minutes=10))]


async def forget_old_runs(section: IngestSection, db: Database) -> None:
    """Delete the rows of runs whose files are removed by then."""
    before = db.clock.now() - section.retention.runs
    forgotten = _AT_ONCE
    while forgotten >= _AT_ONCE:
        async with db.transaction() as tx:
            forgotten = await store.prune(tx, before, _AT_ONCE)
