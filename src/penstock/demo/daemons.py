"""The four daemons of the demo's pipeline, in one process: a single kill -9 ends all of them."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from penstock.demo.event_files import copy_events, make_rows, split_shard
from penstock.demo.sender import send_shard
from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import Stage
from penstock.tracking.sdk import Item, StageDaemon

LEASE = 2  # seconds until the shards of a dead daemon are claimed by another
_PRODUCER = "event-ingest"  # the same after a restart: only the worker that started a file may complete it


async def run(url: str, raw: Path, folder: Path, shards: int) -> None:
    """Ingest the raw files, then process their shards until the process is ended."""
    await ingest_files(url, raw, folder, shards)
    async with asyncio.TaskGroup() as group:
        group.create_task(
            run_stage(url, "shard-splitter", lambda item: split_shard(folder, item.filename, item.shard, shards))
        )
        group.create_task(run_stage(url, "shard-worker", lambda item: make_rows(folder, item.filename, item.shard)))
        group.create_task(run_stage(url, "mysql-sender", lambda item: send_shard(folder, item.filename, item.shard)))


async def ingest_files(url: str, raw: Path, folder: Path, shards: int) -> None:
    """Register every raw file and report it complete; a repetition changes nothing."""
    async with PipelineClient(url) as client:
        for path in sorted(raw.glob("[!.]*.jsonl")):
            await client.register(path.stem, range(shards), worker=_PRODUCER)
            copy_events(path, folder)
            await client.move(Stage.EVENT_INGEST, "done", path.stem, worker=_PRODUCER)


async def run_stage(url: str, stage: str, handle: Callable[[Item], None]) -> None:
    """Handle the shards of one stage, one at a time."""
    async with StageDaemon(stage, url, worker=f"{stage}@{os.getpid()}", batch=1, lease=LEASE) as daemon:
        async for item in daemon:
            await asyncio.to_thread(handle, item)


if __name__ == "__main__":
    configure_logging("ERROR", "console")
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
