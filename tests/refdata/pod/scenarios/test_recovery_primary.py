"""R21, R23: reads while the primary is down, frozen or moved, and after its recovery."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.settings import Settings
from tests.refdata.harness import RefdataHarness, opened, refdata_settings, upsert
from tests.refdata.pod.harness import PodHarness, PodResponse, running_pod
from tests.services.postgres_proxy import PostgresProxy
from tests.support.ports import free_port
from tests.support.processes import QueryApi
from tests.support.wait import becomes

ASKED = 0.8  # seconds; timeout of the primary, enough for a busy machine
QUERY = {"reconcileEvery": "PT0.2S", "auditEvery": None, "barrierWaitMs": 50, "fallbackTimeoutMs": int(1000 * ASKED)}
AGE = "X-Data-Age"
ANSWERED_WITHIN = 0.05 + 2 * ASKED + 1.5  # the barrier wait, two queries, and a busy machine
READERS = 20


@pytest.fixture
def through_gate(proxy: PostgresProxy) -> Settings:
    return refdata_settings(proxy.url, query=QUERY)


@pytest.fixture
async def pod(through_gate: Settings, tmp_path: Path, writer: RefdataHarness) -> AsyncIterator[PodHarness]:
    await put(writer, 1)
    async with running_pod(through_gate, tmp_path) as pod:
        yield pod


async def put(writer: RefdataHarness, value: Any, code: str = "LOOSE") -> int:
    await writer.send(code, upsert("a", value))
    await writer.apply()
    return await writer.version(code)


async def metric(pod: PodHarness, name: str) -> float:
    async with pod.session.get(f"{pod.address}/actuator/prometheus") as response:
        families = list(text_string_to_metric_families(await response.text()))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


async def answers(
    pod: PodHarness, holds: Callable[[PodResponse], bool], what: str, path: str = "LOOSE/items/a"
) -> None:
    """Return when *holds* accepts a response; all responses until then must be from memory."""

    async def is_so() -> bool:
        found = await pod.get(path)
        assert (found.status, found.source) == (200, "memory")
        return holds(found)

    await becomes(is_so, what)


async def read_unknown(pod: PodHarness, version: int) -> None:
    """Read a missing version many times; each read must be refused in time."""

    async def ask(path: str) -> None:
        began = monotonic()
        refused = await pod.get(path, min_version=version)
        assert (refused.status, monotonic() - began < ANSWERED_WITHIN) == (503, True), refused.body
        assert refused.version < version

    paths = ("LOOSE/items/a", "LOOSE/items?keys=a,b", "LOOSE/all", "LOOSE/version")
    await asyncio.gather(*(ask(paths[number % 4]) for number in range(READERS)))


async def test_reads_continue_without_the_primary(
    proxy: PostgresProxy, writer: RefdataHarness, pod: PodHarness
) -> None:
    """R21, R23: reads continue with a growing age, unknown versions get 503, and recovery is automatic."""
    before = await pod.get("LOOSE/items/a", min_version=1)
    assert (before.status, before.json, AGE in before.headers) == (200, 1, False)
    assert await metric(pod, "penstock_refdata_data_age_seconds") == 0
    await proxy.shut()
    await answers(pod, lambda found: AGE in found.headers, "an age")
    await answers(pod, lambda found: int(found.headers[AGE]) >= 1, "an age that grows")
    assert await metric(pod, "penstock_refdata_data_age_seconds") >= 1
    held = await pod.get("LOOSE/items/a", min_version=1)
    assert (held.status, held.json, held.version) == (200, 1, 1)
    version = await put(writer, 2)
    await read_unknown(pod, version)
    async with pod.session.get(f"{pod.address}/actuator/health/readiness") as response:
        assert response.status == 200
    await proxy.open()
    await answers(pod, lambda found: found.version == version and found.json == 2, "the new version")
    await answers(pod, lambda found: AGE not in found.headers, "no age")
    assert await metric(pod, "penstock_refdata_data_age_seconds") == 0
    assert (await pod.get("LOOSE/items/a", min_version=version)).json == 2


async def test_a_frozen_primary_does_not_block_readers(
    proxy: PostgresProxy, writer: RefdataHarness, pod: PodHarness
) -> None:
    """R21, R23: a server that accepts connections but does not answer is treated like one that is down."""
    proxy.freeze()
    version = await put(writer, 2)
    for _ in range(3):
        await read_unknown(pod, version)
    await answers(pod, lambda found: AGE in found.headers, "an age")
    assert (await pod.get("LOOSE/items/a", min_version=1)).json == 1
    await read_unknown(pod, version)
    assert await metric(pod, "penstock_refdata_data_age_seconds") > 0
    proxy.thaw()
    await answers(pod, lambda found: found.version == version and AGE not in found.headers, "it is fresh")
    assert (await pod.get("LOOSE/items/a", min_version=version)).status == 200


@pytest.mark.full
@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_silent_connections_are_replaced(
    proxy: PostgresProxy, writer: RefdataHarness, pod: PodHarness, code: str
) -> None:
    """R23: connections that became silent do not stop a pod from using new ones."""
    version = await put(writer, {"name": "old"}, code)
    await answers(pod, lambda found: found.version == version, "it is loaded", f"{code}/version")
    proxy.lose()
    version = await put(writer, {"name": "new"}, code)

    async def is_reached() -> bool:
        found = await pod.get(f"{code}/items/a", min_version=version)
        assert found.status in (200, 503)
        return found.status == 200 and found.json["name"] == "new"

    await becomes(is_reached, "a reader of the new version is answered", within=20)

    async def is_fresh() -> bool:
        found = await pod.get(f"{code}/items/a")
        assert found.version == version or AGE in found.headers or is_early(), "old data that passes for fresh"
        return found.version == version and AGE not in found.headers

    lost_at = monotonic()

    def is_early() -> bool:
        return monotonic() - lost_at < 15  # before, the primary may just be slow

    await becomes(is_fresh, "it is fresh", within=20)
    answered = []
    for number in range(3):
        version = await put(writer, {"name": str(number)}, code)
        answered.append((await pod.get(f"{code}/items/a", min_version=version)).status)
    await proxy.shut()  # reset them, so that a stop does not wait for them
    await proxy.open()
    assert answered == [200] * 3, "the primary answers, but readers get errors"


@pytest.mark.full
async def test_a_pod_without_a_primary_is_not_ready(proxy: PostgresProxy, database_url: str, tmp_path: Path) -> None:
    """R23: the pod is alive but not ready, returns 503 instead of 404, and becomes ready automatically."""
    await proxy.shut()
    settings = refdata_settings(proxy.url, query=QUERY).model_dump(mode="json", by_alias=True)
    (tmp_path / "penstock.yaml").write_bytes(_yaml(settings))
    port = free_port()
    pod = QueryApi(tmp_path, port=port)
    address = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as session:

            async def got(path: str) -> tuple[int, Any]:
                async with session.get(address + path) as response:
                    return response.status, await response.json(content_type=None)

            async def is_alive() -> bool:
                try:
                    status, body = await got("/actuator/health/liveness")
                except aiohttp.ClientConnectionError:
                    return False
                return (status, body["status"]) == (200, "UP")

            await becomes(is_alive, "the pod lives")
            assert (await got("/actuator/health/readiness"))[0] == 503
            for path in ("items/a", "items?keys=a", "all", "version"):
                status, body = await got(f"/v1/tenants/acme/dictionaries/LOOSE/{path}")
                assert (status, body["code"]) == (503, "NOT_LOADED")
            async with opened(refdata_settings(database_url)) as writer:
                await put(writer, 7)
            await proxy.open()
            await asyncio.to_thread(pod.__enter__)

            async def is_ready() -> bool:  # an earlier result is valid for a moment
                return (await got("/actuator/health/readiness"))[0] == 200

            await becomes(is_ready, "the pod is ready")
            assert await got("/v1/tenants/acme/dictionaries/LOOSE/items/a") == (200, 7)
            assert await asyncio.to_thread(pod.stop) == 0
    finally:
        await asyncio.to_thread(pod.__exit__, None, None, None)


def _yaml(settings: Any) -> bytes:
    return json.dumps({name: settings[name] for name in ("database", "refdata")}).encode()
