"""Consolidation alone: pending raw records made canonical, by PostgreSQL in sets or by Python in batches."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

import httpx
import orjson

from benchmarks.harvest_ours import FEED, opened, settings_of
from benchmarks.harvest_place import Place, fresh_database
from penstock.harvest import store
from penstock.harvest.config import ConsolidationMode
from penstock.harvest.consolidate.worker import apply_mapping, consolidate
from penstock.harvest.feed.mapping import FeedMapping
from penstock.harvest.runtime import HarvestPlatform

_KEEP = """
INSERT INTO raw_record (feed, key, payload, version, seen_run, seen_in, seen_scan, changed_at)
SELECT $1, payload->>'id', payload, 1, $2, 'partition-0', 1,
    now() FROM (SELECT line::jsonb AS payload FROM source_line) AS line_payload
"""
_AGAIN = """
TRUNCATE canonical_record, raw_pending;
INSERT INTO raw_pending SELECT feed, key, version FROM raw_record;
VACUUM ANALYZE raw_record, raw_pending;
CHECKPOINT
"""


@asynccontextmanager
async def fetched(place: Place) -> AsyncIterator[HarvestPlatform]:
    """A database that has all records of the source, in the order it lists them."""
    async with (
        fresh_database(place.postgres) as database,
        opened(settings_of(database, place.source, place.folder)) as platform,
    ):
        async with platform.db.transaction() as tx:
            await tx.execute("CREATE TEMP TABLE source_line (line text) ON COMMIT DROP")
            await tx.copy_records_to_table("source_line", records=[(line,) for line in await _lines(place)])
            await tx.execute(_KEEP, FEED, uuid.uuid4())
        yield platform


async def rate(platform: HarvestPlatform, records: int, mode: ConsolidationMode) -> float:
    """Records a second."""
    for statement in _AGAIN.split(";"):
        await platform.db.execute(statement)
    feed = platform.section.feeds[FEED]
    section, recipe = feed.consolidation.model_copy(update={"mode": mode}), FeedMapping.from_feed(feed)
    async with platform.db.transaction() as tx:
        await store.lock_feed(tx, FEED)
        version = await apply_mapping(tx, FEED, recipe, platform.db.clock.now())
    began = perf_counter()
    done = await consolidate(platform.db, FEED, recipe, section, run_id=uuid.uuid4(), pricing_version=version)
    seconds = perf_counter() - began
    if done.consolidated != records:
        raise RuntimeError(f"{done} of {records} records")
    return records / seconds


async def _lines(place: Place) -> list[str]:
    """By price, as the source lists them: their keys come in no order."""
    async with httpx.AsyncClient(timeout=300) as client:
        records = (await client.get(f"{place.source}/admin/records")).text.splitlines()
    return sorted(records, key=lambda line: orjson.loads(line)["price"] or 0)
