"""shard-worker: turns the events of a shard into rows ready for SQL, or says which line makes no sense."""

import asyncio
from argparse import Namespace
from pathlib import Path

import structlog

from penstock.kernel.telemetry.telemetry import configure_logging
from penstock.tracking.sdk import Item, StageDaemon

from . import options
from .events import BadLine, Event, line_of, read_events, row_of
from .files import events_file, rows_file, write_whole

STAGE = "shard-worker"
log = structlog.get_logger(stage=STAGE)


async def run(given: Namespace) -> None:
    daemon = StageDaemon(
        STAGE, given.url, worker=given.worker, batch=given.batch, lease=given.lease, token=options.token()
    )
    async with daemon:
        async for item in daemon:
            await handle(item, given.folder)


async def handle(item: Item, folder: Path) -> None:
    """Create the rows of one shard; it is done unless a failure is reported."""
    try:
        # In a thread, so that heartbeats go on meanwhile.
        rows = await asyncio.to_thread(make_rows, folder, item.filename, item.shard)
    except BadLine as error:
        item.fail(str(error))
        log.warning("failed", filename=item.filename, shard=item.shard, error=str(error))
    except OSError as error:
        item.retry(f"{type(error).__name__}: {error}")
    else:
        log.info("made_rows", filename=item.filename, shard=item.shard, rows=rows)


def make_rows(folder: Path, name: str, shard: int) -> int:
    """Write the rows of a shard's events; how many. One bad line, and nothing is written."""
    source = events_file(folder, name, shard)
    seen: dict[str, int] = {}
    lines = []
    for event in read_events(source):
        try:
            check_new(event, seen)
            lines.append(line_of(row_of(event)))
        except ValueError as error:
            raise BadLine(f"line {event.line} of {source.name}: {error}") from error
    write_whole(rows_file(folder, name, shard), lines)
    return len(lines)


def check_new(event: Event, seen: dict[str, int]) -> None:
    """Note the event in *seen*, or raise ValueError when it is there."""
    first = seen.setdefault(event.event_id, event.line)
    if first != event.line:
        raise ValueError(f"event {event.event_id} was there before, in line {first}")


def main() -> None:
    given = options.queue_parser(__doc__).parse_args()
    configure_logging()
    asyncio.run(run(given))


if __name__ == "__main__":
    main()
