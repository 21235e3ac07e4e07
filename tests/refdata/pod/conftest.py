"""Fixtures of a pod in this process on a database per test; signals go over PostgreSQL."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, create_schemas, opened, refdata_settings
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.services.postgres_proxy import PostgresProxy
from tests.services.redis import RedisCluster, redis_binary
from tests.support.require import require

# LOOSE lives in dictionary_item, COUNTRY and CURRENCY in tables of their own.
QUERY = {"reconcileEvery": "PT0.2S", "auditEvery": None}


Pods = Callable[..., AbstractAsyncContextManager[PodHarness]]


@pytest.fixture
async def pods(database_url: str, tmp_path: Path) -> Pods:
    """Return a function that opens pods with additional query settings."""
    await create_schemas(database_url)

    @asynccontextmanager
    async def running(**query: Any) -> AsyncIterator[PodHarness]:
        async with running_pod(refdata_settings(database_url, query={**QUERY, **query}), tmp_path) as harness:
            yield harness

    return running


@pytest.fixture
async def pod_settings(database_url: str) -> Settings:
    await create_schemas(database_url)
    return refdata_settings(database_url, query=QUERY)


@pytest.fixture
async def pod(pod_settings: Settings, tmp_path: Path) -> AsyncIterator[PodHarness]:
    async with running_pod(pod_settings, tmp_path) as harness:
        yield harness


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[PostgresProxy]:
    """Yield a proxy to the primary that can be shut."""
    await create_schemas(database_url)
    async with PostgresProxy(database_url) as proxy:
        yield proxy


@pytest.fixture
async def writer(database_url: str, proxy: PostgresProxy) -> AsyncIterator[RefdataHarness]:
    """Yield refdata whose connection to the primary does not pass the proxy."""
    async with opened(refdata_settings(database_url)) as harness:
        yield harness


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    running = RedisCluster(redis_binary() or require("redis"))
    try:
        yield running
    finally:
        running.stop()
