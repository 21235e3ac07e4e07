"""Connections to PostgreSQL of each role, alone on a database, at rest."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

import asyncpg

from benchmarks.capacity_place import Measurements, Place, figures
from benchmarks.harness import Bench
from benchmarks.harvest_ours import settings_of
from benchmarks.harvest_place import fresh_database
from benchmarks.pods import PROGRAM, written
from benchmarks.servers import Served, started

# The command and the configuration of each role.
ROLES: dict[str, Sequence[str]] = {
    "serve api": ("serve", "api", "--port", "0"),
    "serve command-api": ("serve", "command-api", "--port", "0"),
    "serve query-api": ("serve", "query-api", "--port", "0"),
    "work apply": ("work", "apply", "--port", "0"),
    "work relay": ("work", "relay", "--port", "0"),
    "work kafka-adapter": ("work", "kafka-adapter", "--port", "0"),
    "work harvest": ("work", "harvest", "--port", "0"),
    "work flows": ("work", "flows", "--port", "0"),
    "ingest watch": ("ingest", "watch", "--port", "0"),
    "up": ("up", "--port", "0", "--query-port", "0"),
}
_SESSIONS = """
SELECT count(*) FILTER (WHERE application_name = 'penstock') AS pools,
       count(*) FILTER (WHERE application_name = 'penstock-listen') AS listening
FROM pg_stat_activity WHERE datname = current_database()"""
_LOOK = 0.05
_NOBODY = "http://127.0.0.1:9"  # a feed that is never asked


def benches(place: Place) -> list[Bench]:
    return [
        bench
        for role in place.sizes.roles
        for bench in figures(
            partial(_count, place, role),
            dict.fromkeys(_names(role), "connections"),
            once=True,
            may_be_zero=_names(role)[1:],
        )
    ]


def _names(role: str) -> list[str]:
    return [f"connections: {role}: {kind}" for kind in ("pools, at rest", "listening")]


async def _count(place: Place, role: str) -> Measurements:
    async with fresh_database(await place.url()) as url, _started(place, url, role):
        connection = await asyncpg.connect(url)
        try:
            seen = []
            for _ in range(int(place.sizes.watched / _LOOK)):
                seen.append(await connection.fetchrow(_SESSIONS))
                await asyncio.sleep(_LOOK)
        finally:
            await connection.close()
    most = (max(float(row[kind]) for row in seen if row) for kind in ("pools", "listening"))
    return dict(zip(_names(role), most, strict=True))


def _started(place: Place, url: str, role: str) -> AbstractAsyncContextManager[Served]:
    """The role with what it comes with, and something of each part to do."""
    (place.folder / "tree").mkdir(exist_ok=True)
    settings = {
        **settings_of(url, _NOBODY, place.folder / role.replace(" ", "-")),
        "refdata": {
            "tenants": ["bench"],
            "dictionaries": [{"code": "RATES"}],
            "kafka": {"externalTopics": [{"topic": "others", "tenantId": "=bench", "dictCode": "=RATES"}]},
        },
        "ingest": {"root": str(place.folder / "tree")},
        "telemetry": {"log_level": "ERROR"},
    }
    file = written(settings, place.folder)
    return started(*PROGRAM, *ROLES[role], "--json", "--config", str(file))
