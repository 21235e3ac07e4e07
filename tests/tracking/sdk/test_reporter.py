"""The outcomes of items reach the server, or an error is raised."""

import asyncio

import pytest

from penstock.tracking.client import PipelineClient
from penstock.tracking.contract import Stage
from penstock.tracking.sdk.item import Item
from penstock.tracking.sdk.reporter import Reporter


class BrokenClient(PipelineClient):
    """A client whose server answers with an unexpected document."""

    async def report(self, stage, outcomes):  # type: ignore[no-untyped-def]
        raise KeyError("results")


async def test_flush_returns_after_the_reporter_failed() -> None:
    """T18: if the reporter fails, a daemon does not wait for it, and the error is raised."""
    reporter = Reporter(BrokenClient("http://127.0.0.1:1"), Stage.SHARD_WORKER)
    running = asyncio.create_task(reporter.run())
    Item("f", 0, 1, 1, reporter.add).done()
    async with asyncio.timeout(10):
        await reporter.flush(timeout=3600)
    with pytest.raises(KeyError):
        await running
