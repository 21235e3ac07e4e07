"""Claim rows in a forked process, for tests that kill it."""

import asyncio
import random
from datetime import timedelta
from multiprocessing.connection import Connection
from signal import pause

from prometheus_client import CollectorRegistry

from penstock.kernel.db.database import Database
from penstock.kernel.db.notifier import Notifier
from penstock.tracking import store
from penstock.tracking.config import TrackingSection
from penstock.tracking.contract import Stage, StageReportKind
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.model import RowReport
from penstock.tracking.service import Tracking

STAGE = Stage.SHARD_SPLITTER
ClaimedKey = tuple[str, int, int]  # filename, shard, fence


def open_tracking(db: Database) -> Tracking:
    """Return tracking on *db*, without its periodic tasks."""
    return Tracking(db, Notifier(db, store.CHANNEL), TrackingSection(), TrackingMetrics(CollectorRegistry()))


def claim_and_report(url: str, worker: str, pipe: Connection) -> None:
    """Claim batches of random size and finish them until the queue is empty; send all claimed rows."""
    pipe.send(asyncio.run(_drain(url, worker)))


def claim_and_hang(url: str, worker: str, limit: int, pipe: Connection) -> None:
    """Claim once, send the claimed rows, and wait to be killed."""
    pipe.send(asyncio.run(_take(url, worker, limit)))
    pause()


async def _drain(url: str, worker: str) -> list[ClaimedKey]:
    claimed: list[ClaimedKey] = []
    async with Database.open(url, size=2) as db:
        tracking = open_tracking(db)
        while rows := await tracking.claim(STAGE, worker, limit=random.randint(1, 100)):
            keys = [row[:3] for row in rows]
            claimed += keys
            results = await tracking.report(STAGE, [RowReport(*key, StageReportKind.DONE) for key in keys])
            assert {result.answer for result in results} == {"settled"}
    return claimed


async def _take(url: str, worker: str, limit: int) -> list[ClaimedKey]:
    async with Database.open(url, size=2) as db:
        # A lease so short that it has expired when the test reaps: the test need not wait.
        rows = await open_tracking(db).claim(STAGE, worker, limit=limit, lease_for=timedelta(milliseconds=1))
        return [row[:3] for row in rows]
