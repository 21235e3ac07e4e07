"""R30: readers of a pinned dictionary."""

from penstock.refdata.model import DictionaryKey
from tests.refdata.pod.harness import PodHarness
from tests.support.wait import becomes

LOOSE = DictionaryKey("acme", "LOOSE")


async def test_readers_get_the_pinned_version(pod: PodHarness) -> None:
    """R30: readers get the pinned version until it is unpinned, and the pin is not reported as a history reset."""
    first = await pod.put("LOOSE", {"a": 1})
    await pod.load("LOOSE", first)
    await pod.harness.refdata.retention.pin(LOOSE, first)
    later = await pod.put("LOOSE", {"a": 2, "b": 2})
    await pod.harness.relay()

    async def is_pinned() -> bool:
        return (await pod.get("LOOSE/items/a")).headers.get("X-Dict-Pinned") == "true"

    await becomes(is_pinned, "the pinned version")
    found = await pod.get("LOOSE/items/a")
    assert (found.json, found.version) == (1, first)
    assert (await pod.get("LOOSE/items/b")).status == 404
    assert (await pod.get("LOOSE/version")).json["isPinned"] is True
    await pod.harness.refdata.retention.unpin(LOOSE)

    async def is_free() -> bool:
        return (await pod.get("LOOSE/items/a")).version == later

    await becomes(is_free, "the last version")
    assert (await pod.get("LOOSE/items/a")).json == 2
    exposition = pod.pod._telemetry.format_metrics().decode()
    assert "penstock_refdata_history_resets_total{" not in exposition


async def test_a_version_above_the_pin_is_refused(pod: PodHarness) -> None:
    """R21, R30: a read of a version above the pinned one is refused without data."""
    first = await pod.put("LOOSE", {"a": 1})
    await pod.harness.refdata.retention.pin(LOOSE, first)
    later = await pod.put("LOOSE", {"a": 2})
    for path in ("items/a", "items?keys=a", "all", "version"):
        refused = await pod.get(f"LOOSE/{path}", min_version=later)
        assert (refused.status, refused.json["code"]) == (409, "VERSION_PINNED"), path
        assert (await pod.get(f"LOOSE/{path}", min_version=first)).status == 200
