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
Taken = tuple[str, int, int]  # filename, shard, fence


def open_tracking(db: Database) -> Tracking:
    return Tracking(db, Notifier(db, store.CHANNEL), TrackingSection(), TrackingMetrics(CollectorRegistry()))


def claim_and_report(url: str, worker: str, pipe: Connection) -> None:
    """Claim batches of any size and finish them until nothing is left; tell what was handed out."""
    pipe.send(asyncio.run(_drain(url, worker)))


def claim_and_hang(url: str, worker: str, limit: int, pipe: Connection) -> None:
    """Claim once, tell what was handed out, and wait to be killed."""
    pipe.send(asyncio.run(_take(url, worker, limit)))
    pause()


async def _drain(url: str, worker: str) -> list[Taken]:
    taken: list[Taken] = []
    async with Database.open(url, size=2) as db:
        tracking = open_tracking(db)
        while held := await tracking.claim(STAGE, worker, limit=random.randint(1, 100)):
            mine = [one[:3] for one in held]
            taken += mine
            results = await tracking.report(STAGE, [RowReport(*one, StageReportKind.DONE) for one in mine])
            assert {result.answer for result in results} == {"settled"}
    return taken


async def _take(url: str, worker: str, limit: int) -> list[Taken]:
    async with Database.open(url, size=2) as db:
        # So short that it has run out when the test looks: nobody has to wait for it.
        held = await open_tracking(db).claim(STAGE, worker, limit=limit, lease_for=timedelta(milliseconds=1))
        return [one[:3] for one in held]
