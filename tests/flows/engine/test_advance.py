"""The effects of ended steps: conditions, failures, maps and sub-runs."""

from typing import Any

import pytest

from penstock.flows.contract import DEPTH_LIMIT, StepReportAnswer, StepReportKind
from penstock.kernel.errors import Conflict
from tests.flows.stepper import DIAMOND, FlowsStepper, flow_step, map_step, work


async def test_only_advance_makes_a_step_ready(flows: FlowsStepper) -> None:
    """F3: only the engine makes a step READY, never a worker, the reaper or a user; no report has this status."""
    assert "READY" not in set(StepReportKind)
    await flows.start({**DIAMOND, "e": work(retry={"maxAttempts": 3, "backoff": 0})})
    claimed = await flows.claim()
    await flows.report(claimed["e"], StepReportKind.FAILED)
    await flows.report(claimed["a"], StepReportKind.RELEASED)
    await flows.claim()
    await flows.expire_leases()
    await flows.operations.skip("r", "b", "tester")
    await flows.work()
    assert {actor for _, _, target, actor in await flows.moves() if target == "READY"} == {"advance"}


async def test_a_failure_fails_the_run(flows: FlowsStepper) -> None:
    """F7: steps that have not started are cancelled; running steps may end, and their outcome is stored."""
    await flows.start({"a": work(), "b": work(), "c": work("b"), "d": work()})
    claimed = await flows.claim(2)
    await flows.report(claimed["a"], StepReportKind.FAILED)
    assert await flows.steps() == {"a": "FAILED", "b": "RUNNING", "c": "CANCELLED", "d": "CANCELLED"}
    assert (await flows.step("c"))["reason"] == "upstream_failed"
    assert await flows.status() == "FAILED"
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): False}
    assert await flows.report(claimed["b"]) is StepReportAnswer.SETTLED
    assert await flows.steps() == {"a": "FAILED", "b": "SUCCEEDED", "c": "CANCELLED", "d": "CANCELLED"}


async def test_fail_fast_stops_running_steps(flows: FlowsStepper) -> None:
    """F7: with `failFast` the workers of running steps must stop."""
    await flows.start({"a": work(), "b": work()}, policy={"failFast": True})
    claimed = await flows.claim()
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): False}
    await flows.report(claimed["a"], StepReportKind.FAILED)
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): True}
    assert await flows.report(claimed["b"], StepReportKind.CANCELLED) is StepReportAnswer.SETTLED
    assert await flows.steps() == {"a": "FAILED", "b": "CANCELLED"}


async def test_optional_step_may_fail(flows: FlowsStepper) -> None:
    """F7, F8: the failed step is SKIPPED, its error is stored, and the steps after it run."""
    await flows.start({"a": work(required=False), "b": work("a"), "c": work("a", onSkip="skip"), "d": work("c")})
    assert await flows.work("a") == ["a", "b", "d"]
    assert await flows.steps() == {"a": "SKIPPED", "b": "SUCCEEDED", "c": "SKIPPED", "d": "SUCCEEDED"}
    assert (await flows.step("a"))["error"]["code"] == "BROKEN"
    assert await flows.status() == "SUCCEEDED"


@pytest.mark.parametrize(("v", "expected"), [(1, "READY"), (0, "SKIPPED")])
async def test_condition_decides(flows: FlowsStepper, v: int, expected: str) -> None:
    """F8: `when` is evaluated over outputs and scope when all dependencies have ended."""
    steps = {"a": work(), "b": work("a", when="steps.a.outputs.v == scope.wanted"), "c": work("b")}
    await flows.start(steps, scope={"wanted": 1})
    await flows.report((await flows.claim())["a"], outputs={"v": v})
    assert (await flows.steps())["b"] == expected
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_references_in_inputs_are_resolved(flows: FlowsStepper) -> None:
    """F8: a reference is replaced by the output; an unresolved reference fails the step, not the engine."""
    await flows.start({"a": work(), "b": work("a", inputs={"v": "${steps.a.outputs.v}"})})
    await flows.report((await flows.claim())["a"], outputs={"v": [1, {"x": None}]})
    assert (await flows.claim())["b"].inputs == {"v": [1, {"x": None}]}
    await flows.start({"a": work(), "b": work("a", inputs={"v": "${steps.a.outputs.v}"})}, "other")
    await flows.work()
    assert (await flows.step("b", "other"))["error"]["code"] == "REFERENCE_UNRESOLVED"
    assert await flows.status("other") == "FAILED"


async def test_map_runs_a_step_per_item(flows: FlowsStepper) -> None:
    """F14: items are created at run time; the map has their outputs in order."""
    steps = {
        "a": work(),
        "m": map_step("${steps.a.outputs.list}", "a"),
        "z": work("m", inputs={"all": "${steps.m.outputs}"}),
    }
    await flows.start(steps)
    await flows.report((await flows.claim())["a"], outputs={"list": ["x", {"y": 1}]})
    claimed = await flows.claim()
    assert [claimed[name].inputs for name in ("m[0]", "m[1]")] == [{"item": "x"}, {"item": {"y": 1}}]
    await flows.report(claimed["m[1]"], outputs={"v": 1})
    assert (await flows.steps())["m"] == "RUNNING"
    await flows.report(claimed["m[0]"], outputs={"v": 0})
    outputs = (await flows.claim())["z"].inputs["all"]
    assert outputs == {"count": 2, "items": [{"v": 0}, {"v": 1}], "truncated": False}


async def test_map_over_an_empty_list_succeeds(flows: FlowsStepper) -> None:
    """F14: the steps after a map without items run."""
    await flows.start({"m": map_step([]), "z": work("m"), "n": map_step([], "z")})
    assert await flows.work() == ["z"]
    assert (await flows.status(), (await flows.step("n"))["outputs"]["count"]) == ("SUCCEEDED", 0)


@pytest.mark.parametrize("over", [3, "abc", {"a": 1}, None])
async def test_map_over_another_type_fails(flows: FlowsStepper, over: Any) -> None:
    """F14: the step fails with an error code."""
    await flows.start({"a": work(), "m": map_step("${steps.a.outputs.list}", "a")})
    await flows.report((await flows.claim())["a"], outputs={"list": over})
    assert (await flows.step("m"))["error"]["code"] == "NOT_A_LIST"
    assert await flows.status() == "FAILED"


async def test_failed_item_fails_its_map(flows: FlowsStepper) -> None:
    """F14: waiting items are cancelled, running items must stop; a retry runs the rest."""
    await flows.start({"m": map_step([0, 1, 2, 3]), "z": work("m")})
    claimed = await flows.claim(3)
    await flows.report(claimed["m[0]"])
    await flows.report(claimed["m[1]"], StepReportKind.FAILED)
    assert await flows.steps() == {
        "m": "FAILED",
        "z": "CANCELLED",
        "m[0]": "SUCCEEDED",
        "m[1]": "FAILED",
        "m[2]": "RUNNING",
        "m[3]": "CANCELLED",
    }
    assert await flows.engine.heartbeat([("r", "m[2]", 1)]) == {("r", "m[2]", 1): True}
    await flows.report(claimed["m[2]"], StepReportKind.FAILED)
    with pytest.raises(Conflict):
        await flows.operations.retry("r", "tester", "m[1]")
    await flows.operations.retry("r", "tester", "m")
    again = await flows.claim()
    assert {name: step.inputs for name, step in again.items()} == {f"m[{n}]": {"item": n} for n in (1, 2, 3)}
    for step in again.values():
        await flows.report(step)
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_optional_items_and_maps_are_skipped(flows: FlowsStepper) -> None:
    """F7, F14: a failed item that is not required is skipped; so is a map that is not required."""
    await flows.start(
        {"m": map_step([0, 1], do={"required": False}), "n": map_step([0], required=False), "z": work("m", "n")}
    )
    await flows.work("m[0]", "n[0]")
    steps = await flows.steps()
    assert (steps["m"], steps["n"], steps["m[0]"], steps["n[0]"]) == ("SUCCEEDED", "SKIPPED", "SKIPPED", "FAILED")
    assert (steps["z"], await flows.status()) == ("SUCCEEDED", "SUCCEEDED")


async def test_items_of_an_ended_map_do_not_start_again(flows: FlowsStepper) -> None:
    """F11, F14: a released or lost item is cancelled; the result of a completed item is stored."""
    await flows.start({"m": map_step([0, 1, 2, 3, 4], required=False), "z": work("m")})
    claimed = await flows.claim(4)
    await flows.report(claimed["m[0]"], StepReportKind.FAILED)
    await flows.report(claimed["m[1]"], StepReportKind.RELEASED)
    await flows.report(claimed["m[2]"])
    assert await flows.expire_leases() == 1
    steps = await flows.steps()
    assert [steps[f"m[{n}]"] for n in range(5)] == ["FAILED", "CANCELLED", "SUCCEEDED", "CANCELLED", "CANCELLED"]
    assert await flows.work() == ["z"]
    assert await flows.status() == "SUCCEEDED"


async def test_retry_ignores_a_skipped_map(flows: FlowsStepper) -> None:
    """F10, F14: failed items of a skipped map are not failures of the run."""
    await flows.start({"m": map_step([0, 1], required=False), "b": work(), "z": work("m", "b")})
    claimed = await flows.claim()
    for name, outcome in (
        ("m[0]", StepReportKind.FAILED),
        ("m[1]", StepReportKind.CANCELLED),
        ("b", StepReportKind.FAILED),
    ):
        assert await flows.report(claimed[name], outcome) is StepReportAnswer.SETTLED
    await flows.operations.retry("r", "tester", "b")
    await flows.work()
    steps = await flows.steps()
    assert (steps["m"], steps["m[0]"], steps["z"]) == ("SKIPPED", "FAILED", "SUCCEEDED")
    assert await flows.status() == "SUCCEEDED"


async def test_sub_run_returns_the_outputs_of_its_last_steps(flows: FlowsStepper) -> None:
    """F14: references of the sub-run are local; the step ends with the status of the sub-run."""
    within = {"x": work(), "y": work("x", inputs={"v": "${steps.x.outputs.v}"})}
    await flows.start({"a": flow_step(within), "z": work("a")})
    await flows.report((await flows.claim())["x"], outputs={"v": 7})
    claimed = (await flows.claim())["y"]
    assert claimed.inputs == {"v": 7}
    await flows.report(claimed, outputs={"w": 8})
    await flows.settle_sub_runs()
    outputs = (await flows.step("a"))["outputs"]
    assert outputs == {"runId": "r~a", "outputs": {"y": {"w": 8}}, "truncated": False}
    await flows.work()
    assert (await flows.status(), await flows.status("r~a")) == ("SUCCEEDED", "SUCCEEDED")


async def test_failed_sub_run_fails_its_step(flows: FlowsStepper) -> None:
    """F14: a retry of the step creates another sub-run."""
    await flows.start({"a": flow_step({"x": work()}), "z": work("a")})
    await flows.work("x")
    await flows.settle_sub_runs()
    assert (await flows.step("a"))["error"]["code"] == "INNER_RUN_FAILED"
    assert await flows.status() == "FAILED"
    await flows.operations.retry("r", "tester", "a")
    await flows.work()
    await flows.settle_sub_runs()
    await flows.work()
    assert (await flows.status(), await flows.status("r~a"), await flows.status("r~a~2")) == (
        "SUCCEEDED",
        "FAILED",
        "SUCCEEDED",
    )


async def test_sub_run_is_cancelled_with_its_run(flows: FlowsStepper) -> None:
    """F9, F14: a cancelled sub-run fails its step."""
    await flows.start({"a": flow_step({"x": work()})})
    await flows.operations.cancel("r", "tester")
    await flows.settle_sub_runs()
    assert (await flows.status("r~a"), await flows.steps()) == ("CANCELLED", {"a": "CANCELLED"})
    await flows.start({"a": flow_step({"x": work()})}, "other")
    await flows.operations.cancel("other~a", "tester")
    await flows.settle_sub_runs()
    assert (await flows.step("a", "other"))["error"]["code"] == "INNER_RUN_CANCELLED"


async def test_nesting_is_limited(flows: FlowsStepper) -> None:
    """F14: a flow that is nested too deep fails, and with it all outer runs."""
    for n in range(DEPTH_LIMIT + 2):
        flows.catalogue.add(f"f{n}", {"a": {"kind": "flow", "inputs": {"flow": f"f{n + 1}"}}})
    await flows.start(None, flow="f0")
    for _ in range(DEPTH_LIMIT):
        await flows.maintenance.start_waiting_runs()
    assert await flows.db.fetchval("SELECT max(depth) FROM flow_run") == DEPTH_LIMIT
    await flows.settle_sub_runs()
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE status <> 'FAILED'") == 0
    assert await flows.db.fetchval("SELECT count(*) FROM flow_step WHERE error ->> 'code' = 'NESTING_TOO_DEEP'") == 1


async def test_recursion_is_refused(flows: FlowsStepper) -> None:
    """F14: directly, through other flows, or with inline steps; the run fails before further runs are created."""
    again = {"kind": "flow", "inputs": {"flow": "snake"}}
    flows.catalogue.add("snake", {"a": again, "b": again, "c": {"kind": "flow", "inputs": {"flow": "other"}}})
    flows.catalogue.add("other", {"d": flow_step({"e": again})})
    await flows.start(None, flow="snake")
    assert (await flows.step("a"))["error"]["code"] == "FLOW_RECURSION"
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") <= 2
    flows.catalogue.add("snake", {"c": {"kind": "flow", "inputs": {"flow": "other"}}})
    await flows.start(None, "deep", flow="snake")
    await flows.maintenance.start_waiting_runs()
    await flows.settle_sub_runs()
    assert (await flows.step("e", "deep~c~d"))["error"]["code"] == "FLOW_RECURSION"
    assert await flows.status("deep") == "FAILED"
