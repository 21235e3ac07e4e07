"""T5: paging through a queue by cursor and by offset."""

from penstock.kernel.clock import ManualClock
from tests.tracking.harness import FILE, SECOND, SPLITTER, WORKER, TrackingHarness


async def test_cursor_skips_no_row_of_a_busy_queue(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: rows leave and enter between pages; each row that stays is listed exactly once."""
    for n in range(10):
        await api.queue_up(WORKER, f"f{n}")
        clock.advance(SECOND)
    page = await api.get("/queues/shard-worker", limit=4)
    seen = [item["filename"] for item in page["items"]]
    await api.claim(WORKER, limit=3)  # f0, f1 and f2 leave
    await api.move(WORKER, "start", "f5")
    await api.queue_up(WORKER, "f10")
    while page["next"]:
        page = await api.get("/queues/shard-worker", limit=4, cursor=page["next"])
        seen += [item["filename"] for item in page["items"]]
    assert seen == ["f0", "f1", "f2", "f3", "f4", "f6", "f7", "f8", "f9", "f10"]


async def test_cursor_separates_rows_of_the_same_time(api: TrackingHarness) -> None:
    """T5: rows that were registered at the same time are paged one by one."""
    await api.queue_up(SPLITTER, FILE, *range(5))
    shards, cursor = [], None
    while True:
        page = await api.get("/queues/shard-splitter", limit=1, **({"cursor": cursor} if cursor else {}))
        shards += [item["shard"] for item in page["items"]]
        if (cursor := page["next"]) is None:
            break
    assert shards == list(range(5))


async def test_offset_skips_rows(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: `limit` and `offset` work as in the founding document; a page past the end is empty."""
    await api.queue_up(SPLITTER, FILE, *range(5))
    for offset, expected in ((0, [0, 1]), (2, [2, 3]), (4, [4]), (6, [])):
        page = await api.get("/queues/shard-splitter", limit=2, offset=offset)
        assert [item["shard"] for item in page["items"]] == expected


async def test_queue_is_filtered_by_time(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: `updated_since` is inclusive, `updated_before` is exclusive."""
    for n in range(3):
        await api.queue_up(SPLITTER, f"f{n}")
        clock.advance(SECOND)

    async def found(**params: str) -> list[str]:
        items = (await api.get("/queues/shard-splitter", **params))["items"]
        return [item["filename"] for item in items]

    moment = "2026-01-01T00:00:01Z"
    assert await found(updated_since=moment) == ["f1", "f2"]
    assert await found(updated_before=moment) == ["f0"]
    assert await found(updated_since=moment, updated_before="2026-01-01T00:00:02Z") == ["f1"]
    assert await found(updated_since="2026-01-01T02:00:01+02:00") == ["f1", "f2"]
