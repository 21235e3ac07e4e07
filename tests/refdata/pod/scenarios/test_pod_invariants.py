"""R17–R32: promises of a pod that hang on one line each, found by changing that line and seeing no test fail."""

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
SELDOM = {"reconcileEvery": "PT60S"}  # nothing is looked at but what is asked for
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


async def test_an_answer_under_way_is_none_to_who_comes_later(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: what the primary said before a version was committed refuses nobody who comes after, though told later."""
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


async def test_one_reader_after_the_other_is_few_questions(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: nor is the primary overloaded by whoever asks again as soon as it is answered."""
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


async def test_a_fallback_has_the_version_loaded(pods: Pods) -> None:
    """R21: though nobody told the pod of it and there was no time to wait, memory has it then."""
    async with pods(**SELDOM, barrierWaitMs=0) as pod:
        version = await pod.put("LOOSE", {"a": 1})
        assert (await pod.get("LOOSE/items/a", min_version=version)).version == version

        async def is_held() -> bool:
            return (await pod.get("LOOSE/version")).version == version

        await becomes(is_held, "the load that the fallback forced", within=15)


async def test_what_cannot_be_loaded_says_how_old_it_is(pod: PodHarness) -> None:
    """R23: though the primary is seen: by its own age and the metric, until it is loaded again; others are not old."""
    await pod.hold("PRODUCT", {"1": {"brand": 1, "price": 1}})
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


def test_what_is_stale_is_so_since_the_first_failure(memory: MemoryWriter) -> None:
    """R23: a load that fails again makes nothing younger, and every process is told of the first."""
    before = memory.counters.sequence
    memory.mark_stale(LOOSE, 10.0)
    assert memory.counters.sequence > before
    memory.mark_stale(LOOSE, 20.0)
    assert memory.headers()[LOOSE].stale_since == 10.0


def test_a_primary_that_nobody_looks_at_is_out_of_sight(memory: MemoryWriter) -> None:
    """R23: also a loader that hangs, and says nothing of the primary, makes what is read old."""
    memory.counters.set_primary_seen()
    memory.counters.cells[1] -= 100_000
    assert memory.counters.primary_unseen_seconds(200.0) == 0
    assert 100 <= memory.counters.primary_unseen_seconds(50.0) < 110


def test_what_is_dropped_is_gone_for_every_process(memory: MemoryWriter) -> None:
    """R1, R29: those that serve it are told, and its room is given back."""
    before = memory.counters.sequence
    memory.drop(LOOSE)
    assert memory.counters.sequence > before
    while memory.free():
        pass
    assert memory._env.stat()["entries"] == 0


def test_a_reader_that_was_killed_holds_nothing(memory: MemoryWriter, tmp_path: Path) -> None:
    """R29: else what changes from then on could never be freed."""
    reading = [sys.executable, "-c", HOLD, str(tmp_path), str(LIMIT)]
    with subprocess.Popen(reading, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reading\n"
        assert str(reader.pid) in memory._env.readers()
        reader.kill()
    memory.drop(LOOSE)
    assert str(reader.pid) not in memory._env.readers()


async def test_a_grant_ends_with_its_token(pod: PodHarness) -> None:
    """R25: who is known for a moment is not known for longer than its token is good."""
    router = pod.server.router
    end = router.now + 0.5
    router.grant(b"x", Principal("somebody", "acme", {"exp": end}))
    assert router.grants[b"x"].until == end


async def test_an_audit_that_fails_is_told_and_stops_no_other(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R32: each dictionary is compared, whatever became of those before it, and each result counted."""
    compare = PodAuditor._compare

    async def broken(self: PodAuditor, state: DictionaryState) -> AuditResult:
        if state.target.dict_code == "COUNTRY":
            raise Transient("DATABASE_DOWN", "down")
        return await compare(self, state)

    monkeypatch.setattr(PodAuditor, "_compare", broken)
    assert pod.pod.request_handler._services is not None
    await pod.pod.request_handler._services[2].audit_all()
    held = [state.target for state in pod.pod._states()]
    for code in {target.dict_code for target in held}:
        labels = {"dict_code": code, "result": "failed" if code == "COUNTRY" else "match"}
        told = pod.pod._telemetry.registry.get_sample_value("penstock_refdata_audits_total", labels)
        assert told == len([target for target in held if target.dict_code == code]), code


async def test_audits_come_by_themselves(pods: Pods) -> None:
    """R32: what was changed behind everybody's back is found and mended, though nobody asks."""
    async with pods(**SELDOM, auditEvery="PT1S") as pod:
        await pod.hold("LOOSE", {"a": 1})
        await pod.harness.db.execute("UPDATE dictionary_item SET payload = '2' WHERE item_key = 'a'")

        async def is_mended() -> bool:
            return bool((await pod.get("LOOSE/items/a")).json == 2)

        await becomes(is_mended, "an audit", within=20)


TWICE = "select * from (values ('a', '1'::jsonb), ('a', '2'::jsonb)) as t (k, v) where :tenantId <> ''"


async def test_a_key_that_comes_twice_is_not_served(database_url: str, tmp_path: Path) -> None:
    """R3, R29: neither of the two is chosen: it is not loaded, and what came of it is freed."""
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
async def keeping(database_url: str) -> AsyncIterator[RefdataHarness]:
    """Refdata that keeps two versions of every dictionary, and does not let more than half of its items go."""
    await create_schemas(database_url)
    known = [*dictionaries(DOCUMENT), *dictionaries(OTHER)]
    options = {"retainVersions": 2, "maxDropPercent": 50}
    async with opened(refdata_settings(database_url, dictionaries=[{**one, **options} for one in known])) as harness:
        yield harness


async def _snapshot(harness: RefdataHarness, keys: str, tenant: str = "acme") -> None:
    items = [upsert(key, {"of": tenant}) for key in keys]
    update = await harness.refdata.submit(tenant, decode_command(command("LOOSE", *items, event_type="SNAPSHOT")))
    await harness.apply()
    assert (await harness.update(update.event_id, tenant)).status is UpdateState.COMMITTED


async def test_going_back_to_few_items_is_meant(keeping: RefdataHarness) -> None:
    """R30: the row-drop guard is for accidents."""
    await _snapshot(keeping, "a")
    await _snapshot(keeping, "abcdef")
    update = await keeping.refdata.roll_back(LOOSE, 1, timedelta(0))
    await keeping.apply()
    assert (await keeping.update(update.event_id)).status is UpdateState.COMMITTED
    assert sorted(await keeping.items("LOOSE")) == ["a"]


async def test_tenants_get_their_own_items_back(keeping: RefdataHarness) -> None:
    """R25, R30: what is kept of one tenant's dictionary is kept for it, and is what it goes back to."""
    for tenant, keys in (("acme", "a"), ("globex", "b")):
        await _snapshot(keeping, keys, tenant)
        await _snapshot(keeping, "xy", tenant)
    for tenant, keys in (("acme", "a"), ("globex", "b")):
        await keeping.refdata.retention.pin(DictionaryKey(tenant, "LOOSE"), 1)
        assert await keeping.items("LOOSE", tenant) == {keys: {"of": tenant}}
