"""T18: a daemon of a stage in Python: a plain loop, with claims, heartbeats and reports in the background.

    async with StageDaemon("shard-worker", "http://127.0.0.1:8085") as daemon:
        async for item in daemon:
            work(item.filename, item.shard)

An item is reported as done when the loop asks for the next one, unless the body called `fail`, `retry` or `release`. An
exception that leaves the loop retries the item later. Delivery is at least once: an item is delivered again
(`attempt` > 1) if its worker died between the work and the report.
"""

from penstock.tracking.sdk.daemon import StageDaemon
from penstock.tracking.sdk.item import Item
from penstock.tracking.sdk.sync import SyncStageDaemon

__all__ = ["Item", "StageDaemon", "SyncStageDaemon"]
