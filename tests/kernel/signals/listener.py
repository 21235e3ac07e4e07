"""A process that prints the items of a feed, one per line: `python -m tests.kernel.signals.listener …`."""

import asyncio
import sys

from penstock.kernel.db.database import Database
from penstock.kernel.signals import Signal, Signals
from penstock.kernel.signals.postgres import PostgresSignals
from penstock.kernel.signals.redis import RedisSignals


async def print_items(signals: Signals) -> None:
    async with signals.listen("child") as feed:
        async for item in feed:
            print(item.body if isinstance(item, Signal) else "resync", flush=True)  # noqa: T201 - its only output


async def over_postgres(dsn: str, channel: str) -> None:
    async with Database.open(dsn, size=1) as db:
        await print_items(PostgresSignals(db, channel))


async def over_redis(nodes: str, mode: str, name: str) -> None:
    single = mode == "single"
    signals = RedisSignals(
        nodes.split(","),
        mode="single" if single else "cluster",
        pub_channel=f"{name}:pub",
        stream_key=f"{name}:stream",
        group_prefix=name,
    )
    await print_items(signals)


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    asyncio.run(over_postgres(*arguments) if kind == "postgres" else over_redis(*arguments))
