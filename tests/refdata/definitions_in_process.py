"""Refdata with a configuration file in this process, with control over the timing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import asyncpg

from penstock.app.parts import open_refdata
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.apply import definitions
from penstock.refdata.runtime import RefdataPlatform
from penstock.settings import load_settings
from tests.refdata.harness import DOCUMENT, dictionaries, upsert
from tests.support.types import Json

WITHIN = 30.0
COUNTRY, CURRENCY = dictionaries(DOCUMENT)
NOK = upsert("NOK", {"name": "Krone", "digits": 2})
TENANTS = ("acme", "globex")


def redefined(dictionary: Json) -> Json:
    """Return *dictionary* with a changed loadSql."""
    return {**dictionary, "loadSql": dictionary["loadSql"] + "  and 1 = 1\n"}


@asynccontextmanager
async def in_process(folder: Path, url: str, *known: Json) -> AsyncIterator[tuple[RefdataPlatform, Path]]:
    file = folder / "penstock.yaml"
    write_definitions(file, url, *known)
    async with open_refdata(load_settings(file, {}), Telemetry()) as platform:
        await definitions.register_definitions(platform.db, platform.refdata.catalogue.list_all())
        yield platform, file


def write_definitions(file: Path, url: str, *known: Json) -> None:
    topic = {"commandsTopic": f"refdata.test.{uuid4().hex}"}
    document = {"database": {"url": url}, "refdata": {"kafka": topic, "dictionaries": known}}
    file.write_text(json.dumps(document))


async def waiting_for_a_lock(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    """Return the backend that waits for a lock in this database, when there is one."""
    query = """
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND state = 'active'"""
    async with asyncio.timeout(WITHIN):
        while (pid := await connection.fetchval(query)) is None:
            pass  # each question is a round trip
    return int(pid)


@asynccontextmanager
async def other_connections(url: str) -> "AsyncIterator[list[asyncpg.Connection[asyncpg.Record]]]":
    """Yield two connections of another client: one acts, one observes."""
    connections = [await asyncpg.connect(url) for _ in range(2)]
    try:
        yield connections
    finally:
        for connection in connections:
            await connection.close()
