"""The periodic tasks of ingest in the database. The watcher deletes the files of a tree."""

from collections.abc import Sequence
from datetime import timedelta

from penstock.ingest.config import IngestSection
from penstock.ingest.run import store
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.periodic import PeriodicTask

_BATCH = 1_000


def make_periodic_tasks(section: IngestSection, db: Database) -> Sequence[tuple[str, PeriodicTask, timedelta]]:
    """Return the periodic tasks, each with its name and its interval."""
    return [("ingest retention", lambda: delete_old_runs(section, db), timedelta(minutes=10))]


async def delete_old_runs(section: IngestSection, db: Database) -> None:
    """Delete the rows of runs whose files have expired too."""
    before = db.clock.now() - section.retention.runs
    deleted = _BATCH
    while deleted >= _BATCH:
        async with db.transaction() as tx:
            deleted = await store.prune(tx, before, _BATCH)
