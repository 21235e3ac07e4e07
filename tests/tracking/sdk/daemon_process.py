"""A daemon of the SDK in a separate process: prints each item it starts, and ends it when the test sends a line."""

import asyncio
import sys

from penstock.tracking.sdk import Item, StageDaemon, SyncStageDaemon


def work(item: Item) -> None:
    print(f"started {item.shard}", flush=True)  # noqa: T201 - read by the test
    sys.stdin.readline()


class AsyncDaemon(StageDaemon):
    """A daemon that prints when the signal has arrived: no later item must be started."""

    def stop(self) -> None:
        super().stop()
        print("stopping", flush=True)  # noqa: T201 - read by the test


class SyncDaemon(SyncStageDaemon):
    """The same daemon without asyncio."""

    def stop(self) -> None:
        super().stop()
        print("stopping", flush=True)  # noqa: T201 - read by the test


async def run_async(url: str) -> None:
    async with AsyncDaemon("shard-worker", url, batch=5) as daemon:
        async for item in daemon:
            await asyncio.to_thread(work, item)


def run_sync(url: str) -> None:
    with SyncDaemon("shard-worker", url, batch=5) as daemon:
        for item in daemon:
            work(item)


if __name__ == "__main__":
    form, address = sys.argv[1:]
    run_sync(address) if form == "sync" else asyncio.run(run_async(address))
