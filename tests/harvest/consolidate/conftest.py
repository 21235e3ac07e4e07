"""Fixtures for the tests of consolidation."""

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from penstock.kernel.db import migrate
from penstock.kernel.db.database import Database
from tests.harvest.consolidate.recorded_feed import Feed


@pytest.fixture
async def feed(database_url: str) -> AsyncIterator[Feed]:
    async with Database.open(database_url, prefers_indexes=True) as db:
        await migrate.migrate(db, migrate.load("penstock.harvest"))
        yield Feed(db, uuid4())
