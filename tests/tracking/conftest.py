"""Fixtures of tracking: the service on a manual clock, its API without a network, and the `pipeline-apid` program."""

from collections.abc import AsyncIterator, Iterator

import asyncpg
import httpx
import pytest
from fastapi import FastAPI

from penstock.app.apis import PublicApis, make_pipeline_api
from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.http.auth import NoAuthenticator
from penstock.kernel.http.health import LivenessPulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings
from penstock.tracking.config import TrackingSection
from penstock.tracking.metrics import TrackingMetrics
from penstock.tracking.service import Tracking
from tests.services.postgres import module_database
from tests.support.processes import PipelineApid
from tests.tracking.harness import BASE, TrackingHarness

MAX_ATTEMPTS = 3


@pytest.fixture
def telemetry() -> Telemetry:
    """Return the telemetry whose metrics the test reads."""
    return Telemetry()


@pytest.fixture
async def tracking(database_url: str, clock: ManualClock, telemetry: Telemetry) -> AsyncIterator[Tracking]:
    """Yield the service; its clock moves only when the test advances it."""
    section = TrackingSection(max_attempts=MAX_ATTEMPTS)
    metrics = TrackingMetrics(telemetry.registry)
    async with Database.open(database_url, clock=clock) as db, Tracking.open(db, section, metrics) as tracking:
        yield tracking


@pytest.fixture
def app(tracking: Tracking, telemetry: Telemetry) -> FastAPI:
    """Return the application of the pipeline API."""
    web = PublicApis(Settings(), telemetry, NoAuthenticator())
    return make_pipeline_api(web, LivenessPulse({"database": tracking.check}, needs=["database"]), tracking)


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the API without a network."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1{BASE}") as client:
        yield client


@pytest.fixture
def api(http: httpx.AsyncClient) -> TrackingHarness:
    """Return a harness for the API without a network."""
    return TrackingHarness(http)


@pytest.fixture(scope="module")
def apid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PipelineApid, str]]:
    """Yield one `pipeline-apid` for all tests of a module, and the URL of its database."""
    with (
        module_database() as url,
        PipelineApid(tmp_path_factory.mktemp("apid"), "--database", url) as running,
    ):
        yield running, url


@pytest.fixture
async def server(apid: tuple[PipelineApid, str]) -> str:
    """Return the address of a running server without rows."""
    running, database_url = apid
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("DELETE FROM pipeline_tracking; DELETE FROM pipeline_pause")
    finally:
        await connection.close()
    return running.api


@pytest.fixture
async def live(server: str) -> AsyncIterator[TrackingHarness]:
    """Yield a harness for the API of that server, over the network."""
    async with httpx.AsyncClient(base_url=server + BASE, timeout=60) as client:
        yield TrackingHarness(client)
