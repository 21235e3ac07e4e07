"""Refdata as processes of two versions, replaced one by one under a light load, with the invariants to check."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

from penstock.kernel.db.database import Database
from penstock.kernel.tasks.periodic import run_periodically
from tests.deploy.upgrade.upgrade_versions import Version, VersionRole
from tests.support.settings import write_config
from tests.support.wait import becomes

# Who reads goes before who writes: what a newer release writes, its readers know.
FORWARD = ("relay", "apply", "query-api.1", "query-api.2", "command-api")
BACK = tuple(reversed(FORWARD))
TENANT = "acme"
EVERY = timedelta(milliseconds=100)
A_FEW = 3
# One row per application: whatever is applied twice is here twice.
_APPLIED = "CREATE TABLE applied (tenant_id text, key text, version bigint)"
_PUT = "insert into applied select :tenantId, :key, :eventVersion"
_ALL = (
    "insert into applied select :tenantId, item ->> 'key', :eventVersion from jsonb_array_elements(:snapshotJson) item"
)
LEDGER = {
    "code": "LEDGER",
    "loadSql": "select key as k, to_jsonb(version) as v from applied where tenant_id = :tenantId",
    "apply": {"mode": "SQL_TEMPLATE", "upsertSql": _PUT, "deleteSql": _PUT, "snapshotReplaceSql": _ALL},
}


@dataclass
class UpgradeWorkload:
    """The roles that run, each of some version; clients that write and read all the while."""

    folder: Path
    db: Database
    client: httpx.AsyncClient
    _stack: ExitStack
    running: dict[str, list[VersionRole]] = field(default_factory=lambda: {name: [] for name in FORWARD})
    acknowledged: dict[str, int] = field(default_factory=dict)  # keys, and the version each was committed as
    errors: list[str] = field(default_factory=list)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def start(self, version: Version, *names: str) -> None:
        """Have one more of each, ready and among those who are asked."""
        await asyncio.gather(*(self._start(version, name) for name in names))

    async def _start(self, version: Version, name: str) -> None:
        role = name.partition(".")[0]
        how = "work" if role in ("relay", "apply") else "serve"
        server = version.start(how, role, "--port", "0", folder=self.folder)
        self.running[name].append(await asyncio.to_thread(self._stack.enter_context, server))

    async def replace(self, version: Version, name: str) -> None:
        """As a rolling update does: another one first, both for a while, then the one before goes when it is done."""
        await self.start(version, name)
        await self.some_writes()
        async with self._asking:  # pending requests are answered; no request goes to the role that ends
            gone = self.running[name].pop(0)
        assert await asyncio.to_thread(gone.stop) == 0, gone.log
        await self.some_writes()

    async def some_writes(self) -> None:
        """A few more are acknowledged, and seen in every pod."""
        wanted = len(self.acknowledged) + A_FEW

        async def have_come() -> bool:
            return len(self.acknowledged) >= wanted or bool(self.errors)

        await becomes(have_come, "no write is acknowledged")
        assert self.errors == []

    async def write_and_read(self) -> None:
        """A client: its write is committed, and it reads it at once in every pod."""
        key = uuid4().hex
        try:
            async with self._asking:
                version = self.acknowledged[key] = await self._written(key)
                await asyncio.gather(*(self.read(pod, key, version) for pod in self.pods))
        except (httpx.HTTPError, AssertionError) as error:
            self.errors.append(f"{type(error).__name__} {error}")

    async def _written(self, key: str) -> int:
        apis = self.running["command-api"]
        url = f"{apis[next(self._numbers) % len(apis)].api}/v1/tenants/{TENANT}/updates"
        body = {"dictCode": "LEDGER", "eventType": "DELTA", "items": [{"key": key, "payload": 1}]}
        answer = await self.client.post(url, params={"consistencyMode": "WAIT_COMMIT", "timeoutMs": "1000"}, json=body)
        update = answer.json()
        while answer.status_code == 202 or update.get("status") == "PENDING":
            answer = await self.client.get(f"{url}/{update['eventId']}")
            update = answer.json()
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}"
        return int(update["committedVersion"])

    async def read(self, pod: VersionRole, key: str, version: int) -> None:
        url = f"{pod.api}/v1/tenants/{TENANT}/dictionaries/LEDGER/items/{key}"
        answer = await self.client.get(url, headers={"X-Min-Version": str(version)})
        assert (answer.status_code, answer.text) == (200, str(version)), f"{answer.status_code} {answer.text}"
        assert int(answer.headers["X-Dict-Version"]) >= version

    @property
    def pods(self) -> list[VersionRole]:
        return [*self.running["query-api.1"], *self.running["query-api.2"]]

    async def check(self) -> None:
        """Every acknowledged update is in every pod and was announced; otherwise only barriers would find it."""
        wanted = dict(self.acknowledged)
        last = max(wanted.values())
        for pod in self.pods:
            url = f"{pod.api}/v1/tenants/{TENANT}/dictionaries/LEDGER/all"
            answer = await self.client.get(url, headers={"X-Min-Version": str(last), "Accept": "application/x-ndjson"})
            assert answer.status_code == 200, answer.text
            known = {
                item["key"]: item["value"] for line in answer.text.splitlines() if "key" in (item := json.loads(line))
            }
            assert {key: known.get(key) for key in wanted} == wanted

        async def is_announced() -> bool:
            unpublished = "SELECT count(*) FROM outbox_event WHERE NOT published AND version <= $1"
            return not await self.db.fetchval(unpublished, last)

        await becomes(is_announced, "every commit is announced")

    async def check_at_rest(self) -> None:
        """The load is over: nothing beyond it is there, nothing twice, and no version has a gap."""
        await self.check()
        rows = await self.db.fetch("SELECT key, version FROM applied")
        assert sorted((row["key"], row["version"]) for row in rows) == sorted(self.acknowledged.items())
        assert sorted(self.acknowledged.values()) == list(range(1, len(self.acknowledged) + 1))
        ends = await self.db.fetch("SELECT status, count(*) AS n FROM update_request GROUP BY status")
        assert [(row["status"], row["n"]) for row in ends] == [("COMMITTED", len(self.acknowledged))]
        update = await self.db.fetch("SELECT version FROM outbox_event ORDER BY version")
        assert [row["version"] for row in update] == list(range(1, len(self.acknowledged) + 1))
        assert self.errors == []


@asynccontextmanager
async def upgrade_workload(folder: Path, url: str) -> AsyncIterator[UpgradeWorkload]:
    """Create the tables of the dictionary before any role runs."""
    refdata: dict[str, Any] = {
        "dictionaries": [LEDGER],
        "tenants": [TENANT],
        "query": {"memoryDir": str(folder / "memory")},
    }
    write_config(folder, {"database": {"url": url, "pool_size": 4}, "refdata": refdata})
    async with Database.open(url, size=2) as db, httpx.AsyncClient(timeout=30) as client:
        await db.execute(_APPLIED)
        with ExitStack() as stack:
            yield UpgradeWorkload(folder, db, client, stack)


@asynccontextmanager
async def loaded(workload: UpgradeWorkload) -> AsyncIterator[None]:
    """Clients are at work meanwhile."""
    async with run_periodically("load", workload.write_and_read, EVERY):
        await workload.some_writes()
        yield
        await workload.some_writes()
