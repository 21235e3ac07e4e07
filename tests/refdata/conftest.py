"""Fixtures for refdata on the bus of PostgreSQL and on Kafka: the same tests on both."""

from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.kernel.clock import ManualClock
from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, create_schemas, opened, refdata_settings
from tests.refdata.retention import KEPT, RetentionHarness, opened_retention
from tests.services.kafka import Kafka, kafka


@pytest.fixture(scope="session")
def broker() -> Iterator[Kafka]:
    with kafka() as found:
        yield found


@pytest.fixture(params=["postgres", "kafka"])
def bus_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def settings(database_url: str, bus_kind: str, request: pytest.FixtureRequest) -> Settings:
    """Return the dictionaries of both configurations, on the database of the test and on either bus."""
    await create_schemas(database_url)
    broker = request.getfixturevalue("broker") if bus_kind == "kafka" else None
    if broker is not None:
        broker.needs_real("makes no topics when it is asked to")
    return refdata_settings(database_url, broker)


@pytest.fixture
async def harness(settings: Settings) -> AsyncIterator[RefdataHarness]:
    async with opened(settings) as harness:
        yield harness


@pytest.fixture
async def schemas(database_url: str) -> str:
    await create_schemas(database_url)
    return database_url


@pytest.fixture
async def retention(database_url: str, clock: ManualClock) -> AsyncIterator[RetentionHarness]:
    await create_schemas(database_url)
    async with opened_retention(database_url, clock, retention=KEPT) as retention:
        yield retention
