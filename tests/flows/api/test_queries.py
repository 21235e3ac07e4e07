"""The queries of the API: runs, logs, history, explanations and flows."""

from datetime import timedelta
from pathlib import Path

from penstock.kernel.clock import ManualClock
from penstock.kernel.db.database import Database
from tests.flows.harness import SECOND, FlowsHarness, chain, step_path
from tests.support.http import problem


async def test_runs_are_listed_in_pages(harness: FlowsHarness, clock: ManualClock) -> None:
    """F1: runs are listed in pages, the latest first, with filters by flow, status and time."""
    for number in range(5):
        await harness.create({}, f"r{number}")
        clock.advance(SECOND)
    since = clock.now().isoformat()
    await harness.post("/flow_runs", 201, runId="n1", flow="nightly")
    first = await harness.get("/flow_runs", limit=3)
    assert [run["runId"] for run in first["runs"]] == ["n1", "r4", "r3"]
    rest = await harness.get("/flow_runs", limit=3, cursor=first["next"])
    assert ([run["runId"] for run in rest["runs"]], rest["next"]) == (["r2", "r1", "r0"], None)
    for params in ({"flow": "nightly"}, {"status": "RUNNING"}, {"since": since}):
        assert [run["runId"] for run in (await harness.get("/flow_runs", **params))["runs"]] == ["n1"]
    for invalid in ("x", ""):
        problem(await harness.http.get("/flow_runs", params={"cursor": invalid}), 422, "BAD_CURSOR")
    problem(await harness.http.get("/flow_runs/none"), 404, "RUN_NOT_FOUND")


async def test_an_sub_run_names_its_step(harness: FlowsHarness) -> None:
    """F14: a sub-run has the ids of its parent run and step."""
    await harness.create({"in": {"kind": "flow", "inputs": {"steps": chain("a")}}})
    [inner, outer] = (await harness.get("/flow_runs"))["runs"]
    assert (inner["parentRunId"], inner["parentStepId"], outer["parentRunId"]) == ("r1", "in", None)
    assert await harness.statuses(inner["runId"]) == {"a": "READY"}
    why = await harness.get("/flow_runs/r1/steps/in/why")
    assert inner["runId"] in why["why"]


async def test_logs_of_attempts(harness: FlowsHarness) -> None:
    """F18: log lines of a step are listed in pages, the oldest first, of all attempts or of one."""
    await harness.create({"a": {"kind": "work", "retry": {"maxAttempts": 2, "backoff": 0}}})
    for attempt in (1, 2):
        [item] = await harness.claim()
        lines = [{"level": "warning", "message": f"{attempt}.{n}"} for n in range(2)]
        stored = await harness.post(f"{step_path(item)}/logs", fence=item["fence"], lines=lines)
        assert stored == {"lines": 2}
        await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    path = "/flow_runs/r1/steps/a/logs"
    first = await harness.get(path, limit=3)
    rest = await harness.get(path, limit=3, cursor=first["next"])
    messages = [line["message"] for page in (first, rest) for line in page["lines"]]
    assert (messages, rest["next"]) == (["1.0", "1.1", "2.0", "2.1"], None)
    assert [line["message"] for line in (await harness.get(path, attempt=2))["lines"]] == ["2.0", "2.1"]
    problem(await harness.http.get("/flow_runs/r1/steps/none/logs"), 404, "STEP_NOT_FOUND")


async def test_the_log_of_a_run_has_the_lines_of_all_steps(harness: FlowsHarness, clock: ManualClock) -> None:
    """F18: the lines of all steps are in the order of their time, each with its step, in pages."""
    await harness.create({"a": {"kind": "work"}, "b": {"kind": "work"}})
    items = {item["stepId"]: item for item in await harness.claim()}
    for step, text in (("b", "1"), ("a", "2"), ("b", "3")):
        lines = [{"message": text}]
        await harness.post(f"{step_path(items[step])}/logs", fence=items[step]["fence"], lines=lines)
        clock.advance(SECOND)
    first = await harness.get("/flow_runs/r1/logs", limit=2)
    rest = await harness.get("/flow_runs/r1/logs", limit=2, cursor=first["next"])
    found = [*first["lines"], *rest["lines"]]
    assert [(line["stepId"], line["message"]) for line in found] == [("b", "1"), ("a", "2"), ("b", "3")]
    assert (rest["next"], rest["runId"]) == (None, "r1")
    assert (found[0]["attempt"], found[0]["level"]) == (1, "info")
    problem(await harness.http.get("/flow_runs/none/logs"), 404, "RUN_NOT_FOUND")


async def test_a_flow_names_its_latest_run(harness: FlowsHarness, clock: ManualClock) -> None:
    """F15: a listed flow has the id, status and times of its latest run, or null before the first run."""
    assert (await harness.get("/flows"))["flows"][0]["latestRun"] is None
    for run_id in ("n1", "n2"):
        await harness.post("/flow_runs", 201, runId=run_id, flow="nightly")
        clock.advance(SECOND)
    [head] = (await harness.get("/flows"))["flows"]
    run = await harness.run("n2")
    expected = {name: run[name] for name in ("runId", "status", "createdAt", "finishedAt")}
    assert head["latestRun"] == expected
    assert (await harness.get("/flows/nightly"))["latestRun"] == expected


async def test_the_history_has_every_move(harness: FlowsHarness) -> None:
    """F18: the history has every move of the run and its steps, the oldest first, in pages."""
    await harness.create(chain("a", "b"))
    await harness.complete()
    await harness.complete()
    path = "/flow_runs/r1/history"
    moves = (await harness.get(path))["moves"]
    entries = [(move["stepId"], move["from"], move["to"], move["actor"]) for move in moves]
    assert sorted(entries, key=str) == sorted(
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


async def test_status_of_a_step_is_explained(harness: FlowsHarness, clock: ManualClock) -> None:
    """F18: a step waits for steps, for a worker, for a limit, for a retry, or for the start of its run."""
    await harness.create(chain("a", "b"))
    clock.advance(timedelta(minutes=5))

    async def why(step: str, run: str = "r1") -> tuple[str, str | None]:
        explanation = await harness.get(f"/flow_runs/{run}/steps/{step}/why")
        return explanation["why"], explanation["hint"]

    assert (await why("b"))[0] == "it waits for a (READY)"
    waits, hint = await why("a")
    assert waits.startswith("it has waited for a worker for 5 minutes; no steps of kind work are ahead of it")
    assert hint is not None
    assert "--kinds work" in hint
    await harness.create({"x": {"kind": "scarce"}, "y": {"kind": "scarce"}}, "limited")
    await harness.claim("scarce")
    assert "the limit is 1" in (await why("y", "limited"))[0]
    await harness.create({"t": {"kind": "tried", "retry": {"maxAttempts": 2, "backoff": 60}}}, "tried")
    [item] = await harness.claim("tried")
    await harness.report(item, "FAILED", error={"code": "BROKEN", "message": "no"})
    assert "attempt 1 did not succeed: BROKEN: no" in (await why("t", "tried"))[0]
    await harness.post("/flow_runs", 201, runId="n1", flow="nightly")
    await harness.post("/flow_runs", 201, runId="n2", flow="nightly")
    assert (await why("load", "n2"))[0].endswith("1 run of flow nightly is active, and `maxActiveRuns` is 1")
    problem(await harness.http.get("/flow_runs/r1/steps/none/why"), 404, "STEP_NOT_FOUND")


async def test_flows_with_schedules_and_errors(harness: FlowsHarness, tmp_path: Path, clock: ManualClock) -> None:
    """F15, F16: a flow has its definition, a chart and its next times; an invalid file is listed with its error."""
    [head] = (await harness.get("/flows"))["flows"]
    assert (head["name"], head["steps"], head["maxActiveRuns"]) == ("nightly", 2, 1)
    flow = await harness.get("/flows/nightly")
    assert flow["spec"]["steps"]["report"] == {"kind": "work", "dependsOn": ["load"]}
    assert flow["mermaid"].startswith("flowchart TD")
    assert flow["schedule"]["next"][:2] == ["2026-01-01T01:30:00Z", "2026-01-02T01:30:00Z"]
    problem(await harness.http.get("/flows/none"), 404, "FLOW_NOT_FOUND")
    invalid = tmp_path / "flows" / "invalid.yaml"
    invalid.write_text("name: invalid\nstep: {}\n")
    clock.advance(SECOND)
    errors = (await harness.get("/flows"))["errors"]
    assert errors == {str(invalid): f"{invalid}:2:1: step: unknown key; did you mean 'steps'?"}


async def test_run_with_many_steps(harness: FlowsHarness, db: Database) -> None:
    """F1: a run of thousands of steps is one document; its history has pages."""
    await harness.create({f"s{n}": {"kind": "work"} for n in range(3_000)})
    run = await harness.run()
    assert (len(run["steps"]), run["counts"]) == (3_000, {"READY": 3_000})
    page = await harness.get("/flow_runs/r1/history", limit=1000)
    assert (len(page["moves"]), page["next"] is None) == (1000, False)
