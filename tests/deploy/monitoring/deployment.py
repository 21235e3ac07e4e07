"""A deployment with all parts on its own database, and actions that make each part work."""

import asyncio
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import asyncpg
import httpx

from penstock.kernel.db.database import Database
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.refdata.config import RefdataSection
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.maintenance import DriftWatch
from penstock.refdata.metrics import RefdataMetrics
from tests.deploy.monitoring.scrape import scraped
from tests.harvest.simulator_process import SimulatorProcess
from tests.harvest.stepper import FEED, feed
from tests.ingest.harness import KEYED, IngestHarness, snapshot
from tests.services.postgres import module_database
from tests.support.http import answered, commit_update
from tests.support.processes import PENSTOCK, Server
from tests.support.settings import write_config
from tests.support.types import Json
from tests.support.wait import until

ROLES: dict[str, Sequence[str]] = {
    "api": ["serve", "api"],
    "command-api": ["serve", "command-api"],
    "query": ["serve", "query-api"],
    "apply": ["work", "apply"],
    "relay": ["work", "relay"],
    "kafka-adapter": ["work", "kafka-adapter"],
    "harvest": ["work", "harvest"],
    "flows": ["work", "flows"],
    "ingest": ["ingest", "watch"],
}
RECORDS = 60
NO_CHECKOUT = {"GIT_DIR": os.devnull}  # all roles report the same build, even if the files of the checkout change
TENANT = "acme"
OURS, THEIRS = "RATES", "COUNTRY"  # a dictionary in our tables, and one in the user's own
TABLES = """
CREATE TABLE country (tenant_id text, code text, name text, PRIMARY KEY (tenant_id, code));
CREATE VIEW countries AS SELECT country.* FROM country, (SELECT pg_sleep(0.1)) AS slowly;
CREATE FUNCTION replace_countries(tenant text, items jsonb) RETURNS void LANGUAGE sql AS $$
    DELETE FROM country WHERE tenant_id = tenant;
    INSERT INTO country SELECT tenant, item ->> 'key', item ->> 'payload' FROM jsonb_array_elements(items) AS item;
$$;
"""
DICTIONARIES: list[Json] = [
    {"code": OURS},
    {
        "code": THEIRS,
        "loadSql": "select code as k, to_jsonb(name) as v from countries where tenant_id = :tenantId",
        "driftCheckSql": "select string_agg(name, ',' order by code) from country where tenant_id = :tenantId",
        "apply": {
            "mode": "SQL_TEMPLATE",
            "upsertSql": "insert into country values (:tenantId, :key, :payload #>> '{}') "
            "on conflict (tenant_id, code) do update set name = excluded.name",
            "deleteSql": "delete from country where tenant_id = :tenantId and code = :key",
            "snapshotReplaceSql": "select replace_countries(:tenantId, :snapshotJson)",
        },
        "reloadOnEvent": "FULL",
    },
]
# Pods look often, and hardly wait for a version: so a test need not.
_QUERY: Json = {"reconcileEvery": "PT0.2S", "auditEvery": "PT1S", "barrierWaitMs": 1}
_TOPIC: Json = {
    "topic": "mdm.rates",
    "tenantId": f"={TENANT}",
    "dictCode": f"={OURS}",
    "key": "key",
    "payload": "/rate",
}
_CALL: Json = {"kind": "python", "inputs": {"call": "posixpath:basename", "args": {"p": "/a/b"}}}
_PAST = ("dictionary_item", "outbox_event", "dictionary_meta")
FILE = "20250101000000"
UNCLAIMED_KIND = "UNCLAIMED"  # a kind of steps without workers


class DeploymentRole(Server):
    """One role in a process of its own."""

    def __init__(self, folder: Path, name: str, port: int = 0) -> None:
        command = [PENSTOCK, *ROLES[name], "--port", str(port), "--json"]
        super().__init__(name, command, folder, NO_CHECKOUT)


class Deployment:
    """Its configuration, the files of a supplier, a source to harvest; *url* is where its processes find PostgreSQL."""

    def __init__(self, folder: Path, url: str, source: SimulatorProcess) -> None:
        self.folder = folder
        self.source = source
        self.harness = IngestHarness(folder / "tree", KEYED)
        self.config: Json = {
            "database": {"url": url},
            "refdata": {
                "dictionaries": DICTIONARIES,
                "tenants": [TENANT],
                "query": _QUERY,
                "kafka": {"externalTopics": [_TOPIC]},
            },
            "ingest": {"root": str(self.harness.root), "poll": 0.1, "alerts": {"failed_runs": 1}},
            "harvest": {"feeds": {FEED: feed(source.url, page_size=5, pages_per_turn=1, every="P1D")}},
            "flows": {"python": ["posixpath"]},
        }
        self.configure(self.config)

    def configure(self, config: Json | str) -> None:
        """Write the file that all processes read."""
        write_config(self.folder, config)

    def start_roles(self, stack: ExitStack) -> dict[str, DeploymentRole]:
        """All of them, side by side."""
        roles = {name: stack.push(DeploymentRole(self.folder, name)) for name in ROLES}
        return {name: role.__enter__() for name, role in roles.items()}


def put(api: str, code: str, key: str, payload: object) -> int:
    """Change an item; the version it is committed as."""
    body = {"dictCode": code, "eventType": "DELTA", "items": [{"op": "UPSERT", "key": key, "payload": payload}]}
    return int(answered(commit_update(f"{api}/v1/tenants/{TENANT}/updates", body))["committedVersion"])


def read(query: str, code: str, key: str, least: int = 0) -> httpx.Response:
    """An item as a pod answers it."""
    path = f"{query}/v1/tenants/{TENANT}/dictionaries/{code}/items/{key}"
    return httpx.get(path, headers={"X-Min-Version": str(least)}, timeout=30)


def queue_up(api: str, filename: str) -> None:
    """A file whose one shard waits for the splitter."""
    pipeline = f"{api}/api/v1/pipeline"
    httpx.post(f"{pipeline}/files/register", json={"filename": filename, "shards": [0]}).raise_for_status()
    httpx.post(f"{pipeline}/stages/event-ingest/done", json={"filename": filename}).raise_for_status()


def carry(api: str, filename: str) -> None:
    """Have that shard done by all stages."""
    for stage in ("shard-splitter", "shard-worker", "mysql-sender"):
        for move in ("start", "done"):
            row = {"filename": filename, "shard": 0}
            httpx.post(f"{api}/api/v1/pipeline/stages/{stage}/{move}", json=row).raise_for_status()


def harvest(api: str) -> None:
    """Start a full run of the feed, as soon as the one that was due by itself has ended."""
    path = f"{api}/api/v1/harvest/feeds/{FEED}/runs"
    until(lambda: httpx.post(path, json={"full": True}, timeout=30).status_code == 202, "a run is started")


def start_flow(api: str, run: str, **steps: Json) -> None:
    answer = httpx.post(f"{api}/api/v1/flow_runs", json={"runId": run, "steps": steps or {"call": _CALL}}, timeout=30)
    assert answer.status_code == 201, answer.text


def execute(url: str, statement: str) -> None:
    """Execute a statement in the database, bypassing Penstock."""

    async def run() -> None:
        connection = await asyncpg.connect(url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(run())


@contextmanager
def database() -> Iterator[str]:
    """A migrated database with the tables of the user's own dictionary."""
    with module_database() as url:
        execute(url, TABLES)
        yield url


@contextmanager
def source() -> Iterator[SimulatorProcess]:
    simulator = SimulatorProcess(RECORDS)
    try:
        yield simulator
    finally:
        simulator.stop()


def move(deployment: Deployment, api: str, query: str) -> None:
    """Have every part do something, and go well; one step of a flow waits for a worker there is none of."""
    deployment.harness.drop(snapshot({"A": 1, "B": 2}))
    queue_up(api, FILE)
    carry(api, FILE)
    start_flow(api, "well")
    start_flow(api, "waits", simulator={"kind": UNCLAIMED_KIND})
    put(api, THEIRS, "NO", "Norway")
    version = put(api, OURS, "EUR", 1)
    assert read(query, OURS, "EUR", version).json() == 1


def trouble_pods(api: str, query: str, url: str) -> None:
    """A read from the primary, a load that fails, and a primary with another past."""

    def reads_from_the_primary() -> bool:
        version = put(api, THEIRS, "NO", "Noreg")
        return bool(read(query, THEIRS, "NO", version).headers.get("X-Data-Source") == "postgres_fallback")

    until(reads_from_the_primary, "a read from the primary")
    put(api, OURS, "EUR", 1)
    execute(url, "ALTER VIEW countries RENAME TO away")
    put(api, THEIRS, "NO", "Norge")
    shows(query, "cache_reload_errors_total")
    execute(url, "ALTER VIEW away RENAME TO countries")
    execute(url, ";".join(f"DELETE FROM {table} WHERE dict_code = '{OURS}'" for table in _PAST))
    shows(query, "penstock_refdata_history_resets_total")


def fail_harvest(deployment: Deployment, api: str, worker: str) -> None:
    """A run whose source fails for a moment, and which completes all the same."""
    deployment.source.fail(latency_ms=100)
    asked = deployment.source.pages()
    harvest(api)
    until(lambda: deployment.source.pages() > asked, "pages are fetched")
    deployment.source.fail(rate_500=1)
    shows(worker, "penstock_harvest_failures_total")
    deployment.source.fail()


async def drifted(url: str) -> str:
    """What a process tells when a dictionary's table is changed past it; it looks twice a minute, so not by waiting."""
    telemetry = Telemetry()
    section = RefdataSection.model_validate({"dictionaries": DICTIONARIES})
    async with Database.open(url) as db:
        watch = DriftWatch(db, RefdataMetrics(telemetry.registry))
        await watch.check_all(DictionaryCatalogue(section).list_all())
        await db.execute("UPDATE country SET name = name || '!'")
        assert await watch.check_all(DictionaryCatalogue(section).list_all()) == 1
    return telemetry.format_metrics().decode()


def shows(api: str, *metrics: str) -> None:
    """Back once a process tells a series of each of *metrics*."""
    for metric in metrics:
        series = re.compile(rf"^{metric}[ {{]", re.MULTILINE)
        until(lambda series=series: series.search(scraped(api)) is not None, f"{metric} is never exposed")  # type: ignore[misc]
