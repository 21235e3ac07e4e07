"""What of tracking is found late or broken."""

from datetime import timedelta

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.tracking import status as tracking
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking
from tests.support.status import issue_tuples

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
WORKER = Stage.SHARD_SPLITTER


async def test_shards_that_wait_too_long(database_url: str, clock: ManualClock) -> None:
    """T16: a queue nobody takes from is late; a stage that is paused says so in its place."""
    metrics = TrackingMetrics(Telemetry().registry)
    async with (
        Database.open(database_url, clock=clock) as db,
        Tracking.open(db, TrackingSection(), metrics) as pipeline,
    ):
        assert issue_tuples(await tracking.report_status(pipeline)) == []
        await pipeline.register("f", [0, 1], worker=None, actor="test")
        await pipeline.move(Stage.EVENT_INGEST, "done", "f", None, worker=None, actor="test")
        clock.advance(tracking.WAITS_TOO_LONG)
        assert issue_tuples(await tracking.report_status(pipeline)) == []
        clock.advance(MINUTE)
        waits = "2 shards waiting, the oldest for 11 minutes"
        assert issue_tuples(await tracking.report_status(pipeline)) == [("LATE", WORKER, waits)]
        await pipeline.pause(WORKER, actor="ann", reason="a bad release")
        clock.advance(2 * HOUR)
        paused = "paused for 2 hours by ann: a bad release"
        assert issue_tuples(await tracking.report_status(pipeline)) == [("LATE", WORKER, paused)]
        assert (await tracking.report_status(pipeline)).summary == "2 shards: 0 done, 0 under way, 0 failed"
