"""R17, R18, R21: the responses of a pod."""

import pytest

from tests.refdata.pod.conftest import Pods
from tests.refdata.pod.harness import PodHarness


async def test_an_item_is_read_as_it_was_written(pod: PodHarness) -> None:
    """R17: an item, several items, all items and the version are returned under their version."""
    version = await pod.put_and_load("LOOSE", {"a": {"n": 1}, "b": {"n": 2}})
    item = await pod.get("LOOSE/items/a", min_version=version)
    assert (item.status, item.json, item.version, item.source) == (200, {"n": 1}, version, "memory")
    several = await pod.get("LOOSE/items?keys=a,x")
    assert several.json == {"version": version, "items": {"a": {"n": 1}}, "missing": ["x"]}
    everything = await pod.get("LOOSE/all")
    assert everything.json["items"] == [{"key": "a", "value": {"n": 1}}, {"key": "b", "value": {"n": 2}}]
    assert (await pod.get("LOOSE/version")).json["version"] == version


@pytest.mark.parametrize("code", ["LOOSE", "COUNTRY"])
async def test_a_version_without_a_notification_is_reached(pod: PodHarness, code: str) -> None:
    """R21: a read with a barrier gets its version, even without a notification."""
    payload = {"name": "Ruritania"}
    for number in range(5):
        version = await pod.put(code, {f"k{number}": payload})
        found = await pod.get(f"{code}/items/k{number}", min_version=version)
        assert (found.status, found.version >= version) == (200, True)


async def test_a_version_that_is_not_committed_is_refused(pod: PodHarness) -> None:
    """R21: a version that is not committed is 409 without data, with the committed version."""
    version = await pod.put("LOOSE", {"a": 1})
    refused = await pod.get("LOOSE/items/a", min_version=version + 1)
    assert (refused.status, refused.json["code"], refused.version) == (409, "VERSION_NOT_COMMITTED", version)


async def test_a_waiting_reader_skips_debounce_and_jitter(pods: Pods) -> None:
    """R19: a read with a barrier gets its version from memory before debounce and jitter end."""
    async with pods(debounceMs=1000, jitterMs=1000, barrierWaitMs=800, reconcileEvery="PT1M") as pod:
        for number in range(4):
            version = await pod.put("COUNTRY", {f"k{number}": {"name": "Ruritania"}})
            found = await pod.get(f"COUNTRY/items/k{number}", min_version=version)
            assert (found.status, found.source, found.version) == (200, "memory", version)
