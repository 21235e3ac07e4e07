"""A feed that dictionaries read: they serve the records of the last completed run, under their own version."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import structlog.testing

from penstock.harvest.consolidate import watermark, worker
from penstock.harvest.contract import HarvestRunState
from penstock.kernel.db.listener import MissedNotifications, listen
from penstock.kernel.errors import BadConfig
from penstock.refdata.dictionaries.catalogue import DictionaryCatalogue
from penstock.refdata.model import DictionaryKey
from penstock.refdata.pod.load.loader import PodLoader
from penstock.refdata.runtime import run_relay
from penstock.refdata.store import CHANNEL
from penstock.settings import load_settings
from tests.harvest.harness import FEED, HarvestHarness, expected_record, harvest_harness, harvest_settings, open_harness
from tests.harvest.simulator_process import SimulatorProcess
from tests.harvest.stepper import feed
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.support.processes import Up, penstock
from tests.support.settings import write_config
from tests.support.wait import becomes, until

PRICES, OTHERS = DictionaryKey("acme", "STONES"), DictionaryKey("globex", "STONES")
LOAD = f"""
    select key as k, fields || jsonb_build_object('price', price) as v from published_record
    where feed = '{FEED}' and :tenantId in ('acme', 'globex', 'initech')
"""
READS = {"dictionaries": [{"code": "STONES", "loadSql": LOAD}]}
FRESH_WITHIN = 5.0  # seconds; an announcement takes milliseconds; reconciliation is disabled
SINKS = [{"tenant": dictionary.tenant_id, "code": dictionary.dict_code} for dictionary in (PRICES, OTHERS)]


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    consolidation = {"set_size": 20, "set_concurrency": 1}
    options: dict[str, Any] = {"refdata": READS, "dictionaries": SINKS, "consolidation": consolidation}
    async with harvest_harness(database_url, tmp_path, **options) as harness:
        yield harness


async def load_items(harness: HarvestHarness, target: DictionaryKey = PRICES) -> tuple[int, dict[str, Any]]:
    """Return the version and the items that a pod would load now."""
    snapshot = await DictionaryCatalogue(harness.settings.refdata).get(target).provider.load_all(harness.db, target)
    return snapshot.version, {key: json.loads(text) for key, text in snapshot.items.items()}


def expected_prices(harness: HarvestHarness) -> dict[str, Any]:
    """Return the prices that must be served for the present records of the source."""
    truth = {key: expected_record(record) for key, record in harness.source.read_truth().items()}
    return {key: None if record.price is None else float(record.price) for key, record in truth.items()}


def prices(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item["price"] for key, item in items.items()}


async def test_every_run_with_changes_is_a_version(harness: HarvestHarness) -> None:
    """R2, H8: a run with changes is one version for every tenant; a run without changes creates no version."""
    async with harness.run_workers():
        await harness.complete_run()
        version, items = await load_items(harness)
        assert (version, prices(items)) == (1, expected_prices(harness))
        await harness.complete_run(full=True)
        assert (await load_items(harness))[0] == 1
        harness.source.change_records(updates=20, inserts=5, deletes=7)
        await harness.complete_run(full=True)
        for target in (PRICES, OTHERS):
            version, items = await load_items(harness, target)
            assert (version, prices(items)) == (2, expected_prices(harness))
    events = await harness.db.fetch(
        "SELECT version, source, items FROM outbox_event WHERE tenant_id = 'acme' ORDER BY version"
    )
    assert [tuple(row) for row in events] == [(1, f"harvest {FEED}", 300), (2, f"harvest {FEED}", 32)]


async def test_every_tenant_of_the_dictionary_gets_the_version(harness: HarvestHarness) -> None:
    """R2, R32: a tenant that the feed does not name reads the same records, so it gets the versions too."""
    other = DictionaryKey("initech", "STONES")
    async with harness.run_workers():
        before = await load_items(harness, other)
        await harness.complete_run()
        after = await load_items(harness, other)
        assert (before[0], after[0]) == (0, 1)
        harness.source.change_records(updates=5)
        await harness.complete_run()
        assert (await load_items(harness, other))[0] == 2


async def test_new_dictionary_gets_a_version_with_the_next_run(
    harness: HarvestHarness, database_url: str, tmp_path: Path
) -> None:
    """R2: a new dictionary gets a version even from a run without changes; the others keep theirs."""
    async with harness.run_workers():
        await harness.complete_run()
    later = DictionaryKey("initech", "STONES")
    sinks = [*SINKS, {"tenant": later.tenant_id, "code": later.dict_code}]
    settings = harvest_settings(database_url, harness.source.url, tmp_path, refdata=READS, dictionaries=sinks)
    async with open_harness(settings, harness.source) as second, second.run_workers():
        await second.complete_run(full=True)
        assert [(await load_items(second, dictionary))[0] for dictionary in (PRICES, OTHERS, later)] == [1, 1, 1]


async def test_dictionaries_are_not_locked_during_the_write_to_the_storage(
    harness: HarvestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H8: a change of a dictionary does not wait for object storage."""
    save, locked = watermark.save, []

    async def record_save(*args: Any) -> None:
        async with harness.platform.db.transaction() as tx:
            locked.append(await tx.fetch("SELECT version FROM dictionary_meta FOR UPDATE NOWAIT"))
        await save(*args)

    async with harness.run_workers():
        await harness.complete_run()
        monkeypatch.setattr(watermark, "save", record_save)
        harness.source.change_records(updates=5)
        await harness.complete_run()
    assert [[row["version"] for row in rows] for rows in locked] == [[1, 1]]


async def test_run_wakes_the_relay(harness: HarvestHarness) -> None:
    """R15: the relay is notified of a new version at the commit, without polling."""
    async with listen(harness.db.dsn, CHANNEL) as inbox, harness.run_workers():
        assert isinstance(await inbox.get(), MissedNotifications)  # all later notifications are received
        await harness.complete_run()
        assert await inbox.wait(10)


async def test_pods_load_a_completed_run_from_its_announcement(
    harness: HarvestHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, R19: every pod loads the dictionary after the announcement; reconciliation is disabled."""
    # Version 1 may come from the first read, which loads the dictionary. Version 2 comes from its announcement only.
    async with AsyncExitStack() as stack:
        logged = stack.enter_context(structlog.testing.capture_logs())
        pods = [
            await stack.enter_async_context(running_pod(harness.settings, _make_folder(tmp_path / f"pod{number}")))
            for number in range(2)
        ]
        monkeypatch.setattr(PodLoader, "reconcile", AsyncMock())
        await stack.enter_async_context(harness.run_workers())
        await stack.enter_async_context(run_relay(pods[0].harness.platform))
        for version in (1, 2):
            await harness.complete_run()
            for pod in pods:
                await becomes(partial(_serves, pod, version), f"version {version} in memory", within=FRESH_WITHIN)
                answer = await pod.get("STONES/all?limit=1000")
                assert prices({item["key"]: item["value"] for item in answer.json["items"]}) == expected_prices(harness)
            harness.source.change_records(updates=10, inserts=5)
    assert [entry for entry in logged if entry["event"] == "invalidation_rejected"] == []


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def _serves(pod: PodHarness, version: int) -> bool:
    answer = await pod.get("STONES/all?limit=1")
    return (answer.status, answer.source, answer.version) == (200, "memory", version)


async def test_feed_without_dictionaries_is_not_copied(database_url: str, tmp_path: Path) -> None:
    """H7: the records of a feed without dictionaries are not copied to `published_record`."""
    async with harvest_harness(database_url, tmp_path) as harness, harness.run_workers():
        await harness.complete_run()
        assert await harness.db.fetchval("SELECT count(*) FROM published_record") == 0


async def test_failed_run_is_not_visible(harness: HarvestHarness, tmp_path: Path) -> None:
    """H11: canonical records change set by set; dictionaries read the state before the run until it completes."""
    async with harness.run_workers():
        await harness.complete_run()
        before = await load_items(harness)
        blob = tmp_path / "objects" / "harvest" / FEED / "watermark.json"
        blob.unlink()
        blob.mkdir()
        harness.source.change_records(updates=60, inserts=5)
        failed = await harness.wait_for_end(await harness.start(), HarvestRunState.FAILED)
        assert (await harness.read_canonical()).keys() != before[1].keys()
        assert await load_items(harness) == before
        blob.rmdir()
        await harness.harvest.retry(failed["run_id"], "operator")
        await harness.wait_for_end(failed["run_id"])
        version, items = await load_items(harness)
        assert (version, prices(items)) == (2, expected_prices(harness))


async def test_version_has_one_content_during_consolidation(
    harness: HarvestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: a pod that loads between two sets of a run gets the state before the run."""
    step, seen = worker._SetConsolidation.step, []

    async def record_step(sets: worker._SetConsolidation, after: str) -> Any:
        result = await step(sets, after)
        seen.append((await load_items(harness), len(await harness.read_canonical())))
        return result

    async with harness.run_workers():
        await harness.complete_run()
        before = await load_items(harness)
        monkeypatch.setattr(worker._SetConsolidation, "step", record_step)
        harness.source.change_records(updates=100, inserts=100)
        await harness.complete_run()
    assert len({canonical for _, canonical in seen}) > 3  # the canonical records changed in several steps
    assert [state for state, _ in seen if state != before] == []
    assert prices((await load_items(harness))[1]) == expected_prices(harness)


@pytest.fixture
def source() -> Iterator[SimulatorProcess]:
    process = SimulatorProcess(200)
    yield process
    process.stop()


@pytest.mark.full
def test_pods_serve_what_a_run_has_published(source: SimulatorProcess, database_url: str, tmp_path: Path) -> None:
    """R2, R19: with configuration only, a completed run is in the memory of every pod under its version."""
    config = {
        "database": {"url": database_url},
        "refdata": READS,
        "harvest": {"feeds": {FEED: {**feed(source.url), "dictionaries": SINKS[:1]}}},
    }
    write_config(tmp_path, config)
    with Up(tmp_path) as up:
        done = penstock("harvest", "run", FEED, "--wait", "--url", up.api, cwd=tmp_path)
        assert done.code == 0, done.err
        items = httpx.get(
            f"{up.query}/v1/tenants/acme/dictionaries/STONES/all",
            params={"limit": 1000},
            headers={"X-Min-Version": "1"},
        )
        assert (items.status_code, len(items.json()["items"]), items.headers["x-dict-version"]) == (200, 200, "1")
        history = penstock("dict", "history", "acme", "STONES", "--url", up.api, cwd=tmp_path).out
        assert f"harvest {FEED}" in history
        until(lambda: _count(up) == 200, "the pod has it in memory")


def _count(up: Up) -> int:
    response = httpx.get(f"{up.query}/v1/tenants/acme/dictionaries/STONES/all", params={"limit": 1000})
    return len(response.json()["items"]) if response.headers.get("x-data-source") == "memory" else 0


@pytest.mark.parametrize(
    ("refdata", "message"),
    [
        ({}, "refdata.dictionaries has no dictionary STONES"),
        ({"dictionaries": [{"code": "STONES"}]}, "it needs `loadSql` and must not have `apply`"),
        ({**READS, "tenants": ["globex"]}, "refdata.tenants has no tenant acme"),
        ({"dictionaries": [{**READS["dictionaries"][0], "retainVersions": 3}]}, "apply to SNAPSHOT commands only"),
        ({"dictionaries": [{**READS["dictionaries"][0], "maxDropPercent": 10}]}, "apply to SNAPSHOT commands only"),
        ({**READS, "postgres": {"jdbcUrl": "jdbc:postgresql://db/other", "username": "x"}}, "another database"),
    ],
)
def test_dictionary_that_cannot_read_a_feed_is_invalid(tmp_path: Path, refdata: Any, message: str) -> None:
    """R1: the error names the setting, before anything starts."""
    section = {**feed("http://127.0.0.1:1"), "dictionaries": SINKS[:1]}
    write_config(tmp_path, {"refdata": refdata, "harvest": {"feeds": {FEED: section}}})
    with pytest.raises(BadConfig, match=message) as error:
        load_settings(tmp_path / "penstock.yaml", {})
    assert f"harvest.feeds.{FEED}.dictionaries.0" in str(error.value.as_dict())
