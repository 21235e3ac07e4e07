"""A stepper: it advances a harvest one message at a time, so that a test can check every state."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
from prometheus_client import CollectorRegistry

from penstock.app.bridges import renew_dictionaries
from penstock.harvest import contract
from penstock.harvest.config import HarvestSection
from penstock.harvest.consolidate.worker import Consolidator
from penstock.harvest.feed.feeds import FeedRegistry
from penstock.harvest.fetch.worker import ATTEMPTS, Fetcher
from penstock.harvest.maintenance import RunRescuer
from penstock.harvest.metrics import HarvestMetrics
from penstock.harvest.plan.planner import Planner
from penstock.harvest.service import Harvest
from penstock.harvest.simulator.server import LocalOptions, LocalSource, run_local_source
from penstock.kernel.bus import BusDelivery, BusMessage, DeliveryPolicy
from penstock.kernel.bus.postgres import PostgresBus
from penstock.kernel.db.database import Database
from penstock.kernel.storage.folder import FolderStorage
from penstock.kernel.tasks.outcome import Outcome
from penstock.kernel.work.worker import run_to_outcome

FEED = "stones"


def feed(url: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of a feed over the simulator, with small partitions."""
    source = {"kind": "rest", "url": url, "path": "/records", "count_path": "/records/count"}
    call = {"attempts": 1, "timeout": 5, "break_after": 1_000_000}
    return {
        "source": {**source, "call": {**call, **changes.pop("call", {})}},
        "key": "id",
        "updated_at": "updatedAt",
        "overlap": 0,
        "pages_per_turn": 2,
        "partitions": {"min_records": 50, "count": 4},
        "fields": {
            "shape": {"path": "diamond.certificate.shape", "required": True},
            "carat": {"path": "diamond.certificate.carats", "type": "decimal"},
        },
        "cost": {"path": "price", "decimals": 2},
        "pricing": {"rules": [{"name": "all", "markup_percent": 10}]},
        **changes,
    }


@dataclass
class HarvestStepper:
    """The workers of a harvest. Nothing runs automatically."""

    db: Database
    bus: PostgresBus
    storage: FolderStorage
    source: LocalSource
    section: HarvestSection
    harvest: Harvest
    planner: Planner
    fetcher: Fetcher
    consolidator: Consolidator
    rescuer: RunRescuer

    async def deliver(self, topic: str, *, limit: int = 1) -> list[Outcome | None]:
        """Handle and settle up to *limit* messages of a topic, and return their outcomes."""
        handle = self._handlers()[topic]
        policy = DeliveryPolicy(max_attempts=ATTEMPTS)
        async with self.bus.subscribe(topic, worker="stepper", policy=policy) as queue:
            # Delayed messages are due now.
            await self.db.execute("UPDATE bus_partition SET due_at = '-infinity' WHERE topic = $1", topic)
            deliveries = list(await queue.take(limit))
            outcomes: list[Outcome | None] = [await run_to_outcome(handle(delivery)) for delivery in deliveries]
            await queue.settle(list(zip(deliveries, outcomes, strict=True)))
        return outcomes

    async def drain(self, topic: str) -> None:
        """Handle messages of a topic until it has none."""
        while await self.deliver(topic, limit=8):
            pass

    async def finish(self) -> None:
        """Handle all messages of all topics."""
        for topic in (contract.PLANS, contract.WORK_ITEMS, contract.CONSOLIDATIONS):
            await self.drain(topic)

    async def plan_run(self, *, full: bool = False) -> UUID:
        """Plan a run, and return its id."""
        run_id = await self.harvest.start(FEED, "test", full=full)
        await self.drain(contract.PLANS)
        return run_id

    async def run(self, run_id: UUID) -> asyncpg.Record:
        row = await self.db.fetchrow("SELECT * FROM run_metadata WHERE run_id = $1", run_id)
        assert row is not None
        return row

    async def read_canonical(self) -> dict[str, asyncpg.Record]:
        """Return the live canonical records by key."""
        rows = await self.db.fetch("SELECT * FROM canonical_record WHERE feed = $1 AND deleted_at IS NULL", FEED)
        return {row["key"]: row for row in rows}

    def _handlers(self) -> dict[str, Callable[[BusDelivery], Awaitable[Outcome]]]:
        return {
            contract.PLANS: self.planner.handle,
            contract.WORK_ITEMS: self.fetcher.handle,
            contract.CONSOLIDATIONS: self.consolidator.handle,
        }

    async def republish(self, message: BusMessage) -> None:
        """Publish a message again."""
        await self.bus.publish([message])


@asynccontextmanager
async def harvest_stepper(
    url: str, folder: Path, *, records: int = 200, options: LocalOptions | None = None, **changes: Any
) -> AsyncIterator[HarvestStepper]:
    """Open a stepper over a simulator with *records*, on the database at *url*, with *changes* of the feed."""
    async with (
        run_local_source(options or LocalOptions(records=records)) as source,
        Database.open(url, prefers_indexes=True) as db,
    ):
        section = HarvestSection.model_validate({"feeds": {FEED: feed(source.url, **changes)}})
        bus, storage = PostgresBus(db), FolderStorage(folder)
        async with FeedRegistry.open(section, db) as feeds:
            metrics = HarvestMetrics(CollectorRegistry())
            on_published = renew_dictionaries(section, db.clock)
            planner, fetcher = Planner(db, bus, feeds, "stepper"), Fetcher(db, bus, feeds, metrics, "stepper")
            consolidator = Consolidator(db, bus, storage, feeds, metrics, "stepper", on_published)
            rescuer = RunRescuer(db, bus, planner, fetcher, consolidator, section.stalled_after)
            harvest = Harvest(db, bus, section)
            yield HarvestStepper(db, bus, storage, source, section, harvest, planner, fetcher, consolidator, rescuer)
