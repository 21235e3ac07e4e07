"""Sources over a real database, opened as the program opens them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from penstock.harvest.config import FeedSection
from penstock.harvest.feed.feeds import open_source
from penstock.harvest.sources.port import HarvestSource
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from tests.harvest.sources.scripted_api import ScriptedApi, running

Opened = Callable[..., AbstractAsyncContextManager[HarvestSource]]


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with running() as api:
        yield api


@pytest.fixture
async def harvest_db(db: Database) -> Database:
    await migrate.migrate(db, migrate.load("penstock.harvest"))
    return db


@pytest.fixture
def rest(api: ScriptedApi, harvest_db: Database) -> Opened:
    """Opens a REST source over the scripted API."""

    def opened(**options: Any) -> AbstractAsyncContextManager[HarvestSource]:
        source = {"kind": "rest", "url": api.url, "path": "/records", **options}
        return open_source("feed", FeedSection.model_validate({"source": source, "key": "id"}), harvest_db)

    return opened


@pytest.fixture
def nivoda(api: ScriptedApi, harvest_db: Database, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens a Nivoda source over the scripted API."""
    monkeypatch.setenv("NIVODA_PASSWORD", "s3same")

    def opened(**options: Any) -> AbstractAsyncContextManager[HarvestSource]:
        account = {"username": "buyer@example.com", "password": "env:NIVODA_PASSWORD"}
        source = {"kind": "nivoda", "url": f"{api.url}/graphql", **account, **options}
        return open_source("feed", FeedSection.model_validate({"source": source, "key": "id"}), harvest_db)

    return opened
