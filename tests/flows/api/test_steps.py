"""The API for workers: claims, heartbeats, reports and artifacts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.clock import ManualClock
from penstock.settings import Settings
from tests.flows.harness import LEASE, SECOND, FlowsHarness, chain, claim_name, flows_harness, report_body, step_path
from tests.support.http import answered, problem


async def test_step_is_claimed_by_one_worker(harness: FlowsHarness) -> None:
    """F4: of two workers only one claims the step; the claim has a lease and a fence."""
    await harness.create({"a": {"kind": "work", "timeout": 90}})
    first, second = await asyncio.gather(harness.claim(leaseSeconds=30), harness.claim())
    [item] = first or second
    assert not (first and second)
    assert (item["fence"], item["attempt"], item["timeoutSeconds"]) == (1, 1, 90)


async def test_a_claim_waits_for_a_step(harness: FlowsHarness) -> None:
    """F4: a waiting claim returns as soon as a step is READY."""
    waiting = asyncio.create_task(harness.claim(waitSeconds=20))
    await harness.create(chain("a"))
    assert [item["stepId"] for item in await waiting] == ["a"]


async def test_disconnected_client_claims_nothing(harness: FlowsHarness) -> None:
    """F4: a client that disconnects while it waits claims no step."""

    async def is_gone() -> bool:
        await harness.create(chain("a"))
        return True

    assert await harness.engine.claim("w1", {"work": 1}, limit=1, wait=20, is_gone=is_gone) == []
    assert await harness.statuses() == {"a": "READY"}


async def test_engine_kinds_cannot_be_claimed(harness: FlowsHarness) -> None:
    """F3, F14: maps and flows cannot be claimed, and READY cannot be reported."""
    for kind in ("map", "flow"):
        await harness.post_refused(422, "KIND_NOT_CLAIMABLE", "/flow_steps/claim", worker="w", kinds=["work", kind])
    await harness.create(chain("a"))
    [item] = await harness.claim()
    await harness.post_refused(422, "MALFORMED", f"{step_path(item)}/report", **report_body(item, "READY"))
    await harness.post_refused(422, "MALFORMED", "/flow_steps/report", items=[{**claim_name(item), "status": "READY"}])


async def test_an_old_fence_changes_nothing(harness: FlowsHarness, clock: ManualClock) -> None:
    """F4, F11: every request under an expired lease is refused, and the report of the new worker counts."""
    await harness.create(chain("a"))
    [old] = await harness.claim()
    clock.advance(LEASE + SECOND)
    assert await harness.engine.reap() == 1
    [new] = await harness.claim()
    path = step_path(old)
    await harness.post_refused(409, "SUPERSEDED", f"{path}/report", **report_body(old))
    await harness.post_refused(409, "SUPERSEDED", f"{path}/logs", fence=old["fence"], lines=[{"message": "x"}])
    problem(
        await harness.http.put(f"{path}/artifacts/x.md", params={"fence": old["fence"]}, content=b"x"),
        409,
        "SUPERSEDED",
    )
    beats = await harness.post("/flow_steps/heartbeat", items=[claim_name(old), claim_name(new)])
    assert [beat["state"] for beat in beats["items"]] == ["lost", "extended"]
    assert (await harness.report(new))["result"] == "settled"


async def test_repeated_report_succeeds(harness: FlowsHarness) -> None:
    """F5: a repeated report is a 200, a different one a 409, except for mutable outputs; an unknown step is a 404."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    assert (await harness.report(item, outputs={"n": 1}))["result"] == "settled"
    assert (await harness.report(item, outputs={"n": 1}))["result"] == "unchanged"
    assert (await harness.report(item, outputs={"n": 1, "signed_url": "u"}))["status"] == "SUCCEEDED"
    assert (await harness.run())["steps"]["a"]["outputs"] == {"n": 1, "signed_url": "u"}
    await harness.post_refused(409, "STEP_ENDED", f"{step_path(item)}/report", **report_body(item, outputs={"n": 2}))
    await harness.post_refused(404, "STEP_NOT_FOUND", "/flow_runs/r1/steps/none/report", **report_body(item))
    await harness.post_refused(404, "STEP_NOT_FOUND", "/flow_runs/none/steps/a/report", **report_body(item))


async def test_batch_of_reports(harness: FlowsHarness) -> None:
    """F5: each report of a batch has its own result."""
    await harness.create({name: {"kind": "work"} for name in "abc"})
    a, b, c = await harness.claim()
    error = {"code": "BROKEN", "message": "no"}
    items = [
        {**claim_name(a), "status": "SUCCEEDED", "outputs": {"n": 1}},
        {**claim_name(b), "status": "FAILED", "error": error},
        {**claim_name(c), "fence": 9, "status": "SUCCEEDED"},
        {**claim_name(c), "stepId": "none", "status": "SUCCEEDED"},
    ]
    results = (await harness.post("/flow_steps/report", worker="w2", items=items))["items"]
    assert [(result["stepId"], result["result"], result["status"]) for result in results] == [
        ("a", "settled", "SUCCEEDED"),
        ("b", "settled", "FAILED"),
        ("c", "superseded", "RUNNING"),
        ("none", "unknown", None),
    ]
    await harness.post_refused(422, "MALFORMED", "/flow_steps/report", items=[items[0], items[0]])


@pytest.mark.parametrize(
    "more",
    [
        {"status": "FAILED"},
        {"status": "SUCCEEDED", "error": {"code": "X", "message": "no"}},
        {"status": "FAILED", "error": {"code": "not a constant", "message": "no"}},
        {"status": "SUCCEEDED", "outputs": {"x": "\0"}},
        {"status": "SUCCEEDED", "outputs": {"x": "y" * 300_000}},
        {"status": "SUCCEEDED", "artifacts": ["../../etc/passwd"]},
        {"status": "SUCCEEDED", "artifacts": ["a"] * 1_001},
        {"status": "SUCCEEDED", "fence": "1"},
        {"status": "SUCCEEDED", "fence": -1},
        {"status": "SUCCEEDED", "worker": "\0"},
        {"status": "SUCCEEDED", "nonsense": 1},
    ],
)
async def test_invalid_report_is_refused(harness: FlowsHarness, more: dict[str, Any]) -> None:
    """F5: a report that violates a limit or the schema is refused, and the step stays claimed."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    await harness.post_refused(422, "MALFORMED", f"{step_path(item)}/report", **{"fence": item["fence"], **more})
    assert await harness.statuses() == {"a": "RUNNING"}


async def test_cancelled_run(harness: FlowsHarness) -> None:
    """F9: waiting steps are cancelled at once, running steps after the next heartbeat; the first end wins."""
    await harness.create({"a": {"kind": "work"}, "b": {"kind": "work", "dependsOn": ["a"]}})
    [item] = await harness.claim()
    cancelled = await harness.post("/flow_runs/r1/cancel", reason="wrong day")
    assert cancelled == {"runId": "r1", "status": "CANCELLED"}
    assert await harness.statuses() == {"a": "RUNNING", "b": "CANCELLED"}
    [beat] = (await harness.post("/flow_steps/heartbeat", items=[claim_name(item)]))["items"]
    assert beat["state"] == "cancelled"
    await harness.report(item, "CANCELLED")
    run = await harness.run()
    assert (run["status"], run["reason"], run["steps"]["a"]["status"]) == ("CANCELLED", "wrong day", "CANCELLED")
    assert (await harness.post("/flow_runs/r1/cancel"))["status"] == "CANCELLED"
    await harness.create({}, "done")
    await harness.post_refused(409, "RUN_ENDED", "/flow_runs/done/cancel")


async def test_released_step_can_be_claimed_again(harness: FlowsHarness) -> None:
    """F17: RELEASED does not count as an attempt."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    await harness.report(item, "RELEASED")
    [again] = await harness.claim()
    assert (again["attempt"], again["fence"]) == (1, 2)


async def test_artifacts_are_published_with_the_report(harness: FlowsHarness) -> None:
    """F6: artifacts of an attempt are published with its accepted report, with sha256 and size."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    path = f"{step_path(item)}/artifacts/out/report.md"
    written = answered(await harness.http.put(path, params={"fence": item["fence"]}, content=b"# hello"))
    problem(await harness.http.get(path), 404, "ARTIFACT_NOT_FOUND")
    await harness.report(item, artifacts=["out/report.md"])
    [artifact] = (await harness.run())["steps"]["a"]["artifacts"]
    assert artifact["uri"].endswith("/runs/r1/a/out/report.md")
    assert (artifact["name"], artifact["size"], artifact["sha256"]) == ("out/report.md", 7, written["sha256"])
    answer = await harness.http.get(path)
    assert (answer.content, answer.headers["content-type"]) == (b"# hello", "text/markdown; charset=utf-8")
    problem(await harness.http.put(path, params={"fence": item["fence"]}, content=b"other"), 409, "SUPERSEDED")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chart.svg", "image/svg+xml"),
        ("page.html", "text/html; charset=utf-8"),
        ("candles.json", "application/json"),
        ("rows.csv.gz", "application/octet-stream"),
        ("no suffix «ü»", "application/octet-stream"),
    ],
)
async def test_artifacts_are_sandboxed(harness: FlowsHarness, name: str, content: str) -> None:
    """F6: an artifact is served with its type, in a sandbox, and without type sniffing."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    path = f"{step_path(item)}/artifacts/{name}"
    answered(await harness.http.put(path, params={"fence": item["fence"]}, content=b"<script>alert(1)</script>"))
    await harness.report(item, artifacts=[name])
    answer = await harness.http.get(path)
    assert answer.headers["content-type"] == content
    assert answer.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"].isascii()


async def test_an_artifact_is_within_the_body_limit(database_url: str, tmp_path: Path) -> None:
    """F6: a body over the limit of the server is a 413, an invalid name a 422."""
    small = Settings.model_validate({"server": {"body_limit": 2_000}})
    async with flows_harness(database_url, tmp_path, settings=small) as harness:
        await harness.create(chain("a"))
        [item] = await harness.claim()
        path, params = f"{step_path(item)}/artifacts", {"fence": item["fence"]}
        problem(await harness.http.put(f"{path}/a", params=params, content=b"x" * 3_000), 413, "BODY_TOO_LARGE")
        for name in ("%2e%2e%2fx", "a%00b", "a%5cb", "a//b", "x" * 201):
            answer = await harness.http.put(f"{path}/{name}", params=params, content=b"x")
            assert answer.status_code == 422, answer.text
        assert [item async for item in harness.storage.list()] == []


async def test_deleted_artifact(harness: FlowsHarness) -> None:
    """F6: an artifact that was deleted from the store is a 404."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    path = f"{step_path(item)}/artifacts/x"
    answered(await harness.http.put(path, params={"fence": item["fence"]}, content=b"x"))
    await harness.report(item, artifacts=["x"])
    await harness.storage.delete("runs/r1/a/x")
    problem(await harness.http.get(path), 404, "ARTIFACT_DELETED")
