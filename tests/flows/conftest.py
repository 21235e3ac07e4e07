"""What tests of flows over HTTP stand on; a module with a rig of its own goes before."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.flows.harness import FlowsHarness, on_a_port, rigged


@pytest.fixture
async def rig(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsHarness]:
    """The API of flows on an empty database."""
    async with rigged(database_url, tmp_path) as opened:
        yield opened


@pytest.fixture
async def url(rig: FlowsHarness) -> AsyncIterator[str]:
    """The same on a port, for workers that come from outside."""
    async with on_a_port(rig) as address:
        yield address
