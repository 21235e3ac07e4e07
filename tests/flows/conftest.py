"""Fixtures of tests of flows over HTTP; a module may define its own `harness` instead."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.flows.harness import FlowsHarness, flows_harness, on_a_port
from tests.flows.stepper import FlowsStepper, flows_stepper


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsHarness]:
    """The API of flows on an empty database."""
    async with flows_harness(database_url, tmp_path) as opened:
        yield opened


@pytest.fixture
async def url(harness: FlowsHarness) -> AsyncIterator[str]:
    """The address of the API of flows, for workers over HTTP."""
    async with on_a_port(harness) as address:
        yield address


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path, max_lost=2) as stepper:
        yield stepper
