"""Our side of the comparison: `penstock work harvest` in a process of its own, and a run from asking to end."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any
from uuid import UUID

from ruamel.yaml import YAML

from benchmarks.servers import processor_seconds, started
from penstock.app.parts import open_harvest
from penstock.app.platform import open_platform
from penstock.harvest.contract import HarvestRunState
from penstock.harvest.runtime import HarvestPlatform
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings

FEED = "diamonds"
EXAMPLE = Path(__file__).parents[1] / "examples" / "diamonds" / "penstock.yaml"
PAGE, PARTITIONS = 30, 30
_LOOK = 0.02
STAGES = """
SELECT EXTRACT(epoch FROM run.started_at - plan.requested_at)::float8 AS plan,
       EXTRACT(epoch FROM fetched.at - run.started_at)::float8 AS fetch,
       EXTRACT(epoch FROM run.completed_at - fetched.at)::float8 AS consolidate,
       (SELECT count(*) FROM canonical_record) AS records
FROM run_metadata run
JOIN harvest_plan plan USING (run_id)
CROSS JOIN LATERAL (SELECT max(completed_at) AS at FROM worker_runs WHERE run_id = run.run_id) AS fetched
WHERE run.run_id = $1
"""


@dataclass(frozen=True)
class Harvested:
    """What a run took, in seconds: in all, by its stages, and of the processors in the worker's process."""

    seconds: float
    plan: float
    fetch: float
    consolidate: float
    worker: float


def settings_of(database: str, source: str, folder: Path) -> dict[str, Any]:
    """Return settings with the example's feed, its fields and its prices, over REST and without dictionaries."""
    config_document = YAML(typ="safe").load(EXAMPLE.read_text())
    feed = config_document["harvest"]["feeds"][FEED]
    feed.pop("every", None)  # only when asked
    feed.pop("dictionaries", None)  # the peers announce nothing after a run either
    feed["source"] = {
        "kind": "rest",
        "url": source,
        "path": "/records",
        "count_path": "/records/count",
        "has_more": "hasMore",
    }
    return {"data_dir": str(folder), "database": {"url": database}, "harvest": {"feeds": {FEED: feed}}}


@asynccontextmanager
async def opened(config_document: dict[str, Any]) -> AsyncIterator[HarvestPlatform]:
    """The schema made, and who may ask for runs."""
    settings = Settings.model_validate(config_document)
    async with open_platform(settings, Telemetry()) as platform, open_harvest(settings, platform) as harvest:
        yield harvest


async def harvest(database: str, source: str, folder: Path, records: int) -> Harvested:
    """A full run of everything the source has, by one worker process with the usual settings."""
    config_document = settings_of(database, source, folder)
    config = folder / "penstock.yaml"
    config.write_text(json.dumps(config_document))
    command = ("-m", "penstock.cli.main", "work", "harvest", "--json", "--config", str(config))
    async with opened(config_document) as platform, started(*command) as worker:
        before, began = processor_seconds([worker.pid]), perf_counter()
        run_id = await platform.harvest.start(FEED, "benchmark")
        await _ended(platform, run_id)
        seconds, used = perf_counter() - began, processor_seconds([worker.pid]) - before
        row = await platform.db.fetchrow(STAGES, run_id)
    if row is None or row["records"] != records:
        raise RuntimeError(f"{row and row['records']} of {records} records were harvested")
    return Harvested(seconds, row["plan"], row["fetch"], row["consolidate"], used)


async def _ended(platform: HarvestPlatform, run_id: UUID) -> None:
    """Back when the run is completed; it raises when it has come to any other end."""
    states = (HarvestRunState.FAILED, HarvestRunState.CONSOLIDATION_SKIPPED)
    while True:
        state = await platform.db.fetchval("SELECT state FROM run_metadata WHERE run_id = $1", run_id)
        if state == HarvestRunState.COMPLETED:
            return
        failed = await platform.db.fetchval("SELECT error FROM harvest_plan WHERE run_id = $1", run_id)
        if failed or state in states:
            raise RuntimeError(f"the run is {state}: {failed}")
        await asyncio.sleep(_LOOK)
