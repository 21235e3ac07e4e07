"""What can be seen of harvest: feeds, runs, partitions, records and the watermark."""

from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

from penstock.harvest import contract
from penstock.harvest.consolidate import watermark
from tests.harvest.api_client import HarvestApiClient, open_client
from tests.harvest.stepper import FEED, harvest_stepper
from tests.support.types import Json


async def test_what_feeds_tell(api: HarvestApiClient) -> None:
    """H13: a feed before its first run and after it."""
    (before,) = (await api.get("/feeds"))["feeds"]
    assert (before["feed"], before["source"], before["url"]) == (FEED, "rest", api.stepper.source.url)
    assert (before["watermark"], before["lastRun"], before["pending"]) == (None, None, 0)
    assert (before["pausedUntil"], before["everySeconds"]) == (None, None)
    assert (before["lastEndedRun"], before["nextRunAt"]) == (None, None)
    run_id = await api.complete_run()
    feed = await api.get(f"/feeds/{FEED}")
    run = await api.get(f"/runs/{run_id}")
    assert feed["watermark"] == run["watermarkAfter"]
    assert feed["lastRun"].keys() == run.keys() - {"heatmap", "history"}
    assert (feed["lastRun"]["runId"], feed["pending"]) == (run_id, 0)
    assert (await api.get("/feeds"))["feeds"][0]["watermark"] == feed["watermark"]


async def test_a_feed_names_its_last_ended_run_and_its_next_run(database_url: str, tmp_path: Path) -> None:
    """H13: an active run does not hide the result of the run before it; `every` gives the time of the next run."""
    async with harvest_stepper(database_url, tmp_path, every=3600) as turned, open_client(turned) as api:
        before = await api.get(f"/feeds/{FEED}")
        assert (before["lastEndedRun"], before["everySeconds"]) == (None, 3600)
        assert before["nextRunAt"] is not None
        failed = await turned.plan_run()
        await turned.harvest.cancel(failed, "test", "slow")
        active = await turned.plan_run()
        feed = await api.get(f"/feeds/{FEED}")
        assert (feed["lastRun"]["runId"], feed["lastEndedRun"]["runId"]) == (str(active), str(failed))
        assert feed["lastEndedRun"]["state"] == "consolidation_skipped"
        asked, due = (datetime.fromisoformat(at) for at in (feed["lastRun"]["requestedAt"], feed["nextRunAt"]))
        assert due - asked == timedelta(hours=1)


async def test_partitions(api: HarvestApiClient) -> None:
    """H13: bounds, how far each is, and who works on it."""
    run_id = await api.stepper.plan_run()
    while not await api.stepper.db.fetchval("SELECT sum(seen) FROM partition_progress"):
        await api.stepper.deliver(contract.WORK_ITEMS)
    told = await api.get(f"/runs/{run_id}/partitions")
    partitions = told["partitions"]
    assert told["runId"] == str(run_id)
    assert sum(partition["counted"] for partition in partitions) == 120
    pending = [partition for partition in partitions if partition["status"] == "pending"]
    (begun,) = [partition for partition in partitions if partition["seen"]]
    assert {(item["nextOffset"], item["seen"], item["workerId"]) for item in pending} == {(0, 0, None)}
    assert (begun["workerId"], begun["scan"], begun["error"]) == ("stepper", 1, None)
    assert begun["nextOffset"] == begun["seen"] > 0
    ranges = [partition for partition in partitions if partition["kind"] == "range"]
    assert all(item["upperBound"] == other["lowerBound"] for item, other in pairwise(ranges))


async def test_partitions_are_in_the_order_of_their_numbers(database_url: str, tmp_path: Path) -> None:
    """H13: partition-10 comes after partition-9."""
    cut = {"min_records": 1, "count": 14}
    async with harvest_stepper(database_url, tmp_path, partitions=cut) as turned, open_client(turned) as api:
        run_id = await turned.plan_run()
        names = [item["partitionId"] for item in (await api.get(f"/runs/{run_id}/partitions"))["partitions"]]
    assert len(names) > 10
    assert names == [f"partition-{number}" for number in range(len(names))]


async def test_the_watermark_and_its_past(api: HarvestApiClient) -> None:
    """H13, H8: as it is, as its copy tells it, and what it was, the latest first."""
    none = await api.get(f"/feeds/{FEED}/watermarks")
    assert (none["current"], none["blob"], none["history"]) == (None, None, [])
    runs = [await api.complete_run(), await api.complete_run()]
    told = await api.get(f"/feeds/{FEED}/watermarks")
    assert [item["lastRunId"] for item in told["history"]] == runs[::-1]
    assert told["current"] == told["blob"] == told["history"][0]
    assert told["blobUrl"].endswith(watermark.blob_path(FEED))
    assert len((await api.get(f"/feeds/{FEED}/watermarks", limit=1))["history"]) == 1
    second = await api.get(f"/runs/{runs[1]}")
    assert (second["runType"], second["watermarkBefore"]) == ("incremental", told["history"][1]["lastUpdatedAt"])
    full = await api.post(f"/feeds/{FEED}/runs", {"full": True})
    await api.stepper.finish()
    assert (await api.get(f"/runs/{full['runId']}"))["runType"] == "full"


async def test_a_copy_of_the_watermark_that_is_none(api: HarvestApiClient) -> None:
    """H13: whatever lies in the copy's place, the watermark itself is told."""
    await api.complete_run()
    known = await api.stepper.storage.get(watermark.blob_path(FEED))
    for data in (b"not json", b"[]", b'{"lastRunId": 7}'):
        await api.stepper.storage.replace(watermark.blob_path(FEED), data, etag=known.info.etag)
        known = await api.stepper.storage.get(watermark.blob_path(FEED))
        told = await api.get(f"/feeds/{FEED}/watermarks")
        assert told["current"] is not None
        assert told["blob"] is None


async def test_a_record(api: HarvestApiClient) -> None:
    """H13: as the source told it and as it is served; cost and price are exact, as text."""
    await api.stepper.plan_run()
    await api.stepper.drain(contract.WORK_ITEMS)
    truth = api.stepper.source.truth()
    key = next(key for key, record in truth.items() if record["price"])
    waiting = await api.get(f"/feeds/{FEED}/record", key=key)
    assert (waiting["payload"], waiting["canonical"], waiting["isPending"]) == (truth[key], None, True)
    await api.stepper.drain(contract.CONSOLIDATIONS)
    told = await api.get(f"/feeds/{FEED}/record", key=key)
    made = told["canonical"]
    cost = Decimal(truth[key]["price"]) / 100
    assert isinstance(made["cost"], str)
    assert Decimal(made["cost"]) == cost
    assert Decimal(made["price"]) == (cost * Decimal("1.1")).quantize(Decimal("0.01"), "ROUND_HALF_UP")
    assert (made["rule"], made["pricingVersion"], made["deletedAt"]) == ("all", 1, None)
    assert made["fields"]["shape"] == truth[key]["diamond"]["certificate"]["shape"]
    assert (told["key"], told["isPending"], told["isDeleted"], told["rawVersion"]) == (key, False, False, 1)


async def test_what_was_set_aside_is_paged(api: HarvestApiClient) -> None:
    """H13: rejects page by page: nothing missed, nothing twice."""
    run_id = await api.complete_run()
    query = """
        INSERT INTO harvest_reject (run_id, feed, key, reason, payload, rejected_at)
        SELECT $1, $2, 'k' || n, 'because', '{}', now() FROM generate_series(1, 5) n
    """
    await api.stepper.db.execute(query, run_id, FEED)
    whole = await api.get(f"/runs/{run_id}/rejects")
    assert ([item["key"] for item in whole["rejects"]], whole["next"]) == (["k1", "k2", "k3", "k4", "k5"], None)
    paged: list[Json] = []
    cursor: Json = {}
    while cursor != {"cursor": None}:
        page = await api.get(f"/runs/{run_id}/rejects", limit=2, **cursor)
        paged += page["rejects"]
        cursor = {"cursor": page["next"]}
    assert paged == whole["rejects"]


async def test_runs_are_paged(api: HarvestApiClient) -> None:
    """H13: the latest first, those that failed before they began among them; page by page nothing is missed."""
    first = await api.complete_run()
    cancelled = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    await api.post(f"/runs/{cancelled}/cancel", {"reason": "not now"})
    last = await api.complete_run()
    whole = await api.get("/runs")
    assert ([item["runId"] for item in whole["runs"]], whole["next"]) == ([last, cancelled, first], None)
    paged: list[Json] = []
    cursor: Json = {}
    while cursor != {"cursor": None}:
        page = await api.get("/runs", limit=1, feed=FEED, **cursor)
        paged += page["runs"]
        cursor = {"cursor": page["next"]}
    assert [item["runId"] for item in paged] == [last, cancelled, first]
    assert (await api.get("/runs", feed="another"))["runs"] == []
