"""The API of flows with a flow that has a schedule."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.kernel.clock import ManualClock
from tests.flows.harness import FlowsHarness, flows_harness

FLOW = """
name: nightly
description: Every night.
maxActiveRuns: 1
scope: {market: XETR}
schedule: {cron: 30 2 * * *, timezone: Europe/Berlin}
steps:
  load: {kind: work, inputs: {from: "${scope.market}"}}
  report: {kind: work, dependsOn: [load]}
"""


@pytest.fixture
async def harness(database_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[FlowsHarness]:
    folder = tmp_path / "flows"
    folder.mkdir()
    (folder / "nightly.yaml").write_text(FLOW)
    async with flows_harness(database_url, tmp_path, clock=clock, folder=folder, limits={"scarce": 1}) as opened:
        yield opened
