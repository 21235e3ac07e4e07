"""What was said of items reaches the server, or somebody is told."""

import asyncio

import pytest

from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import Stage
from penstock.tracking.sdk.item import Item
from penstock.tracking.sdk.reporter import Reporter


class Strange(PipelineClient):
    """A server that answers with something no Penstock would."""

    async def report(self, stage, ended):  # type: ignore[no-untyped-def]
        raise KeyError("results")


async def test_a_reporter_that_ends_keeps_nobody_waiting() -> None:
    """T18: whatever ends the reports, a daemon does not wait for them, and their failure comes to light."""
    reporter = Reporter(Strange("http://127.0.0.1:1"), Stage.SHARD_WORKER)
    running = asyncio.create_task(reporter.run())
    Item("f", 0, 1, 1, reporter.add).done()
    async with asyncio.timeout(10):
        await reporter.flush(within=3600)
    with pytest.raises(KeyError):
        await running
