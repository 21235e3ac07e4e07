"""H13: the routes of the API: responses in every state of a run, errors, and authorization."""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from penstock.harvest import contract
from penstock.harvest.api import routes as harvest_api
from penstock.kernel.db.page import encode_cursor
from tests.app.scenarios.test_openapi import SECRET, token
from tests.harvest.api_client import HarvestApiClient, open_client
from tests.harvest.stepper import FEED, harvest_stepper

UNKNOWN = UUID(int=7)
JWT = {"secret": "env:SIGNING_SECRET", "algorithms": ["HS256"], "audience": "penstock"}


async def test_run_from_start_to_end(api: HarvestApiClient) -> None:
    """H13, H2: a run in each state, with the status of the founding document, actor, heatmap and history."""
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
    ended = [move for move in run["history"] if move["machine"] == "harvest.partition"]
    assert len(ended) == run["expectedWorkers"]
    assert {move["actor"] for move in ended} == {"stepper"}
    moves = [(move["from"], move["to"]) for move in run["history"] if move["machine"] != "harvest.partition"]
    assert moves == [
        (None, "planning"),
        ("planning", "planned"),
        (None, "created"),
        ("created", "workers_running"),
        ("workers_running", "consolidating"),
        ("consolidating", "completed"),
    ]
    assert [move["at"] for move in run["history"]] == sorted(move["at"] for move in run["history"])


async def test_unknown_resources(api: HarvestApiClient) -> None:
    """H13: 404 with a code for each kind of resource."""
    run_id = await api.complete_run()
    action = {"reason": "please"}
    for path in ("", "/watermarks", "/alerts", "/record?key=x"):
        assert await api.problem("GET", f"/feeds/unknown{path}") == (404, "FEED_NOT_FOUND")
    assert await api.refused("/feeds/unknown/runs") == (404, "FEED_NOT_FOUND")
    for path in ("", "/partitions", "/rejects"):
        assert await api.problem("GET", f"/runs/{UNKNOWN}{path}") == (404, "RUN_NOT_FOUND")
    for action_name in ("retry", "force", "cancel", "partitions/partition-0/retry"):
        assert await api.refused(f"/runs/{UNKNOWN}/{action_name}", action) == (404, "RUN_NOT_FOUND")
    assert await api.refused(f"/runs/{run_id}/partitions/partition-99/retry") == (404, "PARTITION_NOT_FOUND")
    assert await api.problem("GET", f"/feeds/{FEED}/record?key=unknown") == (404, "RECORD_NOT_FOUND")


INVALID_REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/runs/nonsense", None),
    ("GET", "/runs?limit=0", None),
    ("GET", "/runs?limit=1001", None),
    ("GET", "/runs?limit=many", None),
    ("GET", "/runs?cursor=nonsense", None),
    ("GET", "/runs?cursor=", None),
    ("GET", f"/runs?cursor={encode_cursor(['2024-01-01T00:00:00+00:00', 'x'])}", None),
    ("GET", f"/runs?cursor={encode_cursor(['2024-01-01T00:00:00', str(UNKNOWN)])}", None),
    ("GET", f"/runs?cursor={encode_cursor([1])}", None),
    ("GET", f"/runs/{UNKNOWN}/rejects?cursor={encode_cursor([2**64 - 1])}", None),
    ("GET", f"/runs/{UNKNOWN}/rejects?cursor={encode_cursor(['1'])}", None),
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


async def test_invalid_requests(api: HarvestApiClient) -> None:
    """H13: 422 with a problem for invalid values and unknown fields, and no run starts."""
    for method, path, body in INVALID_REQUESTS:
        status, _ = await api.problem(method, path, body)
        assert status == 422, (method, path, body)
    assert (await api.get("/runs"))["runs"] == []


@pytest.mark.parametrize("reason", ["a\0b", "half \ud83d"])
async def test_unstorable_reason(api: HarvestApiClient, reason: str) -> None:
    """H13: a reason that PostgreSQL cannot store is an invalid request, without effect."""
    run_id = await api.fail_run()
    for action_name in ("force", "cancel"):
        content = json.dumps({"reason": reason}).encode()
        response = await api.http.post(
            f"/runs/{run_id}/{action_name}", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 422, response.text
    assert (await api.get(f"/runs/{run_id}"))["state"] == "consolidation_skipped"
    response = await api.http.post(f"/runs/{run_id}/partitions/%00/retry")
    assert response.status_code in (404, 422), response.text


async def test_feeds_belong_to_no_tenant(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H13: every route responds 401 without a token and 403 to a tenant; the actor is stored with the run."""
    monkeypatch.setenv("SIGNING_SECRET", SECRET)
    async with harvest_stepper(database_url, tmp_path, records=40) as stepper, open_client(stepper, JWT) as api:
        requests = [(method, route.path) for route in harvest_api.routes.routes for method in route.methods]  # type: ignore[attr-defined]
        assert len(requests) >= 14
        for method, path in requests:
            target = path.removeprefix(contract.PREFIX).format(feed=FEED, runId=UNKNOWN, partitionId="partition-0")
            body = {"reason": "please"} if path.endswith(("force", "cancel")) else None
            for headers, status, code in (({}, 401, "NO_TOKEN"), (token(), 403, "OPERATOR_ONLY")):
                response = await api.http.request(method, f"{target}?key=x", json=body, headers=headers)
                assert (response.status_code, response.json()["code"]) == (status, code), (method, path)
        assert await stepper.db.fetchval("SELECT count(*) FROM harvest_plan") == 0

        api.http.headers.update(token(tenant_id=None))
        run_id = (await api.post(f"/feeds/{FEED}/runs"))["runId"]
        await stepper.drain(contract.PLANS)
        assert (await api.get(f"/runs/{run_id}"))["requestedBy"] == "ann"
        await api.post(f"/runs/{run_id}/cancel", {"reason": "no"})
        api.http.headers.update(token(tenant_id=None, sub="bob"))
        forced = await api.post(f"/runs/{run_id}/force", {"reason": "yes"})
        assert (forced["requestedBy"], forced["forcedBy"]) == ("ann", "bob")
        actors = {move["actor"] for move in (await api.get(f"/runs/{run_id}"))["history"]}
        assert actors == {"ann", "bob", "stepper"}
