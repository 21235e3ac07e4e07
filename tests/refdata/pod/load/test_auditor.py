"""R32: pods compared with the primary."""

import asyncio

import pytest

from tests.refdata.pod.harness import PodHarness
from tests.support.wait import becomes


async def audit(pod: PodHarness, code: str) -> dict[str, object]:
    found = await pod.get(f"{code}/audit")
    assert found.status == 200, found.body
    told: dict[str, object] = found.json
    return told


@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_a_pod_that_follows_agrees(pod: PodHarness, code: str) -> None:
    """R32: after any changes what is held is what the primary has, long keys and all."""
    assert (await audit(pod, code))["matches"]
    for number in range(3):
        await pod.put(code, {f"k{number}": {"name": "x"}, "ü" * 300: {"name": str(number)}})
        told = await audit(pod, code)
        assert (told["matches"], told["version"], told["items"]) == (True, number + 1, number + 2)


async def test_what_disagrees_is_told_and_mended(pod: PodHarness) -> None:
    """R32: what was changed behind everybody's back is found, key by key, reported, and loaded anew."""
    version = await pod.put("LOOSE", dict.fromkeys("abc", 1))
    await pod.holds("LOOSE", version)
    table = "dictionary_item WHERE tenant_id = 'acme' AND dict_code = 'LOOSE' AND item_key ="
    await pod.harness.db.execute(f"DELETE FROM {table} 'a'")
    await pod.harness.db.execute("UPDATE dictionary_item SET payload = '2' WHERE tenant_id = 'acme' AND item_key = 'b'")
    await pod.harness.db.execute(
        "INSERT INTO dictionary_item (tenant_id, dict_code, item_key, payload, updated_at) "
        "VALUES ('acme', 'LOOSE', 'd', '4', now())"
    )
    told = await audit(pod, "LOOSE")
    assert not told["matches"]
    assert (told["extra"], told["different"], told["missing"]) == (["a"], ["b"], ["d"])
    exposition = pod.pod._telemetry.exposition().decode()
    assert 'penstock_refdata_audits_total{dict_code="LOOSE",result="mismatch"} 1.0' in exposition

    async def is_mended() -> bool:
        return bool((await audit(pod, "LOOSE"))["matches"])

    await becomes(is_mended, "the items loaded anew")
    assert (await pod.get("LOOSE/items/b")).json == 2


async def test_an_audit_holds_while_things_change(pod: PodHarness) -> None:
    """R32: both sides are looked at in one version, though commits go on."""
    await pod.put("LOOSE", {f"k{number}": number for number in range(50)})

    async def write() -> None:
        for number in range(20):
            await pod.put("LOOSE", {f"k{number}": -number})
            await pod.harness.relay()

    writing = asyncio.create_task(write())
    while not writing.done():
        assert (await audit(pod, "LOOSE"))["matches"]
    await writing
