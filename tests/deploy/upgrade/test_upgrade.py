"""R27: two versions on one database, for as long as a rolling update and its way back take."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from penstock import __version__
from penstock.kernel.tasks.periodic import run_periodically
from tests.deploy.upgrade import upgrade_versions
from tests.deploy.upgrade.test_migrations import recorded
from tests.deploy.upgrade.upgrade_versions import NEXT, PARTS, Version, VersionRole
from tests.deploy.upgrade.upgrade_workload import BACK, FORWARD, loaded, upgrade_workload
from tests.harvest.simulator_process import SimulatorProcess
from tests.harvest.stepper import FEED, feed
from tests.services.postgres import fresh_database
from tests.support.processes import penstock_here
from tests.support.settings import write_config
from tests.support.soak import Campaign, examples
from tests.support.wait import becomes

RECORDS = 240
SHARDS = list(range(60))
ITEMS = 96
PIPELINE = "/api/v1/pipeline"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    with upgrade_versions.before(tmp_path_factory.mktemp("before")) as version:
        yield version


@pytest.fixture(scope="module")
def following(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Version]:
    with upgrade_versions.next_one(tmp_path_factory.mktemp("next")) as version:
        yield version


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_refdata_is_upgraded_and_rolled_back_under_load(
    before: Version, following: Version, postgres_url: str, tmp_path: Path, campaign: Campaign
) -> None:
    """R27: role by role to a version with a newer schema, and back: no write is lost or doubled, none is unreadable."""
    campaign.counts_items = True
    async with fresh_database(postgres_url, empty=True) as url, upgrade_workload(tmp_path, url) as workload:
        await workload.start(before, *FORWARD)
        async with loaded(workload):
            for _ in range(examples(1, soak=10)):
                for name in FORWARD:
                    await workload.replace(following, name)
                await workload.check()
                for name in BACK:
                    await workload.replace(before, name)
                await workload.check()
                campaign.end_round(faults=len(FORWARD) + len(BACK))
        await workload.check_at_rest()


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_the_other_parts_are_shared_by_two_versions(
    before: Version, following: Version, postgres_url: str, tmp_path: Path
) -> None:
    """R27: rows, steps and partitions are handed out to old and new, each once, whichever of them began the work."""
    source = SimulatorProcess(RECORDS)
    try:
        async with fresh_database(postgres_url, empty=True) as url, UpgradeClient() as client:
            written(tmp_path, url, source)
            with up(before, tmp_path) as old, ExitStack() as stack:
                async with client.tracking(old):  # all the while the newer one changes the tables
                    new = await asyncio.to_thread(stack.enter_context, up(following, tmp_path))
                    await client.more_of_it()
                assert await client.versions(old, new) == [__version__, NEXT]
                await shares_rows(client, old, new)
                await shares_steps(client, tmp_path, old, new)
                await shares_partitions(client, url, source, old, new)
                assert [old.stop(), new.stop()] == [0, 0]
                assert len(client.refused) <= 2  # not each session, nor each statement
            assert "Traceback" not in old.log + new.log
    finally:
        source.stop()


@pytest.mark.full
async def test_the_older_program_tells_of_the_newer_schema(
    before: Version, following: Version, postgres_url: str, tmp_path: Path
) -> None:
    """R27: it names the unknown migrations, waits for nothing, and changes nothing."""
    async with fresh_database(postgres_url) as url:
        write_config(tmp_path, {"database": {"url": url}})
        waits = ("db", "wait", "--timeout", "0.5", "--json")
        late = await asyncio.to_thread(following.run, *waits, folder=tmp_path)
        assert late.code == 124
        applied = await asyncio.to_thread(following.run, "db", "migrate", "--json", folder=tmp_path)
        newer = json.loads(applied.out)["applied"]
        assert sorted(row.split()[0] for row in newer) == sorted(PARTS)
        dry_run = ("db", "migrate", "--dry-run", "--json")
        for done, unknown in (
            (await asyncio.to_thread(before.run, *dry_run, folder=tmp_path), [*newer, *since_the_first_release()]),
            (await asyncio.to_thread(penstock_here, *dry_run, cwd=tmp_path), newer),
        ):
            assert json.loads(done.out) == {"dryRun": True, "pending": [], "newer": sorted(unknown)}
            assert "has migrations of a newer release" in done.err
        for command in (waits, ("doctor", "--json")):
            done = await asyncio.to_thread(penstock_here, *command, cwd=tmp_path)
            assert done.code == 0, done
        assert "a newer release" in done.out


def since_the_first_release() -> list[str]:
    """The migrations that the version before does not know, as programs name them."""
    later = [Path(name) for name, (_, when) in recorded().items() if when == "later"]
    return [f"{file.parts[0]} {' '.join(file.stem.split('_', 1))}" for file in later]


@pytest.mark.full
def test_the_older_program_refuses_settings_it_does_not_know(before: Version, tmp_path: Path) -> None:
    """R27: why a setting is set after the upgrade, and taken out before the way back."""
    write_config(tmp_path, {"server": {"setting_of_next": 1}})
    done = before.run("db", "migrate", "--dry-run", folder=tmp_path)
    assert done.code == 3
    assert "server.setting_of_next" in done.err


class UpgradeClient(httpx.AsyncClient):
    """Requests that must succeed."""

    def __init__(self) -> None:
        super().__init__(timeout=60)
        self.refused: list[str] = []
        self._rounds = 0
        self._errors: list[str] = []

    async def ask(self, role: VersionRole, path: str, body: Any) -> Any:
        """Return the response; a statement that was prepared before a table changed fails once, and is sent again."""
        answer = await self.post(f"{role.api}{path}", json=body)
        if answer.status_code == 503 and "cached statement" in answer.text:
            self.refused.append(path)
            answer = await self.post(f"{role.api}{path}", json=body)
        assert answer.status_code < 300, f"{answer.status_code} {answer.text} {role.log}"
        return answer.json()

    async def versions(self, *roles: VersionRole) -> list[str | None]:
        """Return the versions in the metrics of *roles*."""
        pages = [(await self.get(f"{role.api}/actuator/prometheus")).text for role in roles]
        found = [[line for line in page.splitlines() if line.startswith("penstock_build_info{")] for page in pages]
        return [lines[0].partition('version="')[2].partition('"')[0] if lines else None for lines in found]

    @asynccontextmanager
    async def tracking(self, role: VersionRole) -> AsyncIterator[None]:
        """Register, claim and report files meanwhile."""

        async def track_file() -> None:
            try:
                await self.register(role, f"alone{self._rounds}", [0])
                assert len(await self.work(role, "alone")) == 1
                self._rounds += 1
            except (AssertionError, httpx.HTTPError) as error:
                self._errors.append(str(error))

        async with run_periodically("tracking", track_file, timedelta(milliseconds=50)):
            await self.more_of_it()
            yield
            await self.more_of_it()

    async def more_of_it(self) -> None:
        wanted = self._rounds + 3

        async def has_come() -> bool:
            return self._rounds >= wanted or bool(self._errors)

        await becomes(has_come, "rows are worked on")
        assert self._errors == []

    async def register(self, role: VersionRole, name: str, shards: list[int]) -> None:
        await self.ask(role, f"{PIPELINE}/files/register", {"filename": name, "shards": shards})
        await self.ask(role, f"{PIPELINE}/stages/event-ingest/done", {"filename": name})

    async def work(self, role: VersionRole, worker: str) -> list[tuple[str, int]]:
        """Claim a few rows, and have them done."""
        claim = {"worker": worker, "limit": 5, "lease_seconds": 60}
        held = (await self.ask(role, f"{PIPELINE}/queues/shard-splitter/claim", claim))["items"]
        done = [
            {"filename": row["filename"], "shard": row["shard"], "fence": row["fence"], "outcome": "done"}
            for row in held
        ]
        if done:
            done = await self.ask(role, f"{PIPELINE}/stages/shard-splitter/report", done)
            assert {result["result"] for result in done["results"]} == {"settled"}, done
        return [(row["filename"], row["shard"]) for row in held]


async def shares_rows(client: UpgradeClient, old: VersionRole, new: VersionRole) -> None:
    """Tracking: the rows of a file are claimed through both releases, and each is done once."""
    for role, name in ((old, "of-old"), (new, "of-new")):
        await client.register(role, name, SHARDS)

    async def drain(role: VersionRole, worker: str) -> list[tuple[str, int]]:
        taken: list[tuple[str, int]] = []
        while held := await client.work(role, worker):
            taken += held
        return taken

    by_old, by_new = await asyncio.gather(drain(old, "old"), drain(new, "new"))
    assert Counter(by_old + by_new) == Counter((name, shard) for name in ("of-old", "of-new") for shard in SHARDS)
    assert by_old
    assert by_new


async def shares_steps(client: UpgradeClient, folder: Path, old: VersionRole, new: VersionRole) -> None:
    """Flows: a run that either release started is executed by both, each step once."""
    for role, run_id in ((old, "of-old"), (new, "of-new")):
        file = folder / f"{run_id}.done"
        call: dict[str, Any] = {
            "call": "tests.deploy.upgrade.upgrade_steps:do_it",
            "args": {"item": "${item}", "file": str(file)},
        }
        each = {"kind": "map", "over": list(range(ITEMS)), "do": {"kind": "python", "inputs": call}}
        last = {"kind": "python", "dependsOn": ["each"], "inputs": {**call, "args": {**call["args"], "item": ITEMS}}}
        await client.ask(role, "/api/v1/flow_runs", {"runId": run_id, "steps": {"each": each, "last": last}})

        async def has_succeeded(run_id: str = run_id) -> bool:
            return bool((await client.get(f"{old.api}/api/v1/flow_runs/{run_id}")).json()["status"] == "SUCCEEDED")

        await becomes(has_succeeded, "the run succeeds")
        lines = [line.split() for line in file.read_text().splitlines()]
        assert sorted(int(item) for item, _ in lines) == list(range(ITEMS + 1))
        assert {int(pid) for _, pid in lines} == {old.pid, new.pid}


async def shares_partitions(
    client: UpgradeClient, url: str, source: SimulatorProcess, old: VersionRole, new: VersionRole
) -> None:
    """Harvest: the partitions of a run are fetched by both, each record once."""
    run_id = (await client.ask(new, f"/api/v1/harvest/feeds/{FEED}/runs", {}))["runId"]

    async def is_completed() -> bool:
        return bool((await client.get(f"{old.api}/api/v1/harvest/runs/{run_id}")).json()["state"] == "completed")

    await becomes(is_completed, "the run completes")
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT worker_id, records_processed FROM worker_runs")
        keys = await connection.fetch("SELECT key FROM canonical_record")
    finally:
        await connection.close()
    assert {int(row["worker_id"].rpartition(":")[2]) for row in rows} == {old.pid, new.pid}
    assert sum(row["records_processed"] for row in rows) == RECORDS
    assert sorted(row["key"] for row in keys) == sorted(source.keys())


def up(version: Version, folder: Path) -> VersionRole:
    ports = ("--port", "0", "--query-port", "0")
    return version.start("up", "--data-dir", str(folder / version.name), *ports, folder=folder)


def written(folder: Path, url: str, source: SimulatorProcess) -> None:
    source.fail(latency_ms=30)
    section = {**feed(source.url), "pages_per_turn": 1, "partitions": {"count": 12, "min_records": 10}, "page_size": 10}
    config = {
        "database": {"url": url, "pool_size": 4},
        "storage": {"url": (folder / "objects").as_uri()},
        "harvest": {"workers": 1, "feeds": {FEED: section}},
        "flows": {"python": ["tests.deploy.upgrade.upgrade_steps"], "work": {"concurrency": 8}},
    }
    write_config(folder, config)
