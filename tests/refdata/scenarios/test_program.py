"""The YAML of the founding document, in separate processes with PostgreSQL, Kafka and a Redis Cluster."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest

from tests.refdata.harness import DOCUMENT, create_schemas, delete, upsert
from tests.services.collector import Collector
from tests.services.kafka import Kafka
from tests.services.postgres import fresh_database
from tests.services.redis import RedisCluster, redis_binary
from tests.support.http import answered, commit_update
from tests.support.processes import CommandApi, Up, Work, penstock
from tests.support.require import require

STREAM = "refdata:inv:stream"
USER = "app_user"  # as the document has it


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    binary = redis_binary() or require("redis")
    running = RedisCluster(binary)
    try:
        yield running
    finally:
        running.stop()


@asynccontextmanager
async def users_database(postgres_url: str) -> AsyncIterator[str]:
    """Yield an empty database of the document's user, with its tables."""
    async with fresh_database(postgres_url, empty=True) as url:
        admin = await asyncpg.connect(url)
        try:
            await admin.execute(
                f"DO $$ BEGIN CREATE ROLE {USER} LOGIN; EXCEPTION WHEN duplicate_object OR unique_violation THEN END $$"
            )
            await admin.execute(f'ALTER DATABASE "{urlsplit(url).path[1:]}" OWNER TO {USER}')
        finally:
            await admin.close()
        own = url.replace("//postgres@", f"//{USER}@")
        await create_schemas(own)
        yield own


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[str]:
    async with users_database(postgres_url) as url:
        yield url


@pytest.fixture
def env(
    database: str, cluster: RedisCluster, bus_kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> dict[str, str]:
    """Write the document's file into the working directory, with the addresses of the servers of the test."""
    shutil.copy(DOCUMENT, tmp_path / "penstock.yaml")
    parts = urlsplit(database)
    cluster.wipe()
    found = {
        "PG_PASSWORD": "not asked for on this socket",
        "PENSTOCK__REFDATA__POSTGRES__JDBCURL": f"jdbc:postgresql://{parts.path}?{parts.query}",
        "PENSTOCK__REFDATA__REDIS__NODES": json.dumps(cluster.addresses),
        "PENSTOCK__REFDATA__KAFKA__COMMANDSTOPIC": f"refdata.test.{os.urandom(6).hex()}",
    }
    if bus_kind == "kafka":
        broker: Kafka = request.getfixturevalue("broker")
        broker.needs_real("makes no topics when it is asked to")
        found["PENSTOCK__BUS__KAFKA__BOOTSTRAP"] = broker.bootstrap
    return found


def submitted(api: str, code: str, *items: dict[str, Any], trace: str | None = None, **more: Any) -> dict[str, Any]:
    """Send a command, wait for its end without limit, and return it."""
    body = {"dictCode": code, "eventType": "DELTA", "items": items, **more}
    headers = {"traceparent": f"00-{trace}-{'1' * 16}-01"} if trace else {}
    return answered(commit_update(f"{api}/v1/tenants/tenant-a/updates", body, headers))


def health(api: str) -> str:
    return str(httpx.get(f"{api}/actuator/health").json()["status"])


async def announced(cluster: RedisCluster, versions: int) -> list[dict[str, Any]]:
    """Return the entries of the stream, once there are *count*."""
    node: Any = cluster.holder(STREAM)
    async with asyncio.timeout(30):
        last = "0"
        found: list[dict[str, Any]] = []
        while len(found) < versions:
            for _, entries in await asyncio.to_thread(node.xread, {STREAM: last}, block=1000) or []:
                last = entries[-1][0]
                found += [json.loads(fields["body"]) for _, fields in entries]
    return found


async def test_the_founding_document_unchanged(
    env: dict[str, str], database: str, cluster: RedisCluster, tmp_path: Path
) -> None:
    """R1, R15, R28: its YAML, its tables, each role a process; commits are in the stream with its name."""
    with ExitStack() as stack:
        api = stack.enter_context(CommandApi(tmp_path, env=env)).api
        for role in ("apply", "relay"):
            stack.enter_context(Work(tmp_path, role, env=env))
        first = submitted(api, "COUNTRY", upsert("NO", {"name": "Norway"}), upsert("SE", {"name": "Sweden"}))
        second = submitted(api, "COUNTRY", delete("SE"))
        third = submitted(api, "CURRENCY", upsert("NOK", {"name": "Krone", "digits": 2}), eventType="SNAPSHOT")
        assert [response["committedVersion"] for response in (first, second, third)] == [1, 2, 1]
        invalidations = await announced(cluster, 3)
    countries = [each for each in invalidations if each["dictCode"] == "COUNTRY"]
    assert [(country["version"], country["keys"]) for country in countries] == [(1, ["NO", "SE"]), (2, ["SE"])]
    assert {"eventId", "tenantId", "dictCode", "version", "committedAt"} <= set(invalidations[0])
    connection = await asyncpg.connect(database)
    try:
        rows = await connection.fetch("SELECT tenant_id, code, name, deleted FROM mdm_country ORDER BY code")
        assert [tuple(row) for row in rows] == [
            ("tenant-a", "NO", "Norway", False),
            ("tenant-a", "SE", "Sweden", True),
        ]
        assert await connection.fetchval("SELECT digits FROM mdm_currency WHERE ccy = 'NOK'") == 2
    finally:
        await connection.close()


@pytest.mark.full
def test_a_trace_goes_through_every_process(env: dict[str, str], tmp_path: Path) -> None:
    """R26: a trace of the caller is in each process and in their logs under one id."""
    trace = os.urandom(16).hex()
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        env = {**env, **collector.env, "PENSTOCK__TELEMETRY__LOG_LEVEL": "DEBUG"}
        api = stack.enter_context(CommandApi(tmp_path, env=env)).api
        apply, _ = (stack.enter_context(Work(tmp_path, role, env=env)) for role in ("apply", "relay"))
        event_id = submitted(api, "COUNTRY", upsert("NO", {"name": "Norway"}), trace=trace)["eventId"]
        spans = collector.of(trace, "refdata.apply", "refdata.announce")
        assert {span.about["eventId"] for span in spans if span.name.startswith("refdata")} == {event_id}
        logged = [json.loads(line) for line in apply.log_file.read_text().splitlines() if line.startswith("{")]
        assert [line["event"] for line in logged if line.get("trace_id") == trace] == ["command_committed"]


async def test_everything_in_one_place(env: dict[str, str], cluster: RedisCluster, tmp_path: Path) -> None:
    """R1: the same file works in `penstock up`, beside the embedded database of the platform."""
    with Up(tmp_path, env=env) as up:
        assert submitted(up.api, "COUNTRY", upsert("NO", {"name": "Norway"}))["committedVersion"] == 1
        assert (await announced(cluster, 1))[0]["version"] == 1
        assert health(up.api) == "UP"
        assert up.stop() == 0


@pytest.mark.full
def test_a_role_says_what_it_misses(tmp_path: Path) -> None:
    """R10: an adapter without topics, and a second process on an embedded database, get an error with a hint."""
    result = penstock("work", "kafka-adapter", cwd=tmp_path)
    assert result.code == 3
    assert "externalTopics" in result.err
    with Up(tmp_path):
        result = penstock("work", "apply", cwd=tmp_path)
    assert result.code == 6
    assert "locked by up" in result.err
