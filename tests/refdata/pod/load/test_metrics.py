"""R26: the metrics, traces and log entries of a pod."""

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from penstock.refdata.pod.load import loader
from penstock.settings import Settings
from tests.refdata.exposition import Samples, parsed
from tests.refdata.harness import OFTEN, create_schemas, environment, refdata_settings, upsert
from tests.refdata.pod.harness import PodHarness, running_pod
from tests.services.collector import Collector
from tests.services.redis import RedisCluster
from tests.support.processes import CommandApi, QueryApi, Work
from tests.support.wait import becomes

SELDOM = {**OFTEN, "reconcileEvery": "PT60S"}
NORWAY = {"name": "Norway"}


async def exposed(pod: PodHarness, name: str) -> Samples:
    async with pod.session.get(f"{pod.address}/actuator/prometheus") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return parsed(await response.text(), name)


async def shows(pod: PodHarness, name: str, labels: tuple[str, ...], value: float) -> None:
    async def is_so() -> bool:
        return (await exposed(pod, name)).get(labels, 0) == value

    await becomes(is_so, f"{name}{labels} is {value}")


@pytest.fixture
async def quiet_settings(database_url: str) -> Settings:
    """Return settings with rare reconciliation and without a barrier wait."""
    await create_schemas(database_url)
    return refdata_settings(database_url, query={**SELDOM, "barrierWaitMs": 0})


async def test_loads_are_timed_and_counted(quiet_settings: Settings, tmp_path: Path) -> None:
    """R26: every load is in `cache_reload_duration_seconds` by dictionary and kind, every version in the freshness."""
    name = "cache_reload_duration_seconds_count"
    async with running_pod(quiet_settings, tmp_path) as pod:
        await pod.put_and_load("LOOSE", {"a": 0})
        for number in range(1, 4):
            await pod.put("LOOSE", {"a": number})
            await pod.harness.relay()
            await shows(pod, name, ("LOOSE", "delta"), number)
        await pod.put("COUNTRY", {"NO": NORWAY})
        full = (await exposed(pod, name))["COUNTRY", "full"]
        await pod.harness.relay()
        await shows(pod, name, ("COUNTRY", "full"), full + 1)
        total = await exposed(pod, "cache_reload_duration_seconds_sum")
        assert 0 < total["LOOSE", "delta"] < 60
        assert (await exposed(pod, "penstock_refdata_freshness_seconds_count"))["LOOSE",] == 4
        assert 0 < (await exposed(pod, "penstock_refdata_freshness_seconds_sum"))["LOOSE",] < 60
        used, limit = [(await exposed(pod, f"penstock_refdata_memory{name}_bytes"))[()] for name in ("", "_limit")]
        assert 0 < used < limit
        assert await exposed(pod, "cache_reload_errors_total") == {}
        assert (await exposed(pod, "dict_version_lag"))["LOOSE",] == 0
        assert (await exposed(pod, "penstock_refdata_items"))["LOOSE",] == 1
    async with running_pod(quiet_settings, tmp_path) as pod:  # the first load does not measure freshness
        assert (await exposed(pod, "penstock_refdata_items"))["LOOSE",] == 1
        assert await exposed(pod, "penstock_refdata_freshness_seconds_count") == {}


async def test_a_load_that_fails_is_counted_and_seen_as_lag(pod: PodHarness) -> None:
    """R26: failed loads are counted by dictionary and error, logged once, and the lag grows until a load succeeds."""
    await pod.harness.db.execute("ALTER VIEW all_products RENAME TO no_products")
    for sku in (1, 2):
        await pod.put("PRODUCT", {str(sku): {"brand": 1, "price": 1}})
    await shows(pod, "dict_version_lag", ("PRODUCT",), 2)

    async def is_counted() -> bool:
        errors = await exposed(pod, "cache_reload_errors_total")
        assert {code for _, code in errors} <= {"PRODUCT"}
        return sum(errors.values()) >= 3

    with capture_logs() as logs:
        await becomes(is_counted, "three errors")
    levels = [entry["log_level"] for entry in logs if entry["event"] == "dictionary_load_failed"]
    assert set(levels[1:]) == {"debug"}  # retries that fail like the load before
    assert (await exposed(pod, "dict_version_lag"))["LOOSE",] == 0
    await pod.harness.db.execute("ALTER VIEW no_products RENAME TO all_products")
    await shows(pod, "dict_version_lag", ("PRODUCT",), 0)
    assert (await pod.get("PRODUCT/version")).version == 2


async def test_reads_from_the_primary_are_counted(quiet_settings: Settings, tmp_path: Path) -> None:
    """R26: `postgres_fallback_reads_total` counts the responses of the primary, and only those."""
    name = "postgres_fallback_reads_total"
    async with running_pod(quiet_settings, tmp_path) as pod:
        fallbacks = 0
        for number in range(5):
            version = await pod.put("LOOSE", {"a": number})
            found = await pod.get("LOOSE/items/a", min_version=version)
            assert (found.status, found.json, found.version) == (200, number, version)
            fallbacks += found.source == "postgres_fallback"
        assert (await pod.get("LOOSE/items/a")).source == "memory"
        assert fallbacks > 0
        assert (await exposed(pod, name))["LOOSE",] == fallbacks
        assert (await exposed(pod, "penstock_query_barrier_waits_total"))[()] >= fallbacks


async def test_the_slowest_pod_is_the_lag_of_the_stream(
    database_url: str, cluster: RedisCluster, tmp_path: Path
) -> None:
    """R26: `redis_stream_lag` is the number of entries that the slowest group has not received, and 0 without lag."""
    await create_schemas(database_url)
    settings = refdata_settings(database_url, query=OFTEN, redis={"nodes": cluster.addresses})
    stream, group = settings.refdata.redis.stream_key, f"{settings.refdata.redis.consumer_group}:slow"
    async with running_pod(settings, tmp_path) as pod:
        holder = cluster.holder(stream)
        holder.xgroup_create(stream, group, id="$", mkstream=True)
        for number in range(3):
            await pod.put("LOOSE", {"a": number})
            assert await pod.harness.relay() == 1
        await shows(pod, "redis_stream_lag", (), 3)
        holder.xgroup_destroy(stream, group)
        await shows(pod, "redis_stream_lag", (), 0)


@pytest.mark.full
async def test_a_trace_and_the_log_go_from_the_request_to_the_swap(database_url: str, tmp_path: Path) -> None:
    """R26, R27: one trace spans four processes, and the span and the log entry of the pod identify the version."""
    environment(database_url, tmp_path)
    with ExitStack() as stack:
        collector = stack.enter_context(Collector())
        env = collector.env
        api, pod = CommandApi(tmp_path, env=env), QueryApi(tmp_path, env=env)
        for server in (api, pod, *(Work(tmp_path, role, env=env) for role in ("apply", "relay"))):
            stack.callback(server.__exit__, None, None, None)
            await asyncio.to_thread(server.__enter__)
        async with httpx.AsyncClient() as client:

            async def is_visible() -> bool:
                found = await client.get(f"{pod.api}/v1/tenants/acme/dictionaries/LOOSE/version")
                return bool(found.json()["version"] == 1)

            updates = f"{api.api}/v1/tenants/acme/updates"
            body = {"dictCode": "LOOSE", "eventType": "DELTA", "items": [upsert("a", 1)]}
            await client.post(updates, json=body)
            await becomes(is_visible, "the first version is loaded")
            event_id = (await client.post(updates, json=body)).json()["eventId"]
        stages = ("refdata.apply", "refdata.announce", "refdata.swap")
        spans = await asyncio.to_thread(collector.about, event_id, *stages)
        assert sorted(span.name for span in spans) == sorted(stages)
        assert min(spans, key=lambda span: span.began).name == "refdata.apply"
        (trace,) = {span.trace for span in spans}
        written = "POST /v1/tenants/{tenantId}/updates"
        whole = {span.id: span for span in await asyncio.to_thread(collector.of, trace, written)}
        roots = {span.name for span in whole.values() if span.parent not in whole}
        assert roots == {written}  # the client sends no trace: the request is the only root
        swap = next(span for span in spans if span.name == "refdata.swap")
        about = {"tenantId": "acme", "dictCode": "LOOSE", "eventId": event_id, "version": 2, "source": "REST"}
        assert swap.about == {**about, "kind": "delta"}
        lines = [json.loads(line) for line in pod.log_file.read_text().splitlines() if line.startswith("{")]
        changed = [line for line in lines if line["event"] == "dictionary_changed"][-1]
        assert {name: changed[name] for name in about} == about
        assert changed["level"] == "debug"
        loaded = next(line for line in lines if line["event"] == "dictionary_loaded")
        assert (loaded["tenantId"], loaded["dictCode"], loaded["version"]) == ("acme", "LOOSE", 0)


async def test_log_entries_of_loads_identify_the_version(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: a load is logged at INFO with event, source and number of items, and each commit of a delta at DEBUG."""
    monkeypatch.setattr(loader, "_LOG_INTERVAL", 0.0)
    for version in (1, 2):
        with capture_logs() as logs:
            event_id = await pod.harness.send("LOOSE", upsert("a", version))
            await pod.harness.apply()
            await pod.load("LOOSE", version)
        fields = {
            "eventId": str(event_id),
            "dictCode": "LOOSE",
            "version": version,
            "source": "REST",
            "tenantId": "acme",
        }
        entries = {entry["event"]: entry for entry in logs if entry["event"].startswith("dictionary_")}
        levels = {event: entry["log_level"] for event, entry in entries.items()}
        changed = {"dictionary_changed": "debug"} if entries["dictionary_loaded"]["kind"] == "delta" else {}
        assert levels == {**changed, "dictionary_loaded": "info"}
        assert entries["dictionary_loaded"]["items"] == 1
        for entry in entries.values():
            assert {name: entry.get(name) for name in fields} == fields


async def test_frequent_loads_are_logged_at_debug(pod: PodHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """R26: delta loads of one dictionary are logged at INFO at most once per interval."""
    monkeypatch.setattr(loader, "_LOG_INTERVAL", 3600.0)
    with capture_logs() as logs:
        for number in range(4):
            await pod.put_and_load("LOOSE", {"a": number})
    loads = [(entry["kind"], entry["log_level"]) for entry in logs if entry["event"] == "dictionary_loaded"]
    assert loads[-2:] == [("delta", "debug")] * 2
    assert [level for _, level in loads].count("info") <= 2
