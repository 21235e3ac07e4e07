"""What follows from steps that ended: conditions, failures, maps and flows within."""

from typing import Any

import pytest

from penstock.flows.contract import DEPTH_LIMIT, StepReportAnswer, StepReportKind
from penstock.kernel.errors import Conflict
from tests.flows.stepper import DIAMOND, FlowsStepper, flow_step, map_step, work


async def test_only_advance_makes_a_step_ready(flows: FlowsStepper) -> None:
    """F3: whatever workers, the reaper and people do, READY is advance's word alone; a report has no word for it."""
    assert "READY" not in set(StepReportKind)
    await flows.start({**DIAMOND, "e": work(retry={"maxAttempts": 3, "backoff": 0})})
    held = await flows.claim()
    await flows.report(held["e"], StepReportKind.FAILED)
    await flows.report(held["a"], StepReportKind.RELEASED)
    await flows.claim()
    await flows.expire_leases()
    await flows.operations.skip("r", "b", "tester")
    await flows.work()
    assert {actor for _, _, target, actor in await flows.moves() if target == "READY"} == {"advance"}


async def test_a_failure_fails_the_run(flows: FlowsStepper) -> None:
    """F7: what has not begun is cancelled; what is under way may end, and what it says is kept."""
    await flows.start({"a": work(), "b": work(), "c": work("b"), "d": work()})
    held = await flows.claim(2)
    await flows.report(held["a"], StepReportKind.FAILED)
    assert await flows.steps() == {"a": "FAILED", "b": "RUNNING", "c": "CANCELLED", "d": "CANCELLED"}
    assert (await flows.step("c"))["reason"] == "upstream_failed"
    assert await flows.status() == "FAILED"
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): False}
    assert await flows.report(held["b"]) is StepReportAnswer.SETTLED
    assert await flows.steps() == {"a": "FAILED", "b": "SUCCEEDED", "c": "CANCELLED", "d": "CANCELLED"}


async def test_a_run_that_fails_fast_stops_the_others(flows: FlowsStepper) -> None:
    """F7: with `failFast` what is under way is told to stop."""
    await flows.start({"a": work(), "b": work()}, policy={"failFast": True})
    held = await flows.claim()
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): False}
    await flows.report(held["a"], StepReportKind.FAILED)
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): True}
    assert await flows.report(held["b"], StepReportKind.CANCELLED) is StepReportAnswer.SETTLED
    assert await flows.steps() == {"a": "FAILED", "b": "CANCELLED"}


async def test_what_is_not_required_may_fail(flows: FlowsStepper) -> None:
    """F7, F8: its failure is a skip, with the error kept, and what comes after goes on."""
    await flows.start({"a": work(required=False), "b": work("a"), "c": work("a", onSkip="skip"), "d": work("c")})
    assert await flows.work("a") == ["a", "b", "d"]
    assert await flows.steps() == {"a": "SKIPPED", "b": "SUCCEEDED", "c": "SKIPPED", "d": "SUCCEEDED"}
    assert (await flows.step("a"))["error"]["code"] == "BROKEN"
    assert await flows.status() == "SUCCEEDED"


@pytest.mark.parametrize(("v", "expected"), [(1, "READY"), (0, "SKIPPED")])
async def test_a_condition_decides(flows: FlowsStepper, v: int, expected: str) -> None:
    """F8: `when` is judged when all before has ended, over outputs and scope."""
    steps = {"a": work(), "b": work("a", when="steps.a.outputs.v == scope.wanted"), "c": work("b")}
    await flows.start(steps, scope={"wanted": 1})
    await flows.report((await flows.claim())["a"], outputs={"v": v})
    assert (await flows.steps())["b"] == expected
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_inputs_are_filled_in(flows: FlowsStepper) -> None:
    """F8: a reference is what the step before gave; one to nothing fails the step, not the engine."""
    await flows.start({"a": work(), "b": work("a", inputs={"v": "${steps.a.outputs.v}"})})
    await flows.report((await flows.claim())["a"], outputs={"v": [1, {"x": None}]})
    assert (await flows.claim())["b"].inputs == {"v": [1, {"x": None}]}
    await flows.start({"a": work(), "b": work("a", inputs={"v": "${steps.a.outputs.v}"})}, "other")
    await flows.work()
    assert (await flows.step("b", "other"))["error"]["code"] == "REFERENCE_UNRESOLVED"
    assert await flows.status("other") == "FAILED"


async def test_a_map_does_the_same_with_each_item(flows: FlowsStepper) -> None:
    """F14: items are known only at run time; the map gives what they gave, in order."""
    steps = {
        "a": work(),
        "m": map_step("${steps.a.outputs.list}", "a"),
        "z": work("m", inputs={"all": "${steps.m.outputs}"}),
    }
    await flows.start(steps)
    await flows.report((await flows.claim())["a"], outputs={"list": ["x", {"y": 1}]})
    held = await flows.claim()
    assert [held[name].inputs for name in ("m[0]", "m[1]")] == [{"item": "x"}, {"item": {"y": 1}}]
    await flows.report(held["m[1]"], outputs={"v": 1})
    assert (await flows.steps())["m"] == "RUNNING"
    await flows.report(held["m[0]"], outputs={"v": 0})
    told = (await flows.claim())["z"].inputs["all"]
    assert told == {"count": 2, "items": [{"v": 0}, {"v": 1}], "truncated": False}


async def test_a_map_over_nothing_has_succeeded(flows: FlowsStepper) -> None:
    """F14: and what comes after it has its turn."""
    await flows.start({"m": map_step([]), "z": work("m"), "n": map_step([], "z")})
    assert await flows.work() == ["z"]
    assert (await flows.status(), (await flows.step("n"))["outputs"]["count"]) == ("SUCCEEDED", 0)


@pytest.mark.parametrize("over", [3, "abc", {"a": 1}, None])
async def test_a_map_over_what_is_no_list_fails(flows: FlowsStepper, over: Any) -> None:
    """F14: the step fails, with a code that tells why."""
    await flows.start({"a": work(), "m": map_step("${steps.a.outputs.list}", "a")})
    await flows.report((await flows.claim())["a"], outputs={"list": over})
    assert (await flows.step("m"))["error"]["code"] == "NOT_A_LIST"
    assert await flows.status() == "FAILED"


async def test_a_map_fails_with_an_item(flows: FlowsStepper) -> None:
    """F14: what has not begun of it is cancelled, what is under way is told to stop; a retry does what is left."""
    await flows.start({"m": map_step([0, 1, 2, 3]), "z": work("m")})
    held = await flows.claim(3)
    await flows.report(held["m[0]"])
    await flows.report(held["m[1]"], StepReportKind.FAILED)
    assert await flows.steps() == {
        "m": "FAILED",
        "z": "CANCELLED",
        "m[0]": "SUCCEEDED",
        "m[1]": "FAILED",
        "m[2]": "RUNNING",
        "m[3]": "CANCELLED",
    }
    assert await flows.engine.heartbeat([("r", "m[2]", 1)]) == {("r", "m[2]", 1): True}
    await flows.report(held["m[2]"], StepReportKind.FAILED)
    with pytest.raises(Conflict):
        await flows.operations.retry("r", "tester", "m[1]")
    await flows.operations.retry("r", "tester", "m")
    again = await flows.claim()
    assert {name: one.inputs for name, one in again.items()} == {f"m[{n}]": {"item": n} for n in (1, 2, 3)}
    for one in again.values():
        await flows.report(one)
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_a_map_may_do_without_items_or_at_all(flows: FlowsStepper) -> None:
    """F7, F14: an item that is not required is skipped; so is a map."""
    await flows.start(
        {"m": map_step([0, 1], do={"required": False}), "n": map_step([0], required=False), "z": work("m", "n")}
    )
    await flows.work("m[0]", "n[0]")
    steps = await flows.steps()
    assert (steps["m"], steps["n"], steps["m[0]"], steps["n[0]"]) == ("SUCCEEDED", "SKIPPED", "SKIPPED", "FAILED")
    assert (steps["z"], await flows.status()) == ("SUCCEEDED", "SUCCEEDED")


async def test_an_item_of_a_map_that_is_over_is_not_begun_again(flows: FlowsStepper) -> None:
    """F11, F14: given back or lost, nobody needs it any more; one that is done all the same is kept."""
    await flows.start({"m": map_step([0, 1, 2, 3, 4], required=False), "z": work("m")})
    held = await flows.claim(4)
    await flows.report(held["m[0]"], StepReportKind.FAILED)
    await flows.report(held["m[1]"], StepReportKind.RELEASED)
    await flows.report(held["m[2]"])
    assert await flows.expire_leases() == 1
    steps = await flows.steps()
    assert [steps[f"m[{n}]"] for n in range(5)] == ["FAILED", "CANCELLED", "SUCCEEDED", "CANCELLED", "CANCELLED"]
    assert await flows.work() == ["z"]
    assert await flows.status() == "SUCCEEDED"


async def test_a_retry_leaves_a_map_alone_that_was_done_without(flows: FlowsStepper) -> None:
    """F10, F14: failed items of a map that was skipped are no failures of the run."""
    await flows.start({"m": map_step([0, 1], required=False), "b": work(), "z": work("m", "b")})
    held = await flows.claim()
    for name, said in (
        ("m[0]", StepReportKind.FAILED),
        ("m[1]", StepReportKind.CANCELLED),
        ("b", StepReportKind.FAILED),
    ):
        assert await flows.report(held[name], said) is StepReportAnswer.SETTLED
    await flows.operations.retry("r", "tester", "b")
    await flows.work()
    steps = await flows.steps()
    assert (steps["m"], steps["m[0]"], steps["z"]) == ("SKIPPED", "FAILED", "SUCCEEDED")
    assert await flows.status() == "SUCCEEDED"


async def test_a_flow_within_gives_what_its_last_steps_gave(flows: FlowsStepper) -> None:
    """F14: its references are its own; the step around it ends as it does."""
    within = {"x": work(), "y": work("x", inputs={"v": "${steps.x.outputs.v}"})}
    await flows.start({"a": flow_step(within), "z": work("a")})
    await flows.report((await flows.claim())["x"], outputs={"v": 7})
    held = (await flows.claim())["y"]
    assert held.inputs == {"v": 7}
    await flows.report(held, outputs={"w": 8})
    await flows.settle_sub_runs()
    told = (await flows.step("a"))["outputs"]
    assert told == {"runId": "r~a", "outputs": {"y": {"w": 8}}, "truncated": False}
    await flows.work()
    assert (await flows.status(), await flows.status("r~a")) == ("SUCCEEDED", "SUCCEEDED")


async def test_a_flow_within_fails_its_step_and_is_tried_anew(flows: FlowsStepper) -> None:
    """F14: a retry of the step makes a run of its own."""
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


async def test_a_flow_within_is_cancelled_with_the_one_around_it(flows: FlowsStepper) -> None:
    """F9, F14: and the other way round its step has failed."""
    await flows.start({"a": flow_step({"x": work()})})
    await flows.operations.cancel("r", "tester")
    await flows.settle_sub_runs()
    assert (await flows.status("r~a"), await flows.steps()) == ("CANCELLED", {"a": "CANCELLED"})
    await flows.start({"a": flow_step({"x": work()})}, "other")
    await flows.operations.cancel("other~a", "tester")
    await flows.settle_sub_runs()
    assert (await flows.step("a", "other"))["error"]["code"] == "INNER_RUN_CANCELLED"


async def test_flows_within_flows_have_a_bottom(flows: FlowsStepper) -> None:
    """F14: what is too deep fails, and all around it."""
    for n in range(DEPTH_LIMIT + 2):
        flows.catalogue.add(f"f{n}", {"a": {"kind": "flow", "inputs": {"flow": f"f{n + 1}"}}})
    await flows.start(None, flow="f0")
    for _ in range(DEPTH_LIMIT):
        await flows.maintenance.start_waiting_runs()
    assert await flows.db.fetchval("SELECT max(depth) FROM flow_run") == DEPTH_LIMIT
    await flows.settle_sub_runs()
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE status <> 'FAILED'") == 0
    assert await flows.db.fetchval("SELECT count(*) FROM flow_step WHERE error ->> 'code' = 'NESTING_TOO_DEEP'") == 1


async def test_a_flow_does_not_run_within_itself(flows: FlowsStepper) -> None:
    """F14: neither directly, nor inside others, nor among steps given inline; it fails before it has grown."""
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
