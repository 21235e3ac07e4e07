"""A feed that dictionaries read: they have what the last completed run left, under a version of their own."""

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
FRESH_WITHIN = 5.0  # seconds; an announcement takes milliseconds, on a busy machine more; the reconcile is switched off
FED = [{"tenant": dictionary.tenant_id, "code": dictionary.dict_code} for dictionary in (PRICES, OTHERS)]


@pytest.fixture
async def harness(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestHarness]:
    consolidation = {"set_size": 20, "set_concurrency": 1}
    told: dict[str, Any] = {"refdata": READS, "dictionaries": FED, "consolidation": consolidation}
    async with harvest_harness(database_url, tmp_path, **told) as harness:
        yield harness


async def loaded(harness: HarvestHarness, target: DictionaryKey = PRICES) -> tuple[int, dict[str, Any]]:
    """What a pod would serve now, and under which version."""
    found = await DictionaryCatalogue(harness.settings.refdata).get(target).provider.load_all(harness.db, target)
    return found.version, {key: json.loads(text) for key, text in found.items.items()}


def served(harness: HarvestHarness) -> dict[str, Any]:
    """What has to be served of the source as it is."""
    truth = {key: expected_record(record) for key, record in harness.source.truth().items()}
    return {key: made.price if made.price is None else float(made.price) for key, made in truth.items()}


def prices(items: dict[str, Any]) -> dict[str, Any]:
    return {key: item["price"] for key, item in items.items()}


async def test_every_run_that_changes_something_is_a_version(harness: HarvestHarness) -> None:
    """R2, H8: what is new, changed and gone is there at once, for every tenant; no change is no version."""
    async with harness.run_workers():
        await harness.complete_run()
        version, items = await loaded(harness)
        assert (version, prices(items)) == (1, served(harness))
        await harness.complete_run(full=True)
        assert (await loaded(harness))[0] == 1
        harness.source.change(updates=20, inserts=5, deletes=7)
        await harness.complete_run(full=True)
        for target in (PRICES, OTHERS):
            version, items = await loaded(harness, target)
            assert (version, prices(items)) == (2, served(harness))
    told = await harness.db.fetch(
        "SELECT version, source, items FROM outbox_event WHERE tenant_id = 'acme' ORDER BY version"
    )
    assert [tuple(row) for row in told] == [(1, f"harvest {FEED}", 300), (2, f"harvest {FEED}", 32)]


async def test_whoever_reads_the_table_gets_the_version(harness: HarvestHarness) -> None:
    """R2, R32: a tenant that the feed does not name reads the same records: its version grows with them."""
    other = DictionaryKey("initech", "STONES")
    async with harness.run_workers():
        before = await loaded(harness, other)
        await harness.complete_run()
        after = await loaded(harness, other)
        assert (before[0], after[0]) == (0, 1)
        harness.source.change(updates=5)
        await harness.complete_run()
        assert (await loaded(harness, other))[0] == 2


async def test_a_dictionary_that_is_named_later_has_a_version_after_the_next_run(
    harness: HarvestHarness, database_url: str, tmp_path: Path
) -> None:
    """R2: though that run changed nothing; those that had one keep it."""
    async with harness.run_workers():
        await harness.complete_run()
    later = DictionaryKey("initech", "STONES")
    named = [*FED, {"tenant": later.tenant_id, "code": later.dict_code}]
    settings = harvest_settings(database_url, harness.source.url, tmp_path, refdata=READS, dictionaries=named)
    async with open_harness(settings, harness.source) as again, again.run_workers():
        await again.complete_run(full=True)
        assert [(await loaded(again, dictionary))[0] for dictionary in (PRICES, OTHERS, later)] == [1, 1, 1]


async def test_dictionaries_are_not_held_while_the_store_is_written_to(
    harness: HarvestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H8: whoever pins or redefines one does not wait for object storage."""
    save, held = watermark.save, []

    async def watched(*args: Any) -> None:
        async with harness.platform.db.transaction() as tx:
            held.append(await tx.fetch("SELECT version FROM dictionary_meta FOR UPDATE NOWAIT"))
        await save(*args)

    async with harness.run_workers():
        await harness.complete_run()
        monkeypatch.setattr(watermark, "save", watched)
        harness.source.change(updates=5)
        await harness.complete_run()
    assert [[row["version"] for row in rows] for rows in held] == [[1, 1]]


async def test_the_relay_is_woken_by_the_run(harness: HarvestHarness) -> None:
    """R15: who announces versions hears of a new one at the commit, and need not look by itself."""
    async with listen(harness.db.dsn, CHANNEL) as inbox, harness.run_workers():
        assert isinstance(await inbox.get(), MissedNotifications)  # from here on everything is heard
        await harness.complete_run()
        assert await inbox.wait(10)


async def test_pods_hear_of_a_completed_run_without_a_reconcile(
    harness: HarvestHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R15, R19: every pod loads a feed's dictionary from the announcement alone; the reconcile is switched off."""
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
                assert prices({item["key"]: item["value"] for item in answer.json["items"]}) == served(harness)
            harness.source.change(updates=10, inserts=5)
    assert [entry for entry in logged if entry["event"] == "invalidation_rejected"] == []


def _make_folder(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def _serves(pod: PodHarness, version: int) -> bool:
    answer = await pod.get("STONES/all?limit=1")
    return (answer.status, answer.source, answer.version) == (200, "memory", version)


async def test_a_feed_that_no_dictionary_reads_is_kept_once(database_url: str, tmp_path: Path) -> None:
    """H7: its records are not copied."""
    async with harvest_harness(database_url, tmp_path) as plain, plain.run_workers():
        await plain.complete_run()
        assert await plain.db.fetchval("SELECT count(*) FROM published_record") == 0


async def test_nothing_of_a_run_that_fails_is_read(harness: HarvestHarness, tmp_path: Path) -> None:
    """H11: its canonical records have changed, set by set; dictionaries read what was before, and then all of it."""
    async with harness.run_workers():
        await harness.complete_run()
        before = await loaded(harness)
        blob = tmp_path / "objects" / "harvest" / FEED / "watermark.json"
        blob.unlink()
        blob.mkdir()
        harness.source.change(updates=60, inserts=5)
        failed = await harness.wait_for_end(await harness.start(), HarvestRunState.FAILED)
        assert (await harness.read_canonical()).keys() != before[1].keys()
        assert await loaded(harness) == before
        blob.rmdir()
        await harness.harvest.retry(failed["run_id"], "somebody")
        await harness.wait_for_end(failed["run_id"])
        version, items = await loaded(harness)
        assert (version, prices(items)) == (2, served(harness))


async def test_a_version_has_one_content_while_a_run_is_consolidated(
    harness: HarvestHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R2: a label never lies: whoever loads between two sets of a run gets what was before it."""
    step, seen = worker._SetConsolidation.step, []

    async def watched(sets: worker._SetConsolidation, after: str) -> Any:
        done = await step(sets, after)
        seen.append((await loaded(harness), len(await harness.read_canonical())))
        return done

    async with harness.run_workers():
        await harness.complete_run()
        before = await loaded(harness)
        monkeypatch.setattr(worker._SetConsolidation, "step", watched)
        harness.source.change(updates=100, inserts=100)
        await harness.complete_run()
    assert len({canonical for _, canonical in seen}) > 3  # the canonical records came piece by piece
    assert [state for state, _ in seen if state != before] == []
    assert prices((await loaded(harness))[1]) == served(harness)


@pytest.fixture
def source() -> Iterator[SimulatorProcess]:
    process = SimulatorProcess(200)
    yield process
    process.stop()


@pytest.mark.full
def test_pods_serve_what_a_run_has_published(source: SimulatorProcess, database_url: str, tmp_path: Path) -> None:
    """R2, R19: by configuration alone: a completed run is in every pod's memory, and its version can be asked for."""
    config = {
        "database": {"url": database_url},
        "refdata": READS,
        "harvest": {"feeds": {FEED: {**feed(source.url), "dictionaries": FED[:1]}}},
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
    answer = httpx.get(f"{up.query}/v1/tenants/acme/dictionaries/STONES/all", params={"limit": 1000})
    return len(answer.json()["items"]) if answer.headers.get("x-data-source") == "memory" else 0


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
    fed = {**feed("http://127.0.0.1:1"), "dictionaries": FED[:1]}
    write_config(tmp_path, {"refdata": refdata, "harvest": {"feeds": {FEED: fed}}})
    with pytest.raises(BadConfig, match=message) as error:
        load_settings(tmp_path / "penstock.yaml", {})
    assert f"harvest.feeds.{FEED}.dictionaries.0" in str(error.value.as_dict())
