"""The pipeline's daemons, all four in one process, so that one kill -9 takes them all."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from examples.demo.sender import send
from examples.pipeline import shard_splitter, shard_worker
from examples.pipeline.event_ingest import Ingest

from penstock.kernel.telemetry import configure_logging
from penstock.tracking.client import PipelineClient
from penstock.tracking.sdk import Item, StageDaemon

LEASE = 2  # seconds until what a dead daemon held goes to another
Handle = Callable[[Item], Awaitable[None]]


async def run(url: str, raw: Path, folder: Path, shards: int) -> None:
    async with PipelineClient(url) as client, asyncio.TaskGroup() as group:
        await Ingest(client, raw, folder, shards, "event-ingest").look()
        group.create_task(work(url, "shard-splitter", lambda item: shard_splitter.handle(item, client, folder)))
        group.create_task(work(url, "shard-worker", lambda item: shard_worker.handle(item, folder)))
        group.create_task(work(url, "mysql-sender", lambda item: asyncio.to_thread(send, item, folder)))


async def work(url: str, stage: str, handle: Handle) -> None:
    async with StageDaemon(stage, url, worker=f"{stage}@{os.getpid()}", batch=1, lease=LEASE) as daemon:
        async for item in daemon:
            await handle(item)


if __name__ == "__main__":
    configure_logging("ERROR", "console")
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])))
