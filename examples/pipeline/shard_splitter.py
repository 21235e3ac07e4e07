"""shard-splitter: writes the events of each shard to a file of its own."""

import asyncio
from argparse import Namespace
from pathlib import Path

import structlog

from penstock.kernel.errors import Transient
from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.tracking.client import PipelineClient
from penstock.tracking.sdk import Item, StageDaemon

from . import options
from .events import BadLine, line_of, read_events, shard_of
from .files import events_file, ingested_file, write_whole

STAGE = "shard-splitter"
log = structlog.get_logger(stage=STAGE)


async def run(given: Namespace) -> None:
    daemon = StageDaemon(
        STAGE, given.url, worker=given.worker, batch=given.batch, lease=given.lease, token=options.token()
    )
    async with PipelineClient(given.url, token=options.token()) as client, daemon:
        async for item in daemon:
            await handle(item, client, given.folder)


async def handle(item: Item, client: PipelineClient, folder: Path) -> None:
    """Split one shard off; it is done unless a failure is reported."""
    try:
        # Asked for, not configured: a splitter that counts shards in another way than the producer would lose events.
        shards = len((await client.file(item.filename))["shards"])
        # In a thread, so that heartbeats go on meanwhile.
        events = await asyncio.to_thread(split, folder, item.filename, item.shard, shards)
    except BadLine as error:
        item.fail(str(error))
    except (OSError, Transient) as error:
        item.retry(f"{type(error).__name__}: {error}")
    else:
        log.info("split", filename=item.filename, shard=item.shard, events=events)


def split(folder: Path, name: str, shard: int, shards: int) -> int:
    """Write the events of *shard*; how many. Doing it again writes the same."""
    all_events = read_events(ingested_file(folder, name))
    lines = [line_of(event.fields) for event in all_events if shard_of(event.user_id, shards) == shard]
    write_whole(events_file(folder, name, shard), lines)
    return len(lines)


def main() -> None:
    given = options.queue_parser(__doc__).parse_args()
    configure_logging()
    asyncio.run(run(given))


if __name__ == "__main__":
    main()
