"""Fixtures of tests of HTTP applications."""

from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.kernel.telemetry.telemetry import Telemetry
from tests.kernel.http.routes_app import make_app


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry()


@pytest.fixture
async def http(telemetry: Telemetry) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(telemetry), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client
