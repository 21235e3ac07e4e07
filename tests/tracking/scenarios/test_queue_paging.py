"""T5: paging through a queue by cursor and by offset."""

from penstock.kernel.clock import ManualClock
from tests.tracking.harness import FILE, SECOND, SPLITTER, WORKER, TrackingHarness


async def test_a_cursor_skips_nothing_while_the_queue_moves(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: rows leave and enter between pages; of those that stayed none is skipped and none comes twice."""
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


async def test_a_cursor_tells_apart_rows_of_one_moment(api: TrackingHarness) -> None:
    """T5: rows that came in one moment are paged one by one."""
    await api.queue_up(SPLITTER, FILE, *range(5))
    shards, cursor = [], None
    while True:
        page = await api.get("/queues/shard-splitter", limit=1, **({"cursor": cursor} if cursor else {}))
        shards += [item["shard"] for item in page["items"]]
        if (cursor := page["next"]) is None:
            break
    assert shards == list(range(5))


async def test_offsets_still_work(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: `limit` and `offset` as the document has them; past the end there is nothing."""
    await api.queue_up(SPLITTER, FILE, *range(5))
    for offset, expected in ((0, [0, 1]), (2, [2, 3]), (4, [4]), (6, [])):
        page = await api.get("/queues/shard-splitter", limit=2, offset=offset)
        assert [item["shard"] for item in page["items"]] == expected


async def test_a_queue_by_the_time_of_its_rows(api: TrackingHarness, clock: ManualClock) -> None:
    """T5: `updated_since` is the first moment that counts, `updated_before` the first that does not."""
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
