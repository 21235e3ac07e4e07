"""The views of the API: feeds, runs, partitions, records and the watermark."""

from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

from penstock.harvest import contract
from penstock.harvest.consolidate import watermark
from tests.harvest.api_client import HarvestApiClient, open_client
from tests.harvest.stepper import FEED, harvest_stepper
from tests.support.types import Json


async def test_feeds(api: HarvestApiClient) -> None:
    """H13: a feed before and after its first run."""
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


async def test_last_ended_run_and_next_run(database_url: str, tmp_path: Path) -> None:
    """H13: an active run does not hide the result of the run before it; `every` gives the time of the next run."""
    async with harvest_stepper(database_url, tmp_path, every=3600) as stepper, open_client(stepper) as api:
        before = await api.get(f"/feeds/{FEED}")
        assert (before["lastEndedRun"], before["everySeconds"]) == (None, 3600)
        assert before["nextRunAt"] is not None
        failed = await stepper.plan_run()
        await stepper.harvest.cancel(failed, "test", "slow")
        active = await stepper.plan_run()
        feed = await api.get(f"/feeds/{FEED}")
        assert (feed["lastRun"]["runId"], feed["lastEndedRun"]["runId"]) == (str(active), str(failed))
        assert feed["lastEndedRun"]["state"] == "consolidation_skipped"
        asked, due = (datetime.fromisoformat(at) for at in (feed["lastRun"]["requestedAt"], feed["nextRunAt"]))
        assert due - asked == timedelta(hours=1)


async def test_partitions(api: HarvestApiClient) -> None:
    """H13: a partition has its bounds, its progress and its worker."""
    run_id = await api.stepper.plan_run()
    while not await api.stepper.db.fetchval("SELECT sum(seen) FROM partition_progress"):
        await api.stepper.deliver(contract.WORK_ITEMS)
    view = await api.get(f"/runs/{run_id}/partitions")
    partitions = view["partitions"]
    assert view["runId"] == str(run_id)
    assert sum(partition["counted"] for partition in partitions) == 120
    pending = [partition for partition in partitions if partition["status"] == "pending"]
    (started,) = [partition for partition in partitions if partition["seen"]]
    assert {(item["nextOffset"], item["seen"], item["workerId"]) for item in pending} == {(0, 0, None)}
    assert (started["workerId"], started["scan"], started["error"]) == ("stepper", 1, None)
    assert started["nextOffset"] == started["seen"] > 0
    ranges = [partition for partition in partitions if partition["kind"] == "range"]
    assert all(item["upperBound"] == other["lowerBound"] for item, other in pairwise(ranges))


async def test_partitions_are_in_the_order_of_their_numbers(database_url: str, tmp_path: Path) -> None:
    """H13: partition-10 is after partition-9."""
    partitions = {"min_records": 1, "count": 14}
    async with harvest_stepper(database_url, tmp_path, partitions=partitions) as stepper, open_client(stepper) as api:
        run_id = await stepper.plan_run()
        names = [item["partitionId"] for item in (await api.get(f"/runs/{run_id}/partitions"))["partitions"]]
    assert len(names) > 10
    assert names == [f"partition-{number}" for number in range(len(names))]


async def test_watermark_and_its_history(api: HarvestApiClient) -> None:
    """H13, H8: the watermark, its copy, and its history, newest first."""
    empty = await api.get(f"/feeds/{FEED}/watermarks")
    assert (empty["current"], empty["blob"], empty["history"]) == (None, None, [])
    runs = [await api.complete_run(), await api.complete_run()]
    view = await api.get(f"/feeds/{FEED}/watermarks")
    assert [item["lastRunId"] for item in view["history"]] == runs[::-1]
    assert view["current"] == view["blob"] == view["history"][0]
    assert view["blobUrl"].endswith(watermark.make_blob_path(FEED))
    assert len((await api.get(f"/feeds/{FEED}/watermarks", limit=1))["history"]) == 1
    second = await api.get(f"/runs/{runs[1]}")
    assert (second["runType"], second["watermarkBefore"]) == ("incremental", view["history"][1]["lastUpdatedAt"])
    full = await api.post(f"/feeds/{FEED}/runs", {"full": True})
    await api.stepper.finish()
    assert (await api.get(f"/runs/{full['runId']}"))["runType"] == "full"


async def test_invalid_copy_of_the_watermark(api: HarvestApiClient) -> None:
    """H13: the watermark is returned even if its copy is invalid."""
    await api.complete_run()
    stored = await api.stepper.storage.get(watermark.make_blob_path(FEED))
    for data in (b"not json", b"[]", b'{"lastRunId": 7}'):
        await api.stepper.storage.replace(watermark.make_blob_path(FEED), data, etag=stored.info.etag)
        stored = await api.stepper.storage.get(watermark.make_blob_path(FEED))
        view = await api.get(f"/feeds/{FEED}/watermarks")
        assert view["current"] is not None
        assert view["blob"] is None


async def test_record(api: HarvestApiClient) -> None:
    """H13: a record as the source sent it and as it is served, with exact cost and price as text."""
    await api.stepper.plan_run()
    await api.stepper.drain(contract.WORK_ITEMS)
    truth = api.stepper.source.read_truth()
    key = next(key for key, record in truth.items() if record["price"])
    waiting = await api.get(f"/feeds/{FEED}/record", key=key)
    assert (waiting["payload"], waiting["canonical"], waiting["isPending"]) == (truth[key], None, True)
    await api.stepper.drain(contract.CONSOLIDATIONS)
    view = await api.get(f"/feeds/{FEED}/record", key=key)
    canonical = view["canonical"]
    cost = Decimal(truth[key]["price"]) / 100
    assert isinstance(canonical["cost"], str)
    assert Decimal(canonical["cost"]) == cost
    assert Decimal(canonical["price"]) == (cost * Decimal("1.1")).quantize(Decimal("0.01"), "ROUND_HALF_UP")
    assert (canonical["rule"], canonical["pricingVersion"], canonical["deletedAt"]) == ("all", 1, None)
    assert canonical["fields"]["shape"] == truth[key]["diamond"]["certificate"]["shape"]
    assert (view["key"], view["isPending"], view["isDeleted"], view["rawVersion"]) == (key, False, False, 1)


async def test_rejects_are_paged(api: HarvestApiClient) -> None:
    """H13: the pages of rejects have each reject once."""
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
    """H13: the pages of runs, newest first, have each run once, also runs that failed before they started."""
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
