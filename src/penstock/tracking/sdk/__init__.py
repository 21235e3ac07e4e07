"""T18: a stage's daemon in Python. Claims, heartbeats and reports go on behind a plain loop.

    async with StageDaemon("shard-worker", "http://127.0.0.1:8085") as daemon:
        async for item in daemon:
            work(item.filename, item.shard)

An item is done when the loop asks for the next one, unless it was failed or retried before. What leaves the loop by an
exception is tried again later. Delivery is at least once: an item can come again (`attempt` > 1) if its worker died
between the work and the report.
"""

from penstock.tracking.sdk.daemon import StageDaemon
from penstock.tracking.sdk.item import Item
from penstock.tracking.sdk.sync import SyncStageDaemon

__all__ = ["Item", "StageDaemon", "SyncStageDaemon"]
