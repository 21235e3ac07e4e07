"""H13: the API of harvest: what every route answers, in every state of a run, and to whom."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from penstock.app.apis import Web, make_app
from penstock.harvest import contract
from penstock.harvest.api import routes as harvest_api
from penstock.harvest.api.queries import HarvestViews
from penstock.harvest.consolidate import watermark
from penstock.harvest.service import Harvest
from penstock.harvest.simulator.faults import Faults
from penstock.kernel.db.page import encode
from penstock.kernel.errors import Transient
from penstock.kernel.http.app import services_of
from penstock.kernel.http.auth import make_authenticator
from penstock.kernel.http.health import Pulse
from penstock.kernel.telemetry.telemetry import Telemetry
from penstock.settings import Settings
from tests.app.scenarios.test_openapi import SECRET, token
from tests.harvest.stepper import FEED, HarvestStepper, harvest_stepper
from tests.support.http import answered
from tests.support.types import Json

DOWN = Faults(rate_500=1.0)
UNKNOWN = UUID(int=7)
JWT = {"secret": "env:SIGNING_SECRET", "algorithms": ["HS256"], "audience": "penstock"}


class HarvestApiClient:
    """Asks the API over a harvest turned by hand."""

    def __init__(self, stepper: HarvestStepper, http: httpx.AsyncClient) -> None:
        self.stepper = stepper
        self.http = http

    async def get(self, path: str, **params: Any) -> Json:
        return answered(await self.http.get(path, params=params))

    async def post(self, path: str, body: Any = None) -> Json:
        return answered(await self.http.post(path, json=body), 202)

    async def problem(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and code of what is refused."""
        answer = await self.http.request(method, path, json=body)
        assert answer.headers["content-type"] == "application/problem+json", answer.text
        told = answer.json()
        assert told["status"] == answer.status_code
        assert told["title"]
        assert told["detail"]
        return answer.status_code, told["code"]

    async def refused(self, path: str, body: Any = None) -> tuple[int, str]:
        return await self.problem("POST", path, body)

    async def failed(self) -> str:
        """A run all of whose partitions failed."""
        run_id = await self.stepper.planned()
        self.stepper.source.set_faults(DOWN)
        await self.stepper.drain(contract.WORK_ITEMS)
        self.stepper.source.set_faults()
        return str(run_id)

    async def completed(self) -> str:
        run_id = await self.stepper.planned()
        await self.stepper.finish()
        return str(run_id)


@asynccontextmanager
async def serving(stepper: HarvestStepper, auth: Mapping[str, Any] | None = None) -> AsyncIterator[HarvestApiClient]:
    settings = Settings.model_validate({"auth": {"jwt": auth} if auth else {}})
    telemetry = Telemetry()
    app = make_app("test", Web(settings, telemetry, make_authenticator(settings.auth)), Pulse({}, needs=[]))
    app.include_router(harvest_api.routes)
    services = services_of(app)
    services.add(Harvest, stepper.harvest)
    services.add(HarvestViews, HarvestViews(stepper.db, stepper.storage, stepper.section))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    base = f"http://127.0.0.1{contract.PREFIX}"
    async with httpx.AsyncClient(transport=transport, base_url=base) as http:
        yield HarvestApiClient(stepper, http)


@pytest.fixture
async def api(database_url: str, tmp_path: Path) -> AsyncIterator[HarvestApiClient]:
    cut = {"least": 30, "count": 3}
    async with (
        harvest_stepper(database_url, tmp_path, records=120, partitions=cut) as turned,
        serving(turned) as client,
    ):
        yield client


async def test_a_run_from_its_start_to_its_end(api: HarvestApiClient) -> None:
    """H13, H2: each state as the founding document computes it, with who asked, the proof and the whole history."""
    started = await api.post(f"/feeds/{FEED}/runs")
    run_id = started["runId"]
    assert started == {"runId": run_id, "statusUrl": f"{contract.PREFIX}/runs/{run_id}"}
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"], run["runType"], run["expectedWorkers"]) == ("planning", "planning", None, None)
    assert (run["heatmap"], run["requestedBy"], run["records"]) == (None, "operator", 0)
    assert (await api.get(f"/runs/{run_id}/partitions"))["partitions"] == []

    await api.stepper.drain(contract.PLANS)
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"], run["runType"], run["counted"]) == ("created", "in_progress", "full", 120)
    assert run["heatmap"]["total"] == run["heatmap"]["sum"] == 120
    assert len(run["heatmap"]["parts"]) == run["expectedWorkers"]
    assert run["counts"] == run["heatmap"]["counts"] > 0
    assert run["watermarkBefore"] is None

    while not (run := await api.get(f"/runs/{run_id}"))["records"]:
        await api.stepper.deliver(contract.WORK_ITEMS)
    assert (run["state"], run["status"]) == ("workers_running", "in_progress")
    assert run["records"] < 120
    await api.stepper.drain(contract.WORK_ITEMS)
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"], run["completedAt"]) == ("consolidating", "consolidating", None)
    assert (await api.get(f"/feeds/{FEED}"))["pending"] == 120

    await api.stepper.drain(contract.CONSOLIDATIONS)
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"], run["records"], run["consolidated"]) == ("completed", "completed", 120, 120)
    assert (run["rejected"], run["deleted"], run["pricingVersion"], run["error"]) == (0, 0, 1, None)
    assert run["watermarkAfter"] == run["upperBound"]
    assert run["durationMinutes"] >= 0
    ended = [one for one in run["history"] if one["machine"] == "harvest.partition"]
    assert len(ended) == run["expectedWorkers"]
    assert {one["actor"] for one in ended} == {"stepper"}
    moves = [(one["from"], one["to"]) for one in run["history"] if one["machine"] != "harvest.partition"]
    assert moves == [
        (None, "planning"),
        ("planning", "planned"),
        (None, "created"),
        ("created", "workers_running"),
        ("workers_running", "consolidating"),
        ("consolidating", "completed"),
    ]
    assert [one["at"] for one in run["history"]] == sorted(one["at"] for one in run["history"])


async def test_what_feeds_tell(api: HarvestApiClient) -> None:
    """H13: a feed before its first run and after it."""
    (before,) = (await api.get("/feeds"))["feeds"]
    assert (before["feed"], before["source"], before["url"]) == (FEED, "rest", api.stepper.source.url)
    assert (before["watermark"], before["lastRun"], before["pending"]) == (None, None, 0)
    assert (before["pausedUntil"], before["everySeconds"]) == (None, None)
    run_id = await api.completed()
    feed = await api.get(f"/feeds/{FEED}")
    run = await api.get(f"/runs/{run_id}")
    assert feed["watermark"] == run["watermarkAfter"]
    assert feed["lastRun"].keys() == run.keys() - {"heatmap", "history"}
    assert (feed["lastRun"]["runId"], feed["pending"]) == (run_id, 0)
    assert (await api.get("/feeds"))["feeds"][0]["watermark"] == feed["watermark"]


async def test_partitions(api: HarvestApiClient) -> None:
    """H13: bounds, how far each is, and who works on it."""
    run_id = await api.stepper.planned()
    while not await api.stepper.db.fetchval("SELECT sum(seen) FROM partition_progress"):
        await api.stepper.deliver(contract.WORK_ITEMS)
    told = await api.get(f"/runs/{run_id}/partitions")
    partitions = told["partitions"]
    assert told["runId"] == str(run_id)
    assert sum(one["counted"] for one in partitions) == 120
    pending = [one for one in partitions if one["status"] == "pending"]
    (begun,) = [one for one in partitions if one["seen"]]
    assert {(one["nextOffset"], one["seen"], one["workerId"]) for one in pending} == {(0, 0, None)}
    assert (begun["workerId"], begun["scan"], begun["error"]) == ("stepper", 1, None)
    assert begun["nextOffset"] == begun["seen"] > 0
    ranges = [one for one in partitions if one["kind"] == "range"]
    assert all(one["upperBound"] == other["lowerBound"] for one, other in pairwise(ranges))


async def test_partitions_are_in_the_order_of_their_numbers(database_url: str, tmp_path: Path) -> None:
    """H13: partition-10 comes after partition-9."""
    cut = {"least": 1, "count": 14}
    async with harvest_stepper(database_url, tmp_path, partitions=cut) as turned, serving(turned) as api:
        run_id = await turned.planned()
        names = [one["partitionId"] for one in (await api.get(f"/runs/{run_id}/partitions"))["partitions"]]
    assert len(names) > 10
    assert names == [f"partition-{number}" for number in range(len(names))]


async def test_the_watermark_and_its_past(api: HarvestApiClient) -> None:
    """H13, H8: as it is, as its copy tells it, and what it was, the latest first."""
    none = await api.get(f"/feeds/{FEED}/watermarks")
    assert (none["current"], none["blob"], none["history"]) == (None, None, [])
    runs = [await api.completed(), await api.completed()]
    told = await api.get(f"/feeds/{FEED}/watermarks")
    assert [one["lastRunId"] for one in told["history"]] == runs[::-1]
    assert told["current"] == told["blob"] == told["history"][0]
    assert told["blobUrl"].endswith(watermark.path(FEED))
    assert len((await api.get(f"/feeds/{FEED}/watermarks", limit=1))["history"]) == 1
    second = await api.get(f"/runs/{runs[1]}")
    assert (second["runType"], second["watermarkBefore"]) == ("incremental", told["history"][1]["lastUpdatedAt"])
    full = await api.post(f"/feeds/{FEED}/runs", {"full": True})
    await api.stepper.finish()
    assert (await api.get(f"/runs/{full['runId']}"))["runType"] == "full"


async def test_a_copy_of_the_watermark_that_is_none(api: HarvestApiClient) -> None:
    """H13: whatever lies in the copy's place, the watermark itself is told."""
    await api.completed()
    known = await api.stepper.storage.get(watermark.path(FEED))
    for data in (b"not json", b"[]", b'{"lastRunId": 7}'):
        await api.stepper.storage.replace(watermark.path(FEED), data, etag=known.info.etag)
        known = await api.stepper.storage.get(watermark.path(FEED))
        told = await api.get(f"/feeds/{FEED}/watermarks")
        assert told["current"] is not None
        assert told["blob"] is None


async def test_a_record(api: HarvestApiClient) -> None:
    """H13: as the source told it and as it is served; cost and price are exact, as text."""
    await api.stepper.planned()
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
    assert (told["key"], told["isPending"], told["isGone"], told["rawVersion"]) == (key, False, False, 1)


async def test_what_was_set_aside_is_paged(api: HarvestApiClient) -> None:
    """H13: rejects page by page: nothing missed, nothing twice."""
    run_id = await api.completed()
    query = """
        INSERT INTO harvest_reject (run_id, feed, key, reason, payload, rejected_at)
        SELECT $1, $2, 'k' || n, 'because', '{}', now() FROM generate_series(1, 5) n
    """
    await api.stepper.db.execute(query, run_id, FEED)
    whole = await api.get(f"/runs/{run_id}/rejects")
    assert ([one["key"] for one in whole["rejects"]], whole["next"]) == (["k1", "k2", "k3", "k4", "k5"], None)
    paged: list[Json] = []
    cursor: Json = {}
    while cursor != {"cursor": None}:
        page = await api.get(f"/runs/{run_id}/rejects", limit=2, **cursor)
        paged += page["rejects"]
        cursor = {"cursor": page["next"]}
    assert paged == whole["rejects"]


async def test_runs_are_paged(api: HarvestApiClient) -> None:
    """H13: the latest first, those that failed before they began among them; page by page nothing is missed."""
    first = await api.completed()
    cancelled = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    await api.post(f"/runs/{cancelled}/cancel", {"reason": "not now"})
    last = await api.completed()
    whole = await api.get("/runs")
    assert ([one["runId"] for one in whole["runs"]], whole["next"]) == ([last, cancelled, first], None)
    paged: list[Json] = []
    cursor: Json = {}
    while cursor != {"cursor": None}:
        page = await api.get("/runs", limit=1, feed=FEED, **cursor)
        paged += page["runs"]
        cursor = {"cursor": page["next"]}
    assert [one["runId"] for one in paged] == [last, cancelled, first]
    assert (await api.get("/runs", feed="another"))["runs"] == []


async def test_what_failed_is_taken_up_again(api: HarvestApiClient) -> None:
    """H13, H11: one partition, then all that failed; what was not asked for stays failed."""
    run_id = await api.failed()
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["status"]) == ("consolidation_skipped", "failed")
    assert run["failedWorkers"] == run["expectedWorkers"]
    assert "partitions failed" in run["error"]
    alerts = (await api.get(f"/feeds/{FEED}/alerts"))["alerts"]
    assert [(one["code"], one["runId"], one["isTold"]) for one in alerts] == [("CONSOLIDATION_SKIPPED", run_id, False)]
    one = await api.post(f"/runs/{run_id}/partitions/partition-0/retry")
    assert one == {"partitions": ["partition-0"]}
    again = await api.get(f"/runs/{run_id}")
    assert (again["state"], again["failedWorkers"]) == ("workers_running", run["failedWorkers"] - 1)
    assert again["error"] is None
    rest = await api.post(f"/runs/{run_id}/retry")
    assert len(rest["partitions"]) == run["failedWorkers"] - 1
    await api.stepper.finish()
    done = await api.get(f"/runs/{run_id}")
    assert (done["state"], done["records"]) == ("completed", 120)
    revived = [one for one in done["history"] if (one["from"], one["to"]) == ("failed", "running")]
    assert {one["actor"] for one in revived} == {"operator"}


async def test_a_failed_consolidation_is_taken_up_again(api: HarvestApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13, H11: where all partitions are there, retry means consolidation."""

    async def down(*_: object) -> None:
        raise Transient("STORAGE_DOWN", "nobody is there")

    run_id = await api.stepper.planned()
    await api.stepper.drain(contract.WORK_ITEMS)
    with monkeypatch.context() as broken:
        broken.setattr(api.stepper.storage, "create", down)
        await api.stepper.drain(contract.CONSOLIDATIONS)
    run = await api.get(f"/runs/{run_id}")
    assert (run["state"], run["failedWorkers"]) == ("failed", 0)
    assert "STORAGE_DOWN" in run["error"]
    assert await api.refused(f"/runs/{run_id}/partitions/partition-0/retry") == (409, "NOTHING_FAILED")
    assert await api.post(f"/runs/{run_id}/retry") == {"partitions": []}
    await api.stepper.drain(contract.CONSOLIDATIONS)
    assert (await api.get(f"/runs/{run_id}"))["state"] == "completed"


async def test_force_and_cancel_are_kept_with_the_run(api: HarvestApiClient) -> None:
    """H13, H5: who and why, in the run, its history and an alert."""
    run_id = str(await api.stepper.planned())
    cancelled = await api.post(f"/runs/{run_id}/cancel", {"reason": "wrong day"})
    assert (cancelled["state"], cancelled["runId"]) == ("consolidation_skipped", run_id)
    errors = {one["error"] for one in (await api.get(f"/runs/{run_id}/partitions"))["partitions"]}
    assert errors == {"CANCELLED: by operator: wrong day"}
    forced = await api.post(f"/runs/{run_id}/force", {"reason": "half will do"})
    assert (forced["state"], forced["status"]) == ("consolidating", "failed")
    assert (forced["forcedBy"], forced["forcedBecause"]) == ("operator", "half will do")
    assert "forced: half will do" in [one["reason"] for one in (await api.get(f"/runs/{run_id}"))["history"]]
    alerts = (await api.get(f"/feeds/{FEED}/alerts"))["alerts"]
    assert [one["code"] for one in alerts] == ["RUN_FORCED", "CONSOLIDATION_SKIPPED"]
    assert "half will do" in alerts[0]["message"]
    assert len((await api.get(f"/feeds/{FEED}/alerts", limit=1))["alerts"]) == 1


async def test_a_plan_is_cancelled(api: HarvestApiClient) -> None:
    """H13: a run that is not one yet ends at once, and the feed is free again."""
    run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    told = await api.post(f"/runs/{run_id}/cancel", {"reason": "typo"})
    assert (told["state"], told["status"], told["error"]) == ("failed", "failed", "CANCELLED: by operator: typo")
    await api.stepper.drain(contract.PLANS)
    assert (await api.get(f"/runs/{run_id}"))["state"] == "failed"
    await api.post(f"/feeds/{FEED}/runs")


async def test_what_a_state_does_not_allow(api: HarvestApiClient) -> None:
    """H13: 409 with a code that stays, and nothing changed."""
    first = await api.failed()
    active = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    answer = await api.http.post(f"/feeds/{FEED}/runs")
    assert (answer.status_code, answer.json()["code"], answer.json()["runId"]) == (409, "RUN_ACTIVE", active)
    assert "hint" in answer.json()
    because = {"reason": "please"}
    assert await api.refused(f"/runs/{first}/retry") == (409, "RUN_ACTIVE")
    assert await api.refused(f"/runs/{first}/force", because) == (409, "RUN_ACTIVE")
    await api.stepper.drain(contract.PLANS)
    assert await api.refused(f"/runs/{active}/force", because) == (409, "BAD_MOVE")
    assert await api.refused(f"/runs/{active}/retry") == (409, "NOTHING_FAILED")
    assert await api.refused(f"/runs/{active}/partitions/partition-0/retry") == (409, "NOTHING_FAILED")
    await api.stepper.finish()
    assert await api.refused(f"/runs/{active}/cancel", because) == (409, "NOT_FETCHING")
    assert await api.refused(f"/runs/{active}/force", because) == (409, "BAD_MOVE")
    assert await api.refused(f"/runs/{active}/retry") == (409, "NOTHING_FAILED")
    for act in ("retry", "force"):
        assert await api.refused(f"/runs/{first}/{act}", because) == (409, "RUN_SUPERSEDED")
    assert (await api.get(f"/runs/{first}"))["state"] == "consolidation_skipped"
    assert (await api.get(f"/runs/{active}"))["state"] == "completed"


async def test_what_is_not_there(api: HarvestApiClient) -> None:
    """H13: 404, each with its code."""
    run_id = await api.completed()
    because = {"reason": "please"}
    for path in ("", "/watermarks", "/alerts", "/record?key=x"):
        assert await api.problem("GET", f"/feeds/nobody{path}") == (404, "FEED_NOT_FOUND")
    assert await api.refused("/feeds/nobody/runs") == (404, "FEED_NOT_FOUND")
    for path in ("", "/partitions", "/rejects"):
        assert await api.problem("GET", f"/runs/{UNKNOWN}{path}") == (404, "RUN_NOT_FOUND")
    for act in ("retry", "force", "cancel", "partitions/partition-0/retry"):
        assert await api.refused(f"/runs/{UNKNOWN}/{act}", because) == (404, "RUN_NOT_FOUND")
    assert await api.refused(f"/runs/{run_id}/partitions/partition-99/retry") == (404, "PARTITION_NOT_FOUND")
    assert await api.problem("GET", f"/feeds/{FEED}/record?key=nobody") == (404, "RECORD_NOT_FOUND")


async def test_a_plan_that_failed_is_no_run_to_take_up(api: HarvestApiClient) -> None:
    """H13: what never began has nothing to retry or force; the listing has it, so it is not said to be unknown."""
    run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
    for act in ("retry", "force"):
        assert await api.refused(f"/runs/{run_id}/{act}", {"reason": "please"}) == (409, "RUN_NOT_BEGUN")
    await api.post(f"/runs/{run_id}/cancel", {"reason": "typo"})
    for act in ("retry", "force", "cancel"):
        assert await api.refused(f"/runs/{run_id}/{act}", {"reason": "please"}) == (409, "RUN_NOT_BEGUN")


RUBBISH: list[tuple[str, str, Any]] = [
    ("GET", "/runs/nonsense", None),
    ("GET", "/runs?limit=0", None),
    ("GET", "/runs?limit=1001", None),
    ("GET", "/runs?limit=many", None),
    ("GET", "/runs?cursor=nonsense", None),
    ("GET", "/runs?cursor=", None),
    ("GET", f"/runs?cursor={encode(['2024-01-01T00:00:00+00:00', 'x'])}", None),
    ("GET", f"/runs?cursor={encode(['2024-01-01T00:00:00', str(UNKNOWN)])}", None),
    ("GET", f"/runs?cursor={encode([1])}", None),
    ("GET", f"/runs/{UNKNOWN}/rejects?cursor={encode([2**64 - 1])}", None),
    ("GET", f"/runs/{UNKNOWN}/rejects?cursor={encode(['1'])}", None),
    ("GET", "/runs?feed=no%20name", None),
    ("GET", "/runs?feed=%00", None),
    ("GET", "/feeds/no%20name", None),
    ("GET", f"/feeds/{FEED}/record", None),
    ("GET", f"/feeds/{FEED}/record?key=", None),
    ("GET", f"/feeds/{FEED}/record?key=%00", None),
    ("GET", f"/feeds/{FEED}/record?key={'x' * 501}", None),
    ("POST", f"/feeds/{FEED}/runs", {"full": "perhaps"}),
    ("POST", f"/feeds/{FEED}/runs", ["full"]),
    ("POST", f"/feeds/{FEED}/runs", {"fulll": True}),
    ("POST", f"/runs/{UNKNOWN}/force", {"reason": "please", "full": True}),
    ("POST", f"/runs/{UNKNOWN}/cancel", {"reason": "please", "because": "of this"}),
    ("POST", f"/runs/{UNKNOWN}/force", None),
    ("POST", f"/runs/{UNKNOWN}/force", {"reason": ""}),
    ("POST", f"/runs/{UNKNOWN}/force", {"reason": "   "}),
    ("POST", f"/runs/{UNKNOWN}/force", {"reason": "x" * 1_001}),
    ("POST", f"/runs/{UNKNOWN}/cancel", {"reason": "x" * 1_001}),
    ("POST", f"/runs/{UNKNOWN}/cancel", {"reason": 7}),
    ("POST", f"/runs/{UNKNOWN}/partitions/{'x' * 101}/retry", None),
]


async def test_rubbish_is_refused(api: HarvestApiClient) -> None:
    """H13: 422 and a problem, whatever is sent, a field nobody knows too; and nothing is begun."""
    for method, path, body in RUBBISH:
        status, _ = await api.problem(method, path, body)
        assert status == 422, (method, path, body)
    assert (await api.get("/runs"))["runs"] == []


@pytest.mark.parametrize("reason", ["a\0b", "half \ud83d"])
async def test_a_reason_no_store_can_keep(api: HarvestApiClient, reason: str) -> None:
    """H13: the sender's mistake, not ours; nothing was done."""
    run_id = await api.failed()
    for act in ("force", "cancel"):
        content = json.dumps({"reason": reason}).encode()
        answer = await api.http.post(
            f"/runs/{run_id}/{act}", content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 422, answer.text
    assert (await api.get(f"/runs/{run_id}"))["state"] == "consolidation_skipped"
    answer = await api.http.post(f"/runs/{run_id}/partitions/%00/retry")
    assert answer.status_code in (404, 422), answer.text


async def test_feeds_belong_to_no_tenant(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13: with tokens, none is 401 and a tenant's is 403, for every route; who asked is kept with the run."""
    monkeypatch.setenv("SIGNING_SECRET", SECRET)
    async with harvest_stepper(database_url, tmp_path, records=40) as turned, serving(turned, JWT) as api:
        asked = [(method, route.path) for route in harvest_api.routes.routes for method in route.methods]  # type: ignore[attr-defined]
        assert len(asked) >= 14
        for method, path in asked:
            there = path.removeprefix(contract.PREFIX).format(feed=FEED, runId=UNKNOWN, partitionId="partition-0")
            body = {"reason": "please"} if path.endswith(("force", "cancel")) else None
            for headers, status, code in (({}, 401, "NO_TOKEN"), (token(), 403, "NOT_FOR_TENANTS")):
                answer = await api.http.request(method, f"{there}?key=x", json=body, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (status, code), (method, path)
        assert await turned.db.fetchval("SELECT count(*) FROM harvest_plan") == 0

        api.http.headers.update(token(tenant_id=None))
        run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
        await turned.drain(contract.PLANS)
        assert (await api.get(f"/runs/{run_id}"))["requestedBy"] == "ann"
        await api.post(f"/runs/{run_id}/cancel", {"reason": "no"})
        api.http.headers.update(token(tenant_id=None, sub="bob"))
        forced = await api.post(f"/runs/{run_id}/force", {"reason": "yes"})
        assert (forced["requestedBy"], forced["forcedBy"]) == ("ann", "bob")
        actors = {one["actor"] for one in (await api.get(f"/runs/{run_id}"))["history"]}
        assert actors == {"ann", "bob", "stepper"}
