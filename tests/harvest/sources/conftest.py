"""Fixtures that open sources like the program, over a real database."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from penstock.harvest.config import FeedSection
from penstock.harvest.feed.feeds import open_source
from penstock.harvest.sources.port import HarvestSource
from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from tests.harvest.sources.scripted_api import ScriptedApi, run_api

OpenSource = Callable[..., AbstractAsyncContextManager[HarvestSource]]


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with run_api() as api:
        yield api


@pytest.fixture
async def harvest_db(db: Database) -> Database:
    await migrate.migrate(db, migrate.load("penstock.harvest"))
    return db


@pytest.fixture
def rest(api: ScriptedApi, harvest_db: Database) -> OpenSource:
    """Return a function that opens a REST source over the scripted API."""

    def open_it(**options: Any) -> AbstractAsyncContextManager[HarvestSource]:
        source = {"kind": "rest", "url": api.url, "path": "/records", **options}
        return open_source("feed", FeedSection.model_validate({"source": source, "key": "id"}), harvest_db)

    return open_it


@pytest.fixture
def nivoda(api: ScriptedApi, harvest_db: Database, monkeypatch: pytest.MonkeyPatch) -> OpenSource:
    """Return a function that opens a Nivoda source over the scripted API."""
    monkeypatch.setenv("NIVODA_PASSWORD", "s3same")

    def open_it(**options: Any) -> AbstractAsyncContextManager[HarvestSource]:
        account = {"username": "buyer@example.com", "password": "env:NIVODA_PASSWORD"}
        source = {"kind": "nivoda", "url": f"{api.url}/graphql", **account, **options}
        return open_source("feed", FeedSection.model_validate({"source": source, "key": "id"}), harvest_db)

    return open_it
