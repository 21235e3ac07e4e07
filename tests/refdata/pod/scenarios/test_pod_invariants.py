"""R17–R32: guarantees of a pod that each depend on a single line, found by mutation of that line."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict, Transient
from penstock.kernel.http.auth import Principal
from penstock.refdata import store
from penstock.refdata.contract import UpdateState, decode_command
from penstock.refdata.model import DictionaryKey, VersionStamp
from penstock.refdata.pod.ipc import BarrierRequest
from penstock.refdata.pod.load import barrier
from penstock.refdata.pod.load.auditor import AuditResult, PodAuditor
from penstock.refdata.pod.load.dictionary_state import DictionaryState
from penstock.refdata.pod.memory.writer import MemoryWriter
from tests.refdata.harness import (
    DOCUMENT,
    OTHER,
    RefdataHarness,
    command,
    create_schemas,
    dictionaries,
    opened,
    refdata_settings,
    upsert,
)
from tests.refdata.pod.conftest import Pods
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.support.wait import becomes

ABSURD = 10**12
SELDOM = {"reconcileEvery": "PT60S"}  # without reconciliation during the test
LOOSE = DictionaryKey("acme", "LOOSE")
LIMIT = 16 * 1024 * 1024
HOLD = """
import sys
from pathlib import Path

from penstock.refdata.pod.memory.reader import MemoryView

with MemoryView.open(Path(sys.argv[1]), int(sys.argv[2])):
    print("reading", flush=True)
    sys.stdin.read()
"""


async def test_a_running_query_does_not_answer_later_readers(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: the result of a query that started before a commit does not refuse readers that arrive after it."""
    has_read, may_tell, ask = asyncio.Event(), asyncio.Event(), store.read_visible_version

    async def slow(connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
        version = await ask(connection, target)
        has_read.set()
        await may_tell.wait()
        return version

    async with pods(**SELDOM, barrierWaitMs=1000, fallbackTimeoutMs=60_000) as pod:
        monkeypatch.setattr(store, "read_visible_version", slow)
        early = asyncio.create_task(pod.get("LOOSE/items/a", min_version=ABSURD))
        async with asyncio.timeout(20):
            await has_read.wait()
        version = await pod.put("LOOSE", {"a": 1})
        late = asyncio.create_task(pod.get("LOOSE/items/a", min_version=version))
        await pod.wait_for_readers(2)
        may_tell.set()
        assert ((await late).status, (await late).version) == (200, version)
        assert (await early).status == 409


async def test_sequential_readers_cause_few_queries(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: repeated reads of a missing version do not overload the primary."""
    count = 0

    async def quick(connection: Connection, target: DictionaryKey) -> tuple[int, int | None]:
        nonlocal count
        count += 1
        return 0, None

    monkeypatch.setattr(store, "read_visible_version", quick)
    assert pod.pod.request_handler._services is not None
    began = time.monotonic()
    for _ in range(30):
        with pytest.raises(Conflict):
            await pod.pod.request_handler._services[1].reach(BarrierRequest(*LOOSE, ABSURD, "items", ["a"]))
    assert count <= (time.monotonic() - began) / barrier._QUERY_INTERVAL + 2


async def test_a_fallback_triggers_a_load(pods: Pods) -> None:
    """R21: after a fallback the version is loaded into memory, even without a notification."""
    async with pods(**SELDOM, barrierWaitMs=0) as pod:
        version = await pod.put("LOOSE", {"a": 1})
        assert (await pod.get("LOOSE/items/a", min_version=version)).version == version

        async def is_held() -> bool:
            return (await pod.get("LOOSE/version")).version == version

        await becomes(is_held, "the load that the fallback forced", within=15)


async def test_a_dictionary_that_cannot_be_loaded_has_an_age(pod: PodHarness) -> None:
    """R23: the age is in the responses and in the metric until a load succeeds; other dictionaries have no age."""
    await pod.put_and_load("PRODUCT", {"1": {"brand": 1, "price": 1}})
    await pod.harness.db.execute("ALTER VIEW all_products RENAME TO no_products")
    await pod.put("PRODUCT", {"2": {"brand": 1, "price": 1}})

    async def is_old() -> bool:
        found = await pod.get("PRODUCT/items/1")
        assert (found.status, found.version) == (200, 1)
        return "X-Data-Age" in found.headers and _age(pod) > 0

    await becomes(is_old, "its age", within=15)
    assert "X-Data-Age" in (await pod.get("PRODUCT/items/none")).headers
    assert "X-Data-Age" not in (await pod.get("CURRENCY/version")).headers
    await pod.harness.db.execute("ALTER VIEW no_products RENAME TO all_products")

    async def is_fresh() -> bool:
        found = await pod.get("PRODUCT/version")
        return found.version == 2 and "X-Data-Age" not in found.headers and _age(pod) == 0

    await becomes(is_fresh, "the new version")


def _age(pod: PodHarness) -> float:
    age = pod.pod._telemetry.registry.get_sample_value("penstock_refdata_data_age_seconds")
    assert age is not None
    return age


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryWriter]:
    made = MemoryWriter(tmp_path, limit=LIMIT)
    generation = made.begin_generation()
    made.publish(LOOSE, generation, VersionStamp(1, 1), made.fill(generation, [("a", "1"), ("b", "2")]))
    yield made
    made.close()


def test_the_age_starts_at_the_first_failure(memory: MemoryWriter) -> None:
    """R23: later failures do not reset the age, and every process is notified of the first one."""
    before = memory.counters.sequence
    memory.mark_stale(LOOSE, 10.0)
    assert memory.counters.sequence > before
    memory.mark_stale(LOOSE, 20.0)
    assert memory.get_headers()[LOOSE].stale_since == 10.0


def test_a_loader_without_progress_makes_data_old(memory: MemoryWriter) -> None:
    """R23: if the loader reports nothing about the primary, the data counts as old."""
    memory.counters.set_primary_seen()
    memory.counters.cells[1] -= 100_000
    assert memory.counters.measure_primary_unseen(200.0) == 0
    assert 100 <= memory.counters.measure_primary_unseen(50.0) < 110


def test_a_dropped_dictionary_is_removed_everywhere(memory: MemoryWriter) -> None:
    """R1, R29: the serving processes are notified, and the memory is freed."""
    before = memory.counters.sequence
    memory.drop(LOOSE)
    assert memory.counters.sequence > before
    while memory.free():
        pass
    assert memory._env.stat()["entries"] == 0


def test_a_killed_reader_does_not_block_freeing(memory: MemoryWriter, tmp_path: Path) -> None:
    """R29: memory is freed even if a reader was killed."""
    reading = [sys.executable, "-c", HOLD, str(tmp_path), str(LIMIT)]
    with subprocess.Popen(reading, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        assert str(reader.pid) in memory._env.readers()
        reader.kill()
    memory.drop(LOOSE)
    assert str(reader.pid) not in memory._env.readers()


async def test_a_grant_ends_with_its_token(pod: PodHarness) -> None:
    """R25: a stored grant does not outlive its token."""
    router = pod.server.router
    end = router.now + 0.5
    router.grant(b"x", Principal("reader", "acme", {"exp": end}))
    assert router.grants[b"x"].until == end


async def test_a_failed_audit_does_not_stop_others(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: every dictionary is compared, and each result is counted."""
    compare = PodAuditor._compare

    async def broken(self: PodAuditor, state: DictionaryState) -> AuditResult:
        if state.target.dict_code == "COUNTRY":
            raise Transient("DATABASE_DOWN", "down")
        return await compare(self, state)

    monkeypatch.setattr(PodAuditor, "_compare", broken)
    assert pod.pod.request_handler._services is not None
    await pod.pod.request_handler._services[2].audit_all()
    targets = [state.target for state in pod.pod._list_states()]
    for code in {target.dict_code for target in targets}:
        labels = {"dict_code": code, "result": "failed" if code == "COUNTRY" else "match"}
        count_of_audits = pod.pod._telemetry.registry.get_sample_value("penstock_refdata_audits_total", labels)
        assert count_of_audits == len([target for target in targets if target.dict_code == code]), code


async def test_audits_run_periodically(pods: Pods) -> None:
    """R32: changes without a version are found and fixed by the periodic audit."""
    async with pods(**SELDOM, auditEvery="PT1S") as pod:
        await pod.put_and_load("LOOSE", {"a": 1})
        await pod.harness.db.execute("UPDATE dictionary_item SET payload = '2' WHERE item_key = 'a'")

        async def is_fixed() -> bool:
            return bool((await pod.get("LOOSE/items/a")).json == 2)

        await becomes(is_fixed, "an audit", within=20)


TWICE = "select * from (values ('a', '1'::jsonb), ('a', '2'::jsonb)) as t (k, v) where :tenantId <> ''"


async def test_a_key_that_comes_twice_is_not_served(database_url: str, tmp_path: Path) -> None:
    """R3, R29: a dictionary with a repeated key is not loaded, and its memory is freed."""
    settings = refdata_settings(
        database_url, dictionaries=[{"code": "TWICE", "loadSql": TWICE}], tenants=["acme"], query=SELDOM
    )
    async with running_pod(settings, tmp_path) as pod:
        refused = await pod.get("TWICE/items/a")
        assert (refused.status, refused.json["code"]) == (503, "NOT_LOADED")
        assert "more than once" in refused.json["detail"]

        async def is_freed() -> bool:
            return pod.pod.memory._env.stat()["entries"] == 0

        await becomes(is_freed, "what was loaded to be freed", within=15)


@pytest.fixture
async def retaining(database_url: str) -> AsyncIterator[RefdataHarness]:
    """Yield refdata that retains two versions of every dictionary and has a row-drop guard of 50 %."""
    await create_schemas(database_url)
    known = [*dictionaries(DOCUMENT), *dictionaries(OTHER)]
    options = {"retainVersions": 2, "maxDropPercent": 50}
    async with opened(
        refdata_settings(database_url, dictionaries=[{**dictionary, **options} for dictionary in known])
    ) as harness:
        yield harness


async def _snapshot(harness: RefdataHarness, keys: str, tenant: str = "acme") -> None:
    items = [upsert(key, {"of": tenant}) for key in keys]
    update = await harness.refdata.submit(tenant, decode_command(command("LOOSE", *items, event_type="SNAPSHOT")))
    await harness.apply()
    assert (await harness.update(update.event_id, tenant)).status is UpdateState.COMMITTED


async def test_a_rollback_passes_the_row_drop_guard(retaining: RefdataHarness) -> None:
    """R30: the row-drop guard does not apply to rollbacks."""
    await _snapshot(retaining, "a")
    await _snapshot(retaining, "abcdef")
    update = await retaining.refdata.roll_back(LOOSE, 1, timedelta(0))
    await retaining.apply()
    assert (await retaining.update(update.event_id)).status is UpdateState.COMMITTED
    assert sorted(await retaining.items("LOOSE")) == ["a"]


async def test_tenants_get_their_own_items_back(retaining: RefdataHarness) -> None:
    """R25, R30: a rollback restores the retained items of the tenant, not those of others."""
    for tenant, keys in (("acme", "a"), ("globex", "b")):
        await _snapshot(retaining, keys, tenant)
        await _snapshot(retaining, "xy", tenant)
    for tenant, keys in (("acme", "a"), ("globex", "b")):
        await retaining.refdata.retention.pin(DictionaryKey(tenant, "LOOSE"), 1)
        assert await retaining.items("LOOSE", tenant) == {keys: {"of": tenant}}
