"""The API of flows: runs as documents, what people do with them, and what workers say."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from penstock.kernel.http.auth import Authenticator, Principal
from penstock.settings import Settings
from tests.flows.harness import LEASE, SECOND, FlowsHarness, chain, flows_harness, named, said, step_path
from tests.support.http import answered, problem

FLOW = """
name: nightly
description: Every night.
maxActiveRuns: 1
scope: {market: XETR}
schedule: {cron: 30 2 * * *, timezone: Europe/Berlin}
steps:
  load: {kind: work, inputs: {from: "${scope.market}"}}
  report: {kind: work, dependsOn: [load]}
"""


@pytest.fixture
async def harness(database_url: str, tmp_path: Path, clock: ManualClock) -> AsyncIterator[FlowsHarness]:
    folder = tmp_path / "flows"
    folder.mkdir()
    (folder / "nightly.yaml").write_text(FLOW)
    async with flows_harness(database_url, tmp_path, clock=clock, folder=folder, limits={"scarce": 1}) as opened:
        yield opened


# F1, F2: runs


async def test_a_run_is_the_document(harness: FlowsHarness) -> None:
    """F1: runId, status, scope and steps by their ids, each with dependsOn, inputs, outputs and error."""
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


async def test_asking_again_makes_no_second_run(harness: FlowsHarness) -> None:
    """F2: the same runId with the same body is 200, with another body 409; without one each is new."""
    body = {"runId": "mine", "steps": chain("a"), "scope": {"n": 1}}
    assert (await harness.post("/flow_runs", 201, **body))["created"]
    again = await harness.post("/flow_runs", 200, **{**body, "steps": [{"id": "a", "kind": "work"}]})
    assert (again["runId"], again["created"]) == ("mine", False)
    await harness.refused(409, "RUN_EXISTS", "/flow_runs", **{**body, "scope": {"n": 2}})
    first, second = [await harness.post("/flow_runs", 201, steps=chain("a")) for _ in range(2)]
    assert first["runId"] != second["runId"]


async def test_an_empty_flow_has_succeeded(harness: FlowsHarness) -> None:
    """F2: nothing to do is done at once."""
    assert (await harness.post("/flow_runs", 201, steps={}))["status"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("body", "code", "named"),
    [
        ('{"steps": {"a": {"kind": "x", "dependsOn": ["b"]}, "b": {"kind": "x", "dependsOn": ["a"]}}}', "CYCLE", "a"),
        ('{"steps": {"a": {"kind": "x", "dependsOn": ["nobody"]}}}', "UNKNOWN_DEPENDENCY", "nobody"),
        ('{"steps": {"twin": {"kind": "x"}, "b": {"kind": "x"}, "twin": {"kind": "y"}}}', "DUPLICATE_STEP", "twin"),
        ('{"steps": [{"id": "twin", "kind": "x"}, {"id": "twin", "kind": "x"}]}', "DUPLICATE_STEP", "twin"),
        ('{"steps": {"a": {"kind": "x", "inputs": {"n": 1, "n": 2}}}}', "DUPLICATE_NAME", "n"),
        ('{"flow": "nigthly"}', "FLOW_NOT_FOUND", "nigthly"),
        ('{"flow": "nightly", "steps": {}}', "BAD_RUN", "flow"),
        ('{"steps": {"a": {"kind": "map"}}}', "BAD_MAP", "a"),
        ('{"runId": "events", "steps": {}}', "RESERVED_RUN_ID", "events"),
    ],
)
async def test_what_makes_no_flow_is_refused_by_name(harness: FlowsHarness, body: str, code: str, named: str) -> None:
    """F2: cycles, unknown dependencies and duplicate ids are refused, and the refusal names them."""
    answer = await harness.http.post("/flow_runs", content=body, headers={"content-type": "application/json"})
    refused = answer.json()
    assert (answer.status_code, refused["code"]) == (404 if code == "FLOW_NOT_FOUND" else 422, code), answer.text
    assert named in refused["detail"]
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
async def test_rubbish_is_refused(harness: FlowsHarness, body: str) -> None:
    """F2: whatever is sent as a run, it is 422 with a problem, never a failure of the server."""
    answer = await harness.http.post("/flow_runs", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


async def test_runs_are_listed_in_pages(harness: FlowsHarness, clock: ManualClock) -> None:
    """F1: the latest first, by flow, status and time; a page goes on where the last one ended."""
    for number in range(5):
        await harness.create({}, f"r{number}")
        clock.advance(SECOND)
    since = clock.now().isoformat()
    await harness.post("/flow_runs", 201, runId="n1", flow="nightly")
    first = await harness.get("/flow_runs", limit=3)
    assert [one["runId"] for one in first["runs"]] == ["n1", "r4", "r3"]
    rest = await harness.get("/flow_runs", limit=3, cursor=first["next"])
    assert ([one["runId"] for one in rest["runs"]], rest["next"]) == (["r2", "r1", "r0"], None)
    for params in ({"flow": "nightly"}, {"status": "RUNNING"}, {"since": since}):
        assert [one["runId"] for one in (await harness.get("/flow_runs", **params))["runs"]] == ["n1"]
    for made_up in ("x", ""):
        problem(await harness.http.get("/flow_runs", params={"cursor": made_up}), 422, "BAD_CURSOR")
    problem(await harness.http.get("/flow_runs/none"), 404, "RUN_NOT_FOUND")


async def test_an_inner_run_names_its_step(harness: FlowsHarness) -> None:
    """F14: a run inside of a step can be looked at, and tells where it belongs."""
    await harness.create({"in": {"kind": "flow", "inputs": {"steps": chain("a")}}})
    [inner, outer] = (await harness.get("/flow_runs"))["runs"]
    assert (inner["parentRunId"], inner["parentStepId"], outer["parentRunId"]) == ("r1", "in", None)
    assert await harness.statuses(inner["runId"]) == {"a": "READY"}
    why = await harness.get("/flow_runs/r1/steps/in/why")
    assert inner["runId"] in why["why"]


# F4, F5, F9: workers


async def test_a_claim_is_one_workers_alone(harness: FlowsHarness) -> None:
    """F4: of two workers one gets the step; its lease and its fence are told."""
    await harness.create({"a": {"kind": "work", "timeout": 90}})
    first, second = await asyncio.gather(harness.claim(leaseSeconds=30), harness.claim())
    [item] = first or second
    assert not (first and second)
    assert (item["fence"], item["attempt"], item["timeoutSeconds"]) == (1, 1, 90)


async def test_a_claim_waits_for_a_step(harness: FlowsHarness) -> None:
    """F4: who asks to wait has the step as soon as its turn comes."""
    waiting = asyncio.create_task(harness.claim(waitSeconds=20))
    await harness.create(chain("a"))
    assert [item["stepId"] for item in await waiting] == ["a"]


async def test_who_has_gone_is_handed_nothing(harness: FlowsHarness) -> None:
    """F4: a client that disconnects while it waits does not take a step with it."""

    async def is_gone() -> bool:
        await harness.create(chain("a"))
        return True

    assert await harness.engine.claim("w1", {"work": 1}, limit=1, wait=20, is_gone=is_gone) == []
    assert await harness.statuses() == {"a": "READY"}


async def test_the_engines_own_kinds_are_not_handed_out(harness: FlowsHarness) -> None:
    """F14: nobody claims a map or a flow; no worker can say READY."""
    for kind in ("map", "flow"):
        await harness.refused(422, "ENGINE_KIND", "/flow_steps/claim", worker="w", kinds=["work", kind])
    await harness.create(chain("a"))
    [item] = await harness.claim()
    await harness.refused(422, "MALFORMED", f"{step_path(item)}/report", **said(item, "READY"))
    await harness.refused(422, "MALFORMED", "/flow_steps/report", items=[{**named(item), "status": "READY"}])


async def test_an_old_fence_changes_nothing(harness: FlowsHarness, clock: ManualClock) -> None:
    """F4, F11: a worker whose lease ran out is told so at every turn, and the winner's report counts."""
    await harness.create(chain("a"))
    [old] = await harness.claim()
    clock.advance(LEASE + SECOND)
    assert await harness.engine.reap() == 1
    [new] = await harness.claim()
    path = step_path(old)
    await harness.refused(409, "SUPERSEDED", f"{path}/report", **said(old))
    await harness.refused(409, "SUPERSEDED", f"{path}/logs", fence=old["fence"], lines=[{"message": "x"}])
    problem(
        await harness.http.put(f"{path}/artifacts/x.md", params={"fence": old["fence"]}, content=b"x"),
        409,
        "SUPERSEDED",
    )
    beats = await harness.post("/flow_steps/heartbeat", items=[named(old), named(new)])
    assert [one["state"] for one in beats["items"]] == ["lost", "held"]
    assert (await harness.report(new))["result"] == "settled"


async def test_a_report_said_again_is_a_success(harness: FlowsHarness) -> None:
    """F5: the same again is 200, another 409, save for outputs that may change later; nobody's step is 404."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    assert (await harness.report(item, outputs={"n": 1}))["result"] == "settled"
    assert (await harness.report(item, outputs={"n": 1}))["result"] == "unchanged"
    assert (await harness.report(item, outputs={"n": 1, "signed_url": "u"}))["status"] == "SUCCEEDED"
    assert (await harness.run())["steps"]["a"]["outputs"] == {"n": 1, "signed_url": "u"}
    await harness.refused(409, "STEP_ENDED", f"{step_path(item)}/report", **said(item, outputs={"n": 2}))
    await harness.refused(404, "STEP_NOT_FOUND", "/flow_runs/r1/steps/none/report", **said(item))
    await harness.refused(404, "STEP_NOT_FOUND", "/flow_runs/none/steps/a/report", **said(item))


async def test_many_are_reported_at_once(harness: FlowsHarness) -> None:
    """F5: each report of a batch has a result of its own."""
    await harness.create({name: {"kind": "work"} for name in "abc"})
    a, b, c = await harness.claim()
    error = {"code": "BROKEN", "message": "no"}
    items = [
        {**named(a), "status": "SUCCEEDED", "outputs": {"n": 1}},
        {**named(b), "status": "FAILED", "error": error},
        {**named(c), "fence": 9, "status": "SUCCEEDED"},
        {**named(c), "stepId": "none", "status": "SUCCEEDED"},
    ]
    results = (await harness.post("/flow_steps/report", worker="w2", items=items))["items"]
    assert [(one["stepId"], one["result"], one["status"]) for one in results] == [
        ("a", "settled", "SUCCEEDED"),
        ("b", "settled", "FAILED"),
        ("c", "superseded", "RUNNING"),
        ("none", "unknown", None),
    ]
    await harness.refused(422, "MALFORMED", "/flow_steps/report", items=[items[0], items[0]])


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
async def test_a_report_that_makes_no_sense_is_refused(harness: FlowsHarness, more: dict[str, Any]) -> None:
    """F5: limits and shapes of all that workers say; the step stays theirs."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    await harness.refused(422, "MALFORMED", f"{step_path(item)}/report", **{"fence": item["fence"], **more})
    assert await harness.statuses() == {"a": "RUNNING"}


async def test_a_cancelled_run_tells_its_workers(harness: FlowsHarness) -> None:
    """F9: waiting steps are cancelled at once, a running one hears it at its heartbeat; the first end wins."""
    await harness.create({"a": {"kind": "work"}, "b": {"kind": "work", "dependsOn": ["a"]}})
    [item] = await harness.claim()
    told = await harness.post("/flow_runs/r1/cancel", reason="wrong day")
    assert told == {"runId": "r1", "status": "CANCELLED"}
    assert await harness.statuses() == {"a": "RUNNING", "b": "CANCELLED"}
    [beat] = (await harness.post("/flow_steps/heartbeat", items=[named(item)]))["items"]
    assert beat["state"] == "cancelled"
    await harness.report(item, "CANCELLED")
    run = await harness.run()
    assert (run["status"], run["reason"], run["steps"]["a"]["status"]) == ("CANCELLED", "wrong day", "CANCELLED")
    assert (await harness.post("/flow_runs/r1/cancel"))["status"] == "CANCELLED"
    await harness.create({}, "done")
    await harness.refused(409, "RUN_ENDED", "/flow_runs/done/cancel")


async def test_a_step_that_is_given_back_is_handed_out_again(harness: FlowsHarness) -> None:
    """F17: RELEASED counts as no attempt."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    await harness.report(item, "RELEASED")
    [again] = await harness.claim()
    assert (again["attempt"], again["fence"]) == (1, 2)


# F6: artifacts


async def test_artifacts_are_published_with_the_report_that_counts(harness: FlowsHarness) -> None:
    """F6: written under the attempt, there with the step's end, with sha256 and size."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    path = f"{step_path(item)}/artifacts/out/report.md"
    written = answered(await harness.http.put(path, params={"fence": item["fence"]}, content=b"# hello"))
    problem(await harness.http.get(path), 404, "ARTIFACT_NOT_FOUND")
    await harness.report(item, artifacts=["out/report.md"])
    [kept] = (await harness.run())["steps"]["a"]["artifacts"]
    assert kept["uri"].endswith("/runs/r1/a/out/report.md")
    assert (kept["name"], kept["size"], kept["sha256"]) == ("out/report.md", 7, written["sha256"])
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
async def test_an_artifact_cannot_act_as_our_own_page(harness: FlowsHarness, name: str, content: str) -> None:
    """F6: what a step left is shown as what it is, in a sandbox, and nobody guesses at its type."""
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
    """F6: a body over the server's limit is 413, a name that leads elsewhere 422."""
    small = Settings.model_validate({"server": {"body_limit": 2_000}})
    async with flows_harness(database_url, tmp_path, settings=small) as harness:
        await harness.create(chain("a"))
        [item] = await harness.claim()
        path, params = f"{step_path(item)}/artifacts", {"fence": item["fence"]}
        problem(await harness.http.put(f"{path}/a", params=params, content=b"x" * 3_000), 413, "BODY_TOO_LARGE")
        for name in ("%2e%2e%2fx", "a%00b", "a%5cb", "a//b", "x" * 201):
            answer = await harness.http.put(f"{path}/{name}", params=params, content=b"x")
            assert answer.status_code == 422, answer.text
        assert [one async for one in harness.storage.list()] == []


async def test_an_artifact_that_was_removed_is_gone(harness: FlowsHarness) -> None:
    """F6: the step knows of it, the store does not: 404, not half an answer."""
    await harness.create(chain("a"))
    [item] = await harness.claim()
    path = f"{step_path(item)}/artifacts/x"
    answered(await harness.http.put(path, params={"fence": item["fence"]}, content=b"x"))
    await harness.report(item, artifacts=["x"])
    await harness.storage.delete("runs/r1/a/x")
    problem(await harness.http.get(path), 404, "ARTIFACT_GONE")


# F10, F19: decisions


async def test_a_failed_run_is_taken_up_again(harness: FlowsHarness) -> None:
    """F10: retry reopens the run and what was cancelled because of the failure; skip does without a step."""
    await harness.create(chain("a", "b", "c"))
    await harness.done()
    [item] = await harness.claim()
    await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    assert await harness.statuses() == {"a": "SUCCEEDED", "b": "FAILED", "c": "CANCELLED"}
    assert (await harness.post("/flow_runs/r1/retry"))["steps"] == ["b", "c"]
    [item] = await harness.claim()
    await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    assert (await harness.post("/flow_runs/r1/steps/b/retry"))["steps"] == ["b", "c"]
    assert (await harness.post("/flow_runs/r1/steps/b/skip", reason="not today"))["status"] == "SKIPPED"
    assert await harness.done() == ["c"]
    run = await harness.run()
    assert (run["status"], run["steps"]["b"]["reason"]) == ("SUCCEEDED", "not today")
    await harness.refused(409, "CANNOT_RETRY", "/flow_runs/r1/retry")
    await harness.refused(409, "CANNOT_RETRY", "/flow_runs/r1/steps/a/retry")
    await harness.refused(409, "CANNOT_SKIP", "/flow_runs/r1/steps/a/skip")
    await harness.refused(404, "STEP_NOT_FOUND", "/flow_runs/r1/steps/none/skip")
    await harness.create(chain("a"), "r2")
    await harness.refused(409, "NOTHING_FAILED", "/flow_runs/r2/retry")


async def test_a_run_is_resumed_from_a_step(harness: FlowsHarness) -> None:
    """F19: a new run that begins there, with what was done before."""
    await harness.create(chain("a", "b"))
    await harness.done(n=1)
    await harness.done()
    made = await harness.post("/flow_runs/r1/resume", 201, **{"from": "b", "runId": "r2"})
    assert (made["runId"], made["status"]) == ("r2", "RUNNING")
    assert await harness.statuses("r2") == {"a": "SUCCEEDED", "b": "READY"}
    assert (await harness.run("r2"))["steps"]["a"]["outputs"] == {"n": 1}
    await harness.refused(409, "RUN_EXISTS", "/flow_runs/r1/resume", **{"from": "b", "runId": "r2"})
    await harness.refused(404, "STEP_NOT_FOUND", "/flow_runs/r1/resume", **{"from": "none"})
    await harness.refused(422, "RESERVED_RUN_ID", "/flow_runs/r1/resume", **{"from": "b", "runId": "events"})


# F18: seeing


async def test_logs_are_kept_by_attempt(harness: FlowsHarness) -> None:
    """F18: lines of a step, oldest first, of all attempts or of one, in pages."""
    await harness.create({"a": {"kind": "work", "retry": {"maxAttempts": 2, "backoff": 0}}})
    for attempt in (1, 2):
        [item] = await harness.claim()
        lines = [{"level": "warning", "message": f"{attempt}.{n}"} for n in range(2)]
        kept = await harness.post(f"{step_path(item)}/logs", fence=item["fence"], lines=lines)
        assert kept == {"lines": 2}
        await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    path = "/flow_runs/r1/steps/a/logs"
    first = await harness.get(path, limit=3)
    rest = await harness.get(path, limit=3, cursor=first["next"])
    told = [line["message"] for page in (first, rest) for line in page["lines"]]
    assert (told, rest["next"]) == (["1.0", "1.1", "2.0", "2.1"], None)
    assert [line["message"] for line in (await harness.get(path, attempt=2))["lines"]] == ["2.0", "2.1"]
    problem(await harness.http.get("/flow_runs/r1/steps/none/logs"), 404, "STEP_NOT_FOUND")


async def test_the_history_has_every_move(harness: FlowsHarness) -> None:
    """F18: who moved the run and each step, when and why, oldest first, in pages."""
    await harness.create(chain("a", "b"))
    await harness.done()
    await harness.done()
    path = "/flow_runs/r1/history"
    moves = (await harness.get(path))["moves"]
    told = [(one["stepId"], one["from"], one["to"], one["actor"]) for one in moves]
    assert sorted(told, key=str) == sorted(
        [
            (None, "PENDING", "RUNNING", "advance"),
            ("a", "PENDING", "READY", "advance"),
            ("a", "READY", "RUNNING", "w1"),
            ("a", "RUNNING", "SUCCEEDED", "operator"),
            ("b", "PENDING", "READY", "advance"),
            ("b", "READY", "RUNNING", "w1"),
            ("b", "RUNNING", "SUCCEEDED", "operator"),
            (None, "RUNNING", "SUCCEEDED", "advance"),
        ],
        key=str,
    )
    paged, cursor = [], None
    while page := await harness.get(path, limit=3, **({"cursor": cursor} if cursor else {})):
        paged += page["moves"]
        if (cursor := page["next"]) is None:
            break
    assert paged == moves


async def test_why_is_told_in_words(harness: FlowsHarness, clock: ManualClock) -> None:
    """F18: what a step waits for: steps, a worker, a limit, a back-off, its run's turn."""
    await harness.create(chain("a", "b"))
    clock.advance(timedelta(minutes=5))

    async def why(step: str, run: str = "r1") -> tuple[str, str | None]:
        told = await harness.get(f"/flow_runs/{run}/steps/{step}/why")
        return told["why"], told["hint"]

    assert (await why("b"))[0] == "it waits for a (READY)"
    waits, hint = await why("a")
    assert waits.startswith("nobody has claimed it for 5 minutes; no steps of kind work are before it")
    assert hint is not None
    assert "--kinds work" in hint
    await harness.create({"x": {"kind": "scarce"}, "y": {"kind": "scarce"}}, "limited")
    await harness.claim("scarce")
    assert "no more than 1 may be" in (await why("y", "limited"))[0]
    await harness.create({"t": {"kind": "tried", "retry": {"maxAttempts": 2, "backoff": 60}}}, "tried")
    [item] = await harness.claim("tried")
    await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    assert "attempt 1 did not succeed: BROKEN: no" in (await why("t", "tried"))[0]
    await harness.post("/flow_runs", 201, runId="n1", flow="nightly")
    await harness.post("/flow_runs", 201, runId="n2", flow="nightly")
    assert (await why("load", "n2"))[0].endswith("1 run of flow nightly is under way, at most 1 may be")
    problem(await harness.http.get("/flow_runs/r1/steps/none/why"), 404, "STEP_NOT_FOUND")


# F15, F16: flows


async def test_flows_are_shown_with_their_schedules(harness: FlowsHarness, tmp_path: Path) -> None:
    """F15, F16: spec, chart, the next times; a file that is none is told as a trouble."""
    [head] = (await harness.get("/flows"))["flows"]
    assert (head["name"], head["steps"], head["maxActiveRuns"]) == ("nightly", 2, 1)
    flow = await harness.get("/flows/nightly")
    assert flow["spec"]["steps"]["report"] == {"kind": "work", "dependsOn": ["load"]}
    assert flow["mermaid"].startswith("flowchart TD")
    assert flow["schedule"]["next"][:2] == ["2026-01-01T01:30:00Z", "2026-01-02T01:30:00Z"]
    problem(await harness.http.get("/flows/none"), 404, "FLOW_NOT_FOUND")


async def test_a_schedule_is_paused(harness: FlowsHarness, clock: ManualClock) -> None:
    """F16: while it is paused no run is started, and what passed is not caught up."""
    await harness.keeper.keep_schedules()
    assert (await harness.post("/flows/nightly/schedule/pause"))["schedule"]["paused"]
    clock.advance(timedelta(days=1))
    await harness.keeper.keep_schedules()
    told = await harness.post("/flows/nightly/schedule/resume")
    assert (told["schedule"]["paused"], len(told["schedule"]["next"])) == (False, 5)
    await harness.keeper.keep_schedules()
    assert (await harness.get("/flow_runs"))["runs"] == []
    clock.advance(timedelta(days=1))
    await harness.keeper.keep_schedules()
    [run] = (await harness.get("/flow_runs"))["runs"]
    assert (run["runId"], run["createdBy"]) == ("nightly-20260102T013000Z", "schedule")
    assert (await harness.get("/flows/nightly"))["schedule"]["lastRun"] == run["runId"]


# who may


class Tenant(Authenticator):
    """Everybody acts for a tenant."""

    async def authenticate(self, authorization: str | None) -> Principal:
        return Principal("ann", "a")


async def test_flows_are_not_for_tenants(database_url: str, tmp_path: Path) -> None:
    """R25: flows are the house's own; a token of a tenant opens none of the routes."""
    async with flows_harness(database_url, tmp_path, authenticator=Tenant()) as harness:
        document = (await harness.http.get("http://127.0.0.1/openapi.json")).json()
        routes = [(path, method) for path, methods in document["paths"].items() for method in methods if "flow" in path]
        assert len(routes) > 20
        for path, method in routes:
            url = path.replace("{runId}", "r").replace("{stepId}", "s").replace("{name}", "n").replace("{flow}", "f")
            answer = await harness.http.request(method, f"http://127.0.0.1{url}", params={"fence": 1}, json=_body(path))
            problem(answer, 403, "NOT_FOR_TENANTS")


def _body(path: str) -> Any:
    """Something each route takes."""
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
    """F2: what cannot be the name of a run or a step is 422, and never reaches the database."""
    for path in (
        "/flow_runs/a%00b",
        "/flow_runs/%20",
        "/flow_runs/r1/steps/a%0a/why",
        "/flow_runs/r/steps/a%2fb%00/why",
    ):
        answer = await harness.http.get(path)
        assert answer.status_code in (404, 422), answer.text
        assert answer.headers["content-type"] == "application/problem+json"


async def test_a_run_with_many_steps_is_told(harness: FlowsHarness, db: Database) -> None:
    """F1: a run of a few thousand steps is one document, and its history is paged."""
    await harness.create({f"s{n}": {"kind": "work"} for n in range(3_000)})
    run = await harness.run()
    assert (len(run["steps"]), run["counts"]) == (3_000, {"READY": 3_000})
    page = await harness.get("/flow_runs/r1/history", limit=1000)
    assert (len(page["moves"]), page["next"] is None) == (1000, False)
