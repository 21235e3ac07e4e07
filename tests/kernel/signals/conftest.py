"""Every implementation of signals, on servers that the tests share."""

from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.kernel.db.database import Database
from tests.kernel.signals.backends import PostgresSignalsBackend, RedisSignalsBackend, SignalsBackend, redis_backend
from tests.kernel.signals.feed_reader import server_binary
from tests.services.redis import RedisCluster, RedisServer


@pytest.fixture(scope="session")
def cluster() -> Iterator[RedisCluster]:
    """Three masters for the whole test process, which no test kills."""
    service = RedisCluster(server_binary())
    yield service
    service.stop()


@pytest.fixture(scope="session")
def single() -> Iterator[RedisServer]:
    service = RedisServer(server_binary())
    yield service
    service.stop()


@pytest.fixture
async def cluster_backend(cluster: RedisCluster) -> AsyncIterator[RedisSignalsBackend]:
    async with redis_backend(cluster) as backend:
        yield backend


@pytest.fixture
async def single_backend(single: RedisServer) -> AsyncIterator[RedisSignalsBackend]:
    async with redis_backend(single) as backend:
        yield backend


@pytest.fixture(params=["postgres", "cluster", "single"])
def backend(request: pytest.FixtureRequest) -> SignalsBackend:
    """Every implementation."""
    implementation: SignalsBackend = request.getfixturevalue(f"{request.param}_backend")
    return implementation


@pytest.fixture
def private_cluster() -> Iterator[RedisCluster]:
    """Three masters that the test may kill."""
    service = RedisCluster(server_binary())
    yield service
    service.stop()


@pytest.fixture
async def postgres_backend(db: Database) -> PostgresSignalsBackend:
    return PostgresSignalsBackend(db)
