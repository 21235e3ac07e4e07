"""A pod in this process, on a database of the test's own; signals go over PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.settings import Settings
from tests.refdata.pod.podrig import PodRig, running_pod
from tests.refdata.rig import create_schemas, settings_on

# LOOSE lives in dictionary_item, COUNTRY and CURRENCY in tables of their own.
QUERY = {"reconcileEvery": "PT0.2S", "auditEvery": None}


@pytest.fixture
async def pod_settings(database_url: str) -> Settings:
    await create_schemas(database_url)
    return settings_on(database_url, query=QUERY)


@pytest.fixture
async def pod(pod_settings: Settings, tmp_path: Path) -> AsyncIterator[PodRig]:
    async with running_pod(pod_settings, tmp_path) as rig:
        yield rig
