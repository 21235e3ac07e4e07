"""R32: audits of pods."""

import asyncio

import pytest

from tests.refdata.pod.harness import PodHarness
from tests.support.wait import becomes


async def audit(pod: PodHarness, code: str) -> dict[str, object]:
    response = await pod.get(f"{code}/audit")
    assert response.status == 200, response.body
    result: dict[str, object] = response.json
    return result


@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_a_pod_matches_the_primary_after_changes(pod: PodHarness, code: str) -> None:
    """R32: after changes, also of long keys, the pod has the same items as the primary."""
    assert (await audit(pod, code))["matches"]
    for number in range(3):
        await pod.put(code, {f"k{number}": {"name": "x"}, "ü" * 300: {"name": str(number)}})
        result = await audit(pod, code)
        assert (result["matches"], result["version"], result["items"]) == (True, number + 1, number + 2)


async def test_a_mismatch_is_reported_and_fixed(pod: PodHarness) -> None:
    """R32: changes without a version are found key by key, reported, and fixed by a reload."""
    version = await pod.put("LOOSE", dict.fromkeys("abc", 1))
    await pod.load("LOOSE", version)
    table = "dictionary_item WHERE tenant_id = 'acme' AND dict_code = 'LOOSE' AND item_key ="
    await pod.harness.db.execute(f"DELETE FROM {table} 'a'")
    await pod.harness.db.execute("UPDATE dictionary_item SET payload = '2' WHERE tenant_id = 'acme' AND item_key = 'b'")
    await pod.harness.db.execute(
        "INSERT INTO dictionary_item (tenant_id, dict_code, item_key, payload, updated_at) "
        "VALUES ('acme', 'LOOSE', 'd', '4', now())"
    )
    result = await audit(pod, "LOOSE")
    assert not result["matches"]
    assert (result["extra"], result["different"], result["missing"]) == (["a"], ["b"], ["d"])
    exposition = pod.pod._telemetry.format_metrics().decode()
    assert 'penstock_refdata_audits_total{dict_code="LOOSE",result="mismatch"} 1.0' in exposition

    async def is_fixed() -> bool:
        return bool((await audit(pod, "LOOSE"))["matches"])

    await becomes(is_fixed, "the items to be reloaded")
    assert (await pod.get("LOOSE/items/b")).json == 2


async def test_an_audit_is_consistent_during_commits(pod: PodHarness) -> None:
    """R32: both sides are compared at one version while commits continue."""
    await pod.put("LOOSE", {f"k{number}": number for number in range(50)})

    async def write() -> None:
        for number in range(20):
            await pod.put("LOOSE", {f"k{number}": -number})
            await pod.harness.relay()

    writing = asyncio.create_task(write())
    while not writing.done():
        assert (await audit(pod, "LOOSE"))["matches"]
    await writing
