"""Ingest as it runs in the background: the watcher of all inboxes, and the periodic tasks in the database."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.ingest.config import IngestSection
from penstock.ingest.maintenance import make_periodic_tasks
from penstock.ingest.metrics import IngestMetrics
from penstock.ingest.watcher import InboxWatcher, WatchCommand
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.db.database import Database
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry


@asynccontextmanager
async def run_ingest(
    workspace: IngestWorkspace,
    section: IngestSection,
    command: WatchCommand,
    telemetry: Telemetry,
    db: Database | None,
) -> AsyncIterator[None]:
    """I23: watch the inboxes of *workspace* until the end; with *db*, also delete the rows of old runs."""
    watcher = InboxWatcher(section, workspace, command, IngestMetrics(telemetry.registry))
    async with AsyncExitStack() as stack:
        for task in make_periodic_tasks(section, db) if db is not None else ():
            await stack.enter_async_context(run_periodically(*task))
        await stack.enter_async_context(watcher.watch())
        yield
