"""Refdata with a manual clock, and its maintenance."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

from penstock.kernel.clock import ManualClock
from penstock.kernel.states import journal
from penstock.refdata.contract import decode_command
from penstock.refdata.maintenance import RefdataMaintenance
from tests.refdata.harness import RefdataHarness, chunk, opened, refdata_settings

KEPT = {"processedEvents": "P10D", "tombstones": "P5D", "updates": "P20D", "history": "P40D"}


class RetentionHarness:
    """Refdata with a manual clock, and its maintenance."""

    def __init__(self, harness: RefdataHarness, clock: ManualClock) -> None:
        self.harness, self.clock = harness, clock
        platform = harness.platform
        self.upkeep = RefdataMaintenance(platform.db, platform.bus, platform.refdata, platform.metrics, "maintenance")

    async def after(self, passed: timedelta) -> int:
        """Advance the clock by *passed*, prune, and return the number of deleted rows."""
        self.clock.advance(passed)
        return await self.upkeep.prune()

    async def count(self, table: str, where: str = "true") -> int:
        return int(await self.harness.db.fetchval(f"SELECT count(*) FROM {table} WHERE {where}"))

    async def noted(self) -> list[journal.JournalEntry]:
        """Return all entries of the journal, once no transaction of another client on this server delays it."""
        async with asyncio.timeout(30), self.harness.db.connection() as connection:
            while True:
                noted, _ = await journal.read_after(connection, journal.BEGINNING, limit=1000)
                if len(noted) == await connection.fetchval("SELECT count(*) FROM journal_move"):
                    return [stored.entry for stored in noted]

    async def send_chunk(self, snapshot_id: UUID, index: int, total: int, *items: Any, **more: Any) -> UUID:
        body = decode_command(chunk("LOOSE", snapshot_id, index, total, *items, **more))
        return (await self.harness.refdata.submit("acme", body)).event_id


@asynccontextmanager
async def opened_retention(url: str, clock: ManualClock, **refdata: Any) -> AsyncIterator[RetentionHarness]:
    async with opened(refdata_settings(url, **refdata)) as harness:
        harness.db.clock = clock
        yield RetentionHarness(harness, clock)
