"""The running tracking part: the service on its database, with its periodic tasks."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from penstock.kernel.db.database import Database
from penstock.kernel.tasks.periodic import run_periodically
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.tracking.config import TrackingSection
from penstock.tracking.maintenance import list_periodic_tasks
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking


@asynccontextmanager
async def run_tracking(db: Database, section: TrackingSection, telemetry: Telemetry) -> AsyncIterator[Tracking]:
    """Open tracking on *db*, whose tables are up to date, and run its periodic tasks until the end."""
    async with AsyncExitStack() as stack:
        opened = Tracking.open(db, section, TrackingMetrics(telemetry.registry))
        tracking = await stack.enter_async_context(opened)
        for task in list_periodic_tasks(tracking):
            await stack.enter_async_context(run_periodically(*task))
        yield tracking
