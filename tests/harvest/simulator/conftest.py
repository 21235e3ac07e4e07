"""A small source of the test's own, and somebody who asks it."""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from penstock.harvest.simulator.server import LocalOptions, LocalSource, local_source
from penstock.kernel.clock import ManualClock
from tests.harvest.simulator.client import LocalSourceClient

RECORDS = 400


@pytest.fixture
async def source(clock: ManualClock) -> AsyncIterator[LocalSource]:
    clock.advance(timedelta(hours=1))  # the first records came before
    async with local_source(LocalOptions(records=RECORDS, seed=7), clock) as running:
        yield running


@pytest.fixture
async def client(source: LocalSource) -> AsyncIterator[LocalSourceClient]:
    async with LocalSourceClient.of(source.url) as asking:
        yield asking
