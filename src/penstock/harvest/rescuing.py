"""Nothing hangs: work whose message is gone, because it killed its workers or the bus lost it, is sent again.

A message that is only late is no harm: it is found to be a duplicate when it comes.
"""

from datetime import datetime, timedelta

import msgspec
import structlog

from penstock.harvest import store
from penstock.harvest.completing import Consolidator
from penstock.harvest.contract import CONSOLIDATIONS, PLANS, WORK_ITEMS, Plan
from penstock.harvest.ending import consolidation, work_item
from penstock.harvest.fetching import Fetcher
from penstock.harvest.planning import Planner
from penstock.harvest.store import SQL
from penstock.kernel.bus import Bus, Message
from penstock.kernel.db import Database

RESCUES = 3
_PATIENCE = 6  # times as long, while the bus still has messages: what is slow is not lost
_GIVEN_UP = f"STALLED: nothing came of it, although its message was sent {RESCUES + 1} times"


class Rescuer:
    """Looks now and then for what stands still."""

    def __init__(
        self, db: Database, bus: Bus, planner: Planner, fetcher: Fetcher, consolidator: Consolidator, after: timedelta
    ) -> None:
        self._db = db
        self._bus = bus
        self._planner = planner
        self._fetcher = fetcher
        self._consolidator = consolidator
        self._after = after

    async def look(self) -> None:
        """Send again what stands still for too long; give up what was sent often enough."""
        await self._plans(await self._stalled_before(PLANS))
        await self._partitions(await self._stalled_before(WORK_ITEMS))
        await self._consolidations(await self._stalled_before(CONSOLIDATIONS))

    async def _stalled_before(self, topic: str) -> datetime:
        patience = _PATIENCE if await self._bus.backlog(topic) else 1
        return self._db.clock.now() - self._after * patience

    async def _plans(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["stalled_plans"], before):
            if row["rescues"] >= RESCUES:
                await self._planner.fail(row["run_id"], _GIVEN_UP)
                continue
            plan = msgspec.json.encode(Plan(row["run_id"], row["feed"], row["trace_id"]))
            await self._again("rescue_plan", [row["run_id"]], Message(PLANS, row["feed"], plan))

    async def _partitions(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["stalled_partitions"], before):
            run_id, name = row["run_id"], row["partition_id"]
            if row["rescues"] >= RESCUES:
                await self._fetcher.fail(run_id, name, _GIVEN_UP)
                continue
            item = work_item(run_id, name, row["next_offset"], row["scan"], row["trace_id"])
            await self._again("rescue_partition", [run_id, name], item)

    async def _consolidations(self, before: datetime) -> None:
        for row in await self._db.fetch(SQL["stalled_consolidations"], before):
            async with self._db.connection() as connection:
                run = await store.run(connection, row["run_id"])
            if run is not None and row["rescues"] >= RESCUES:
                await self._consolidator.fail(run, _GIVEN_UP)
                continue
            message = consolidation(row["run_id"], row["trace_id"], force=row["is_forced"])
            await self._again("rescue_run", [row["run_id"]], message)

    async def _again(self, statement: str, key: list[object], message: Message) -> None:
        structlog.get_logger().warning("work_rescued", topic=message.topic, key=message.key)
        async with self._db.transaction() as tx:
            await tx.execute(SQL[statement], *key, self._db.clock.now())
            await self._bus.publish([message], tx=tx)
        await self._bus.relay()
