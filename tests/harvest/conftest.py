"""Fixtures for the tests of harvest, which a module may override."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.harvest.api_client import HarvestApiClient, open_client
from tests.harvest.harness import HarvestHarness, harvest_harness
from tests.harvest.stepper import harvest_stepper


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    async with harvest_harness(database_url, tmp_path, partitions={"count": 12, "min_records": 20}) as harness:
        yield harness


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestApiClient]:
    partitions = {"min_records": 30, "count": 3}
    async with (
        harvest_stepper(database_url, tmp_path, records=120, partitions=partitions) as stepper,
        open_client(stepper) as client,
    ):
        yield client
