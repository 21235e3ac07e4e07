"""The API of flows: runs, actions of operators, schedules and access."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.clock import ManualClock
from penstock.kernel.http.auth import Authenticator, Principal
from tests.flows.harness import FlowsHarness, chain, flows_harness
from tests.support.http import problem

# F1, F2: runs


async def test_run_document(harness: FlowsHarness) -> None:
    """F1: a run has runId, status, scope, and steps by id with dependsOn, inputs, outputs and error."""
    steps = chain("load", "report")
    steps["load"]["inputs"] = {"day": "${scope.day}"}
    created = await harness.create(steps, scope={"day": "2026-01-01"})
    assert created == {"runId": "r1", "status": "RUNNING", "created": True, "url": "/api/v1/flow_runs/r1"}
    [item] = await harness.claim()
    assert (item["inputs"], item["scope"]) == ({"day": "2026-01-01"}, {"day": "2026-01-01"})
    await harness.report(item, outputs={"rows": 7})
    [item] = await harness.claim()
    error = {"code": "LLM_TIMEOUT", "message": "no answer", "details": {"after": 60}}
    await harness.report(item, "FAILED", error=error)
    run = await harness.run()
    assert {name: run[name] for name in ("runId", "flow", "status", "scope", "reason", "createdBy")} == {
        "runId": "r1",
        "flow": None,
        "status": "FAILED",
        "scope": {"day": "2026-01-01"},
        "reason": "step report failed",
        "createdBy": "operator",
    }
    load, report = run["steps"]["load"], run["steps"]["report"]
    assert (load["status"], load["inputs"], load["outputs"]) == ("SUCCEEDED", {"day": "2026-01-01"}, {"rows": 7})
    assert (report["status"], report["dependsOn"], report["error"]) == ("FAILED", ["load"], error)
    assert (load["worker"], load["attempts"], load["fence"], load["required"]) == ("w1", 1, 1, True)
    assert run["counts"] == {"SUCCEEDED": 1, "FAILED": 1}
    assert (await harness.get("/flow_runs/r1", steps="false"))["steps"] is None


async def test_repeated_request_creates_no_second_run(harness: FlowsHarness) -> None:
    """F2: the same runId with the same body is a 200, with another body a 409; without runId each run is new."""
    body = {"runId": "mine", "steps": chain("a"), "scope": {"n": 1}}
    assert (await harness.post("/flow_runs", 201, **body))["created"]
    again = await harness.post("/flow_runs", 200, **{**body, "steps": [{"id": "a", "kind": "work"}]})
    assert (again["runId"], again["created"]) == ("mine", False)
    await harness.post_refused(409, "RUN_EXISTS", "/flow_runs", **{**body, "scope": {"n": 2}})
    first, second = [await harness.post("/flow_runs", 201, steps=chain("a")) for _ in range(2)]
    assert first["runId"] != second["runId"]


async def test_an_empty_flow_has_succeeded(harness: FlowsHarness) -> None:
    """F2: a run without steps has SUCCEEDED at once."""
    assert (await harness.post("/flow_runs", 201, steps={}))["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        ('{"steps": {"a": {"kind": "x", "dependsOn": ["b"]}, "b": {"kind": "x", "dependsOn": ["a"]}}}', "CYCLE", "a"),
        ('{"steps": {"a": {"kind": "x", "dependsOn": ["missing"]}}}', "UNKNOWN_DEPENDENCY", "missing"),
        ('{"steps": {"twin": {"kind": "x"}, "b": {"kind": "x"}, "twin": {"kind": "y"}}}', "DUPLICATE_STEP", "twin"),
        ('{"steps": [{"id": "twin", "kind": "x"}, {"id": "twin", "kind": "x"}]}', "DUPLICATE_STEP", "twin"),
        ('{"steps": {"a": {"kind": "x", "inputs": {"n": 1, "n": 2}}}}', "DUPLICATE_NAME", "n"),
        ('{"flow": "nigthly"}', "FLOW_NOT_FOUND", "nigthly"),
        ('{"flow": "nightly", "steps": {}}', "BAD_RUN", "flow"),
        ('{"steps": {"a": {"kind": "map"}}}', "BAD_MAP", "a"),
        ('{"runId": "events", "steps": {}}', "RESERVED_RUN_ID", "events"),
    ],
)
async def test_invalid_flow_is_refused(harness: FlowsHarness, body: str, code: str, named: str) -> None:
    """F2: cycles, unknown dependencies and duplicate ids are refused; the error names them."""
    answer = await harness.http.post("/flow_runs", content=body, headers={"content-type": "application/json"})
    error = answer.json()
    assert (answer.status_code, error["code"]) == (404 if code == "FLOW_NOT_FOUND" else 422, code), answer.text
    assert named in error["detail"]
    assert (await harness.get("/flow_runs"))["runs"] == []


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{",
        "null",
        '{"steps": {"a": {}}}',
        '{"steps": {"a": {"kind": "x", "nonsense": 1}}}',
        '{"steps": {"a/b": {"kind": "x"}}}',
        '{"runId": "../etc", "steps": {}}',
        '{"runId": "a\\n", "steps": {}}',
        '{"steps": {}, "scope": {"x": "\\u0000"}}',
        '{"steps": {}, "scope": {"x": "\\ud800"}}',
        '{"steps": {}, "scope": {"x": 1e999}}',
        '{"steps": {}, "scope": {"x": NaN}}',
        '{"steps": {}, "scope": {"x": 123456789012345678901234567890}}',
        '{"steps": {}, "scope": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"steps": {}, "scope": ' + '{"x":' * 60 + "1" + "}" * 60 + "}",
    ],
)
async def test_malformed_request_is_refused(harness: FlowsHarness, body: str) -> None:
    """F2: a malformed request for a run is a 422 with a problem, never an error of the server."""
    answer = await harness.http.post("/flow_runs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


# F10, F19: actions of operators


async def test_failed_run_is_retried(harness: FlowsHarness) -> None:
    """F10: retry reopens the run and the cancelled steps; skip continues without a step."""
    await harness.create(chain("a", "b", "c"))
    await harness.complete()
    [item] = await harness.claim()
    await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    assert await harness.statuses() == {"a": "SUCCEEDED", "b": "FAILED", "c": "CANCELLED"}
    assert (await harness.post("/flow_runs/r1/retry"))["steps"] == ["b", "c"]
    [item] = await harness.claim()
    await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    assert (await harness.post("/flow_runs/r1/steps/b/retry"))["steps"] == ["b", "c"]
    assert (await harness.post("/flow_runs/r1/steps/b/skip", reason="not today"))["status"] == "SKIPPED"
    assert await harness.complete() == ["c"]
    run = await harness.run()
    assert (run["status"], run["steps"]["b"]["reason"]) == ("SUCCEEDED", "not today")
    await harness.post_refused(409, "CANNOT_RETRY", "/flow_runs/r1/retry")
    await harness.post_refused(409, "CANNOT_RETRY", "/flow_runs/r1/steps/a/retry")
    await harness.post_refused(409, "CANNOT_SKIP", "/flow_runs/r1/steps/a/skip")
    await harness.post_refused(404, "STEP_NOT_FOUND", "/flow_runs/r1/steps/none/skip")
    await harness.create(chain("a"), "r2")
    await harness.post_refused(409, "NOTHING_FAILED", "/flow_runs/r2/retry")


async def test_a_run_is_resumed_from_a_step(harness: FlowsHarness) -> None:
    """F19: resume creates a run that starts at a step, and reuses the outputs of earlier steps."""
    await harness.create(chain("a", "b"))
    await harness.complete(n=1)
    await harness.complete()
    created = await harness.post("/flow_runs/r1/resume", 201, **{"from": "b", "runId": "r2"})
    assert (created["runId"], created["status"]) == ("r2", "RUNNING")
    assert await harness.statuses("r2") == {"a": "SUCCEEDED", "b": "READY"}
    assert (await harness.run("r2"))["steps"]["a"]["outputs"] == {"n": 1}
    await harness.post_refused(409, "RUN_EXISTS", "/flow_runs/r1/resume", **{"from": "b", "runId": "r2"})
    await harness.post_refused(404, "STEP_NOT_FOUND", "/flow_runs/r1/resume", **{"from": "none"})
    await harness.post_refused(422, "RESERVED_RUN_ID", "/flow_runs/r1/resume", **{"from": "b", "runId": "events"})


# F15, F16: flows


async def test_a_schedule_is_paused(harness: FlowsHarness, clock: ManualClock) -> None:
    """F16: a paused schedule starts no run, and times during the pause get no run later."""
    await harness.maintenance.start_scheduled_runs()
    assert (await harness.post("/flows/nightly/schedule/pause"))["schedule"]["paused"]
    clock.advance(timedelta(days=1))
    await harness.maintenance.start_scheduled_runs()
    flow = await harness.post("/flows/nightly/schedule/resume")
    assert (flow["schedule"]["paused"], len(flow["schedule"]["next"])) == (False, 5)
    await harness.maintenance.start_scheduled_runs()
    assert (await harness.get("/flow_runs"))["runs"] == []
    clock.advance(timedelta(days=1))
    await harness.maintenance.start_scheduled_runs()
    [run] = (await harness.get("/flow_runs"))["runs"]
    assert (run["runId"], run["createdBy"]) == ("nightly-20260102T013000Z", "schedule")
    assert (await harness.get("/flows/nightly"))["schedule"]["lastRun"] == run["runId"]


# access


class Tenant(Authenticator):
    """An authenticator that accepts every caller as a tenant."""

    async def authenticate(self, authorization: str | None) -> Principal:
        return Principal("ann", "a")


async def test_tenants_have_no_access(database_url: str, tmp_path: Path) -> None:
    """R25: flows belong to the operator; a token of a tenant gets a 403 from every route."""
    async with flows_harness(database_url, tmp_path, authenticator=Tenant()) as harness:
        document = (await harness.http.get("http://127.0.0.1/openapi.json")).json()
        routes = [(path, method) for path, methods in document["paths"].items() for method in methods if "flow" in path]
        assert len(routes) > 20
        for path, method in routes:
            url = path.replace("{runId}", "r").replace("{stepId}", "s").replace("{name}", "n").replace("{flow}", "f")
            answer = await harness.http.request(method, f"http://127.0.0.1{url}", params={"fence": 1}, json=_body(path))
            problem(answer, 403, "OPERATOR_ONLY")


def _body(path: str) -> Any:
    """Return a valid body for the route."""
    if path.endswith("/resume"):
        return {"from": "a"}
    if path.endswith("/logs"):
        return {"fence": 1, "lines": [{"message": "x"}]}
    if path.endswith("/claim"):
        return {"worker": "w", "kinds": ["work"]}
    if path.endswith("/steps/{stepId}/report"):
        return {"fence": 1, "status": "SUCCEEDED"}
    if path.endswith("/report"):
        return {"items": [{"runId": "r", "stepId": "s", "fence": 1, "status": "SUCCEEDED"}]}
    return {"items": []} if path.endswith("/heartbeat") else {}


async def test_names_in_paths_are_checked(harness: FlowsHarness) -> None:
    """F2: an invalid name of a run or a step in a path is a 404 or 422."""
    for path in (
        "/flow_runs/a%00b",
        "/flow_runs/%20",
        "/flow_runs/r1/steps/a%0a/why",
        "/flow_runs/r/steps/a%2fb%00/why",
    ):
        answer = await harness.http.get(path)
        assert answer.status_code in (404, 422), answer.text
        assert answer.headers["content-type"] == "application/problem+json"
