"""Fixtures: a small simulator and its client."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from penstock.harvest.simulator.server import LocalOptions, LocalSource, run_local_source
from penstock.kernel.clock import ManualClock
from tests.harvest.simulator.client import LocalSourceClient

RECORDS = 400


@pytest.fixture
async def source(clock: ManualClock) -> AsyncIterator[LocalSource]:
    clock.advance(timedelta(hours=1))  # later than the first records
    async with run_local_source(LocalOptions(records=RECORDS, seed=7), clock) as source:
        yield source


@pytest.fixture
async def client(source: LocalSource) -> AsyncIterator[LocalSourceClient]:
    async with LocalSourceClient.of(source.url) as client:
        yield client
