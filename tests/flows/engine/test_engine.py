"""Each clause by an example: what a run does when one thing happens."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.flows import store
from penstock.flows.contract import DEPTH_LIMIT, Answer, Said
from penstock.flows.definition.spec import RunRequest
from penstock.flows.model import Report, StepError
from penstock.kernel.errors import Conflict, Invalid, NotFound
from tests.flows.stepper import FlowsStepper, ProcessDied, flows_stepper, inner, mapped, report, work, written_by

DIAMOND = {"a": work(), "b": work("a"), "c": work("a"), "d": work("b", "c")}
FINAL = StepError("BAD_SYMBOL", "there is no such symbol")


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path, max_lost=2) as one:
        yield one


# F1–F3: made, and in order.


async def test_a_diamond_is_done_in_order(flows: FlowsStepper) -> None:
    """F1, F3: a step is READY once all it depends on has ended well, and not before."""
    await flows.start(DIAMOND)
    assert await flows.steps() == {"a": "READY", "b": "PENDING", "c": "PENDING", "d": "PENDING"}
    held = await flows.claim()
    assert await flows.steps() == {"a": "RUNNING", "b": "PENDING", "c": "PENDING", "d": "PENDING"}
    await flows.say(held["a"])
    held = await flows.claim()
    assert held.keys() == {"b", "c"}
    await flows.say(held["b"])
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "SUCCEEDED", "c": "RUNNING", "d": "PENDING"}
    assert await flows.status() == "RUNNING"
    await flows.say(held["c"])
    assert await flows.work() == ["d"]
    assert await flows.status() == "SUCCEEDED"


async def test_the_same_request_makes_one_run(flows: FlowsStepper) -> None:
    """F2: a runId is taken once; the same request is answered with it, another is refused."""
    await flows.start(DIAMOND)
    before = await flows.fingerprint()
    await flows.start(dict(reversed(DIAMOND.items())))
    assert await flows.fingerprint() == before
    with pytest.raises(Conflict, match="made of something else"):
        await flows.start({"a": work()})
    assert await flows.fingerprint() == before


@pytest.mark.parametrize(
    ("steps", "named"),
    [
        ({"a": work("b"), "b": work("a")}, "a"),
        ({"a": work("a")}, "a"),
        ({"a": work(), "b": work("nobody")}, "nobody"),
    ],
)
async def test_what_is_no_flow_is_refused(flows: FlowsStepper, steps: dict[str, Any], named: str) -> None:
    """F2: circles and unknown dependencies are named, and nothing is kept of them."""
    with pytest.raises(Invalid, match=named):
        await flows.start(steps)
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 0


async def test_an_id_that_comes_twice_is_named() -> None:
    """F2: in a list of steps each has an id of its own."""
    with pytest.raises(ValidationError, match="'a' comes twice"):
        RunRequest.model_validate({"steps": [{"id": "a", "kind": "x"}, {"id": "a", "kind": "y"}]})


async def test_an_empty_flow_has_succeeded(flows: FlowsStepper) -> None:
    """F2: there is nothing to wait for."""
    await flows.start({})
    assert await flows.status() == "SUCCEEDED"


async def test_only_advance_makes_a_step_ready(flows: FlowsStepper) -> None:
    """F3: whatever workers, the reaper and people do, READY is advance's word alone; a report has no word for it."""
    assert "READY" not in set(Said)
    await flows.start({**DIAMOND, "e": work(retry={"maxAttempts": 3, "backoff": 0})})
    held = await flows.claim()
    await flows.say(held["e"], Said.FAILED)
    await flows.say(held["a"], Said.RELEASED)
    await flows.claim()
    await flows.lose()
    await flows.management.skip("r", "b", "tester")
    await flows.work()
    assert {actor for _, _, target, actor in await flows.moves() if target == "READY"} == {"advance"}


async def test_nothing_follows_from_what_changes_nothing(flows: FlowsStepper) -> None:
    """F3: reports that repeat or come late, sweeps and looks on a run that stands as it should touch no row."""
    await flows.start({**DIAMOND, "m": mapped([1, 2]), "n": inner({"x": work()})})
    held = await flows.claim()
    await flows.say(held["a"], outputs={"v": 1})
    await flows.say(held["m[0]"], Said.FAILED)
    before = await flows.fingerprint()
    assert await flows.say(held["a"], outputs={"v": 1}) is Answer.UNCHANGED
    assert await flows.say(held["a"], outputs={"v": 2}) is Answer.CONFLICT
    assert await flows.say(held["m[0]"], Said.FAILED) is Answer.UNCHANGED
    stranger = Report("r", "a", 99, Said.SUCCEEDED)
    unknown = Report("r", "nobody", 1, Said.SUCCEEDED)
    assert await flows.engine.report([stranger, unknown]) == [Answer.SUPERSEDED, Answer.UNKNOWN]
    assert await flows.engine.heartbeat([("r", "a", held["a"].fence), ("r", "nobody", 1)]) == {}
    assert await flows.engine.reap() == 0
    assert await flows.keeper.repair() == 0
    for chore in (flows.keeper.admit, flows.keeper.keep_schedules, flows.keeper.publish_again, flows.keeper.tell_outer):
        await chore()
    async with flows.db.transaction() as tx:
        run = await flows.engine.run_named(tx, "r")
        told = await store.advance(tx, [run], flows.clock.now())
        assert (told.ready, told.looks, told.runs) == (set(), [], [])
    assert await flows.fingerprint() == before


async def test_a_heartbeat_is_no_move(flows: FlowsStepper) -> None:
    """F3: it extends a lease, and that is all: nothing is noted, nobody is woken."""
    await flows.start(DIAMOND)
    held = await flows.claim()
    _, noted, rung = await flows.fingerprint()
    flows.clock.advance(timedelta(seconds=30))
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): False}
    assert (await flows.fingerprint())[1:] == (noted, rung)
    assert (await flows.step("a"))["lease_until"] == held["a"].lease_until + timedelta(seconds=30)


@pytest.mark.parametrize("harm", ["unmet = unmet + 1", "unmet = 0"])
async def test_the_sweep_repairs_counters(flows: FlowsStepper, harm: str) -> None:
    """F3: what a crash, or a hand in the database, left wrong is set right, and the run goes on to its end."""
    await flows.start({**DIAMOND, "m": mapped([1, 2], "a"), "z": work("m", "d")})
    await flows.work()
    await flows.start({**DIAMOND, "m": mapped([1, 2], "a"), "z": work("m", "d")}, "other")
    held = await flows.claim(1)
    await flows.say(held["a"])
    await flows.db.execute(f"UPDATE flow_step SET {harm} WHERE status = 'PENDING' OR kind = 'map'")
    await flows.db.execute("UPDATE flow_step SET status = 'PENDING', unmet = 5 WHERE status = 'READY'")
    await flows.keeper.repair()
    await flows.work()
    await flows.keeper.repair()
    await flows.work()
    assert await flows.status("other") == "SUCCEEDED"
    assert set((await flows.steps("other")).values()) == {"SUCCEEDED"}


# F4, F5: claims and reports.


async def test_a_claim_is_one_workers(flows: FlowsStepper) -> None:
    """F4: what is held is not handed out again; each claim has a fence of its own."""
    await flows.start({"a": work(), "b": work()})
    first, second = await flows.claim(1, "one"), await flows.claim(9, "two")
    assert (list(first), list(second)) == (["a"], ["b"])
    assert await flows.claim(9, "three") == {}
    await flows.say(first["a"], Said.RELEASED)
    again = await flows.claim(9, "three")
    assert (again["a"].fence, again["a"].attempt) == (first["a"].fence + 1, 1)


async def test_an_old_fence_changes_nothing(flows: FlowsStepper) -> None:
    """F4: the worker that lost its step is told so, whatever it says."""
    await flows.start({"a": work()})
    old = (await flows.claim())["a"]
    await flows.lose()
    new = (await flows.claim(worker="other"))["a"]
    before = await flows.fingerprint()
    for said in Said:
        assert await flows.say(old, said) is Answer.SUPERSEDED
    answers, _ = await flows.counter.settle("w", [(old, report(old))], ["work"], 5)
    assert answers == [Answer.SUPERSEDED]
    assert await flows.fingerprint() == before
    assert await flows.say(new, outputs={"v": 2}) is Answer.SETTLED
    assert await flows.say(old, outputs={"v": 1}) is Answer.SUPERSEDED
    assert (await flows.step("a"))["outputs"] == {"v": 2}


async def test_only_links_may_change_after_the_end(flows: FlowsStepper) -> None:
    """F5: `signed_url` and `expires_at` are taken over later; anything else is a contradiction."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    await flows.say(held, outputs={"v": 1, "signed_url": "x"})
    assert await flows.say(held, outputs={"v": 1, "signed_url": "y", "expires_at": "soon"}) is Answer.UNCHANGED
    assert (await flows.step("a"))["outputs"] == {"v": 1, "signed_url": "y", "expires_at": "soon"}
    assert await flows.say(held, outputs={"v": 2, "signed_url": "z"}) is Answer.CONFLICT
    assert (await flows.step("a"))["outputs"]["signed_url"] == "y"


async def test_of_two_reports_in_one_batch_the_first_counts(flows: FlowsStepper) -> None:
    """F5: the same again is fine, another is a conflict, in a batch as anywhere."""
    await flows.start({"a": work()})
    held = (await flows.claim())["a"]
    batch = [report(held, outputs={"v": 1}), report(held, Said.FAILED), report(held, outputs={"v": 1})]
    assert await flows.engine.report(batch) == [Answer.SETTLED, Answer.CONFLICT, Answer.UNCHANGED]
    assert (await flows.step("a"))["outputs"] == {"v": 1}


async def test_an_error_is_kept_as_it_was_said(flows: FlowsStepper) -> None:
    """F5: code, message and details."""
    await flows.start({"a": work()})
    await flows.say((await flows.claim())["a"], Said.FAILED, error=StepError("NO_DATA", "none", {"symbol": "X"}))
    assert (await flows.step("a"))["error"] == {"code": "NO_DATA", "message": "none", "details": {"symbol": "X"}}


# F6: artifacts.


async def test_artifacts_are_the_winners(flows: FlowsStepper) -> None:
    """F6: who lost the lease publishes nothing over the winner, before or after."""
    await flows.start({"a": work()})
    old = (await flows.claim())["a"]
    await flows.write(old)
    await flows.lose()
    new = (await flows.claim())["a"]
    await flows.write(new)
    assert await flows.say(old, artifacts=["out.txt"]) is Answer.SUPERSEDED
    with pytest.raises(NotFound):
        await flows.engine.read("r", "a", "out.txt")
    assert await flows.say(new, artifacts=["out.txt"]) is Answer.SETTLED
    await flows.write(old, data=b"late")
    assert await flows.say(old, artifacts=["out.txt"]) is Answer.SUPERSEDED
    assert await flows.engine.read("r", "a", "out.txt") == written_by(new)
    assert (await flows.engine.artifact("r", "a", "out.txt")).path == "runs/r/a/out.txt"


async def test_a_report_of_what_is_not_there_is_a_failure(flows: FlowsStepper) -> None:
    """F6: a success is believed when what it names was written."""
    await flows.start({"a": work()})
    assert await flows.say((await flows.claim())["a"], artifacts=["out.txt"]) is Answer.SETTLED
    assert (await flows.step("a"))["error"]["code"] == "ARTIFACT_MISSING"
    assert await flows.status() == "FAILED"


async def test_a_process_that_dies_while_it_publishes_loses_nothing(flows: FlowsStepper) -> None:
    """F6: the report was believed; nobody else gets the step, and another process publishes it."""
    await flows.start({"a": work(), "b": work("a")})
    held = (await flows.claim())["a"]
    await flows.write(held)
    flows.storage.is_dying = True
    with pytest.raises(ProcessDied):
        await flows.say(held, artifacts=["out.txt"])
    flows.storage.is_dying = False
    assert await flows.lose() == 0
    assert await flows.claim() == {}
    assert await flows.say(held, Said.FAILED) is Answer.CONFLICT
    assert await flows.counter.settle("w", [(held, report(held))], [], 0) == ([Answer.CONFLICT], [])
    await flows.keeper.publish_again()
    assert await flows.steps() == {"a": "SUCCEEDED", "b": "READY"}
    assert await flows.engine.read("r", "a", "out.txt") == written_by(held)
    assert await flows.say(held, artifacts=["out.txt"]) is Answer.UNCHANGED


# F7, F8: failures, skips and conditions.


async def test_a_failure_fails_the_run(flows: FlowsStepper) -> None:
    """F7: what has not begun is cancelled; what is under way may end, and what it says is kept."""
    await flows.start({"a": work(), "b": work(), "c": work("b"), "d": work()})
    held = await flows.claim(2)
    await flows.say(held["a"], Said.FAILED)
    assert await flows.steps() == {"a": "FAILED", "b": "RUNNING", "c": "CANCELLED", "d": "CANCELLED"}
    assert (await flows.step("c"))["reason"] == "upstream_failed"
    assert await flows.status() == "FAILED"
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): False}
    assert await flows.say(held["b"]) is Answer.SETTLED
    assert await flows.steps() == {"a": "FAILED", "b": "SUCCEEDED", "c": "CANCELLED", "d": "CANCELLED"}


async def test_a_run_that_fails_fast_stops_the_others(flows: FlowsStepper) -> None:
    """F7: with `failFast` what is under way is told to stop."""
    await flows.start({"a": work(), "b": work()}, policy={"failFast": True})
    held = await flows.claim()
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): False}
    await flows.say(held["a"], Said.FAILED)
    assert await flows.engine.heartbeat([("r", "b", 1)]) == {("r", "b", 1): True}
    assert await flows.say(held["b"], Said.CANCELLED) is Answer.SETTLED
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
    await flows.say((await flows.claim())["a"], outputs={"v": v})
    assert (await flows.steps())["b"] == expected
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_inputs_are_filled_in(flows: FlowsStepper) -> None:
    """F8: a reference is what the step before gave; one to nothing fails the step, not the engine."""
    await flows.start({"a": work(), "b": work("a", inputs={"v": "${steps.a.outputs.v}"})})
    await flows.say((await flows.claim())["a"], outputs={"v": [1, {"x": None}]})
    assert (await flows.claim())["b"].inputs == {"v": [1, {"x": None}]}
    await flows.start({"a": work(), "b": work("a", inputs={"v": "${steps.a.outputs.v}"})}, "other")
    await flows.work()
    assert (await flows.step("b", "other"))["error"]["code"] == "UNRESOLVED"
    assert await flows.status("other") == "FAILED"


# F9–F11: cancel, retry, skip, lost leases.


async def test_cancel_stops_what_waits_and_tells_what_runs(flows: FlowsStepper) -> None:
    """F9: waiting steps are cancelled, running ones told; the first end wins, in both directions."""
    await flows.start({"a": work(), "b": work("a"), "c": work()})
    held = await flows.claim(1)
    await flows.management.cancel("r", "tester", "enough")
    assert await flows.steps() == {"a": "RUNNING", "b": "CANCELLED", "c": "CANCELLED"}
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): True}
    assert await flows.say(held["a"]) is Answer.SETTLED
    assert (await flows.status(), (await flows.steps())["a"]) == ("CANCELLED", "SUCCEEDED")
    before = await flows.fingerprint()
    await flows.management.cancel("r", "tester")
    assert (await flows.fingerprint())[:2] == before[:2]
    await flows.start({}, "done")
    with pytest.raises(Conflict, match="SUCCEEDED"):
        await flows.management.cancel("done", "tester")
    assert await flows.status("done") == "SUCCEEDED"


async def test_a_step_is_tried_again_after_a_while(flows: FlowsStepper) -> None:
    """F10: up to maxAttempts, each time after a longer wait."""
    await flows.start({"a": work(retry={"maxAttempts": 3, "backoff": 10})})
    for first, most in ((5, 10), (10, 20)):
        await flows.say((await flows.claim())["a"], Said.FAILED)
        flows.clock.advance(timedelta(seconds=first - 1))
        assert await flows.claim() == {}
        flows.clock.advance(timedelta(seconds=most - first + 1))
    assert (await flows.claim())["a"].attempt == 3
    await flows.start({"a": work()}, "other")
    held = await flows.step("a")
    await flows.engine.report([Report("r", "a", held["fence"], Said.FAILED, error=StepError("BROKEN", "it broke"))])
    assert (await flows.status(), (await flows.steps())["a"]) == ("FAILED", "FAILED")


@pytest.mark.parametrize(
    ("retry", "is_retryable", "expected"),
    [
        ({}, None, "READY"),
        ({}, False, "FAILED"),
        ({"final": ["BAD_SYMBOL"]}, None, "FAILED"),
        ({"final": ["BAD_SYMBOL"]}, True, "FAILED"),
        ({"retryable": ["OTHER"]}, True, "FAILED"),
        ({"retryable": ["BAD_SYMBOL"]}, False, "READY"),
    ],
)
async def test_an_error_may_be_final(
    flows: FlowsStepper, retry: dict[str, Any], is_retryable: bool | None, expected: str
) -> None:
    """F10: what the step says of a code comes before what the worker thinks of it."""
    await flows.start({"a": work(retry={"maxAttempts": 2, "backoff": 0, **retry})})
    await flows.say((await flows.claim())["a"], Said.FAILED, error=FINAL, is_retryable=is_retryable)
    assert (await flows.steps())["a"] == expected


async def test_retry_goes_on_where_it_failed(flows: FlowsStepper) -> None:
    """F10: the run is opened again with what was cancelled; what succeeded is not done again."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work("a")})
    await flows.work("b")
    assert await flows.management.retry("r", "tester", "b") == ["b", "c", "d"]
    assert await flows.status() == "RUNNING"
    assert sorted(await flows.work()) == ["b", "c", "d"]
    assert await flows.status() == "SUCCEEDED"
    with pytest.raises(Conflict):
        await flows.management.retry("r", "tester")
    with pytest.raises(Conflict):
        await flows.management.retry("r", "tester", "b")


async def test_a_retry_beside_another_failure_ends_failed(flows: FlowsStepper) -> None:
    """F10: what also waits for another failure stays cancelled, and the run ends with what can be done."""
    await flows.start({"x": work(), "y": work(), "z": work("x", "y")})
    held = await flows.claim()
    for one in held.values():
        await flows.say(one, Said.FAILED)
    await flows.management.retry("r", "tester", "x")
    assert await flows.steps() == {"x": "READY", "y": "FAILED", "z": "CANCELLED"}
    assert await flows.work() == ["x"]
    assert await flows.status() == "FAILED"
    assert await flows.keeper.repair() == 0
    with pytest.raises(Conflict, match="y"):
        await flows.management.retry("r", "tester", "z")
    await flows.management.retry("r", "tester")
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_a_cancelled_run_goes_on_after_a_retry(flows: FlowsStepper) -> None:
    """F10: with all that was cancelled; what was under way all along goes on too."""
    await flows.start(DIAMOND)
    held = await flows.claim()
    await flows.management.cancel("r", "tester")
    await flows.management.retry("r", "tester")
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): False}
    await flows.say(held["a"])
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_a_step_is_skipped_by_hand(flows: FlowsStepper) -> None:
    """F10: before its turn, at it, or after it failed; not while it runs, nor once it is done."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work()})
    await flows.management.skip("r", "c", "tester")
    await flows.management.skip("r", "a", "tester")
    assert await flows.steps() == {"a": "SKIPPED", "b": "READY", "c": "SKIPPED", "d": "READY"}
    held = await flows.claim()
    with pytest.raises(Conflict):
        await flows.management.skip("r", "b", "tester")
    await flows.say(held["d"])
    await flows.say(held["b"], Said.FAILED)
    await flows.management.skip("r", "b", "tester")
    assert await flows.status() == "SUCCEEDED"
    with pytest.raises(Conflict):
        await flows.management.skip("r", "d", "tester")


async def test_a_run_does_not_end_before_its_steps(flows: FlowsStepper) -> None:
    """F10: to skip the last step ends nothing while those before it are open."""
    await flows.start({"a": work(), "z": work("a")})
    await flows.management.skip("r", "z", "tester")
    assert (await flows.status(), (await flows.steps())["a"]) == ("RUNNING", "READY")
    assert await flows.work() == ["a"]
    assert await flows.status() == "SUCCEEDED"


async def test_a_lost_lease_is_tried_again_under_a_new_fence(flows: FlowsStepper) -> None:
    """F11: READY again, until it has been tried often enough."""
    await flows.start({"a": work(), "b": work(retry={"maxAttempts": 1}), "c": work(required=False)})
    first = await flows.claim()
    assert await flows.lose() == 3
    assert await flows.steps() == {"a": "CANCELLED", "b": "FAILED", "c": "CANCELLED"}
    assert (await flows.step("b"))["error"]["code"] == "LEASE_EXPIRED"
    await flows.management.skip("r", "b", "tester")
    second = await flows.claim()
    assert second["a"].fence > first["a"].fence
    await flows.lose()
    third = await flows.claim()
    assert third["a"].fence > second["a"].fence
    await flows.lose()
    assert await flows.steps() == {"a": "FAILED", "b": "SKIPPED", "c": "SKIPPED"}


async def test_a_lease_ends_with_the_time_a_step_may_take(flows: FlowsStepper) -> None:
    """F11: no heartbeat carries an attempt much beyond its timeout."""
    await flows.start({"a": work(timeout=90)})
    await flows.claim()
    for _ in range(2):
        flows.clock.advance(timedelta(seconds=50))
        await flows.engine.heartbeat([("r", "a", 1)])
    step = await flows.step("a")
    assert timedelta(seconds=90) <= step["lease_until"] - step["started_at"] <= timedelta(seconds=100)


# F14: maps and flows within.


async def test_a_map_does_the_same_with_each_item(flows: FlowsStepper) -> None:
    """F14: items are known only at run time; the map gives what they gave, in order."""
    steps = {
        "a": work(),
        "m": mapped("${steps.a.outputs.list}", "a"),
        "z": work("m", inputs={"all": "${steps.m.outputs}"}),
    }
    await flows.start(steps)
    await flows.say((await flows.claim())["a"], outputs={"list": ["x", {"y": 1}]})
    held = await flows.claim()
    assert [held[name].inputs for name in ("m[0]", "m[1]")] == [{"item": "x"}, {"item": {"y": 1}}]
    await flows.say(held["m[1]"], outputs={"v": 1})
    assert (await flows.steps())["m"] == "RUNNING"
    await flows.say(held["m[0]"], outputs={"v": 0})
    told = (await flows.claim())["z"].inputs["all"]
    assert told == {"count": 2, "items": [{"v": 0}, {"v": 1}], "truncated": False}


async def test_a_map_over_nothing_has_succeeded(flows: FlowsStepper) -> None:
    """F14: and what comes after it has its turn."""
    await flows.start({"m": mapped([]), "z": work("m"), "n": mapped([], "z")})
    assert await flows.work() == ["z"]
    assert (await flows.status(), (await flows.step("n"))["outputs"]["count"]) == ("SUCCEEDED", 0)


@pytest.mark.parametrize("over", [3, "abc", {"a": 1}, None])
async def test_a_map_over_what_is_no_list_fails(flows: FlowsStepper, over: Any) -> None:
    """F14: the step fails, with a code that tells why."""
    await flows.start({"a": work(), "m": mapped("${steps.a.outputs.list}", "a")})
    await flows.say((await flows.claim())["a"], outputs={"list": over})
    assert (await flows.step("m"))["error"]["code"] == "NOT_A_LIST"
    assert await flows.status() == "FAILED"


async def test_a_map_fails_with_an_item(flows: FlowsStepper) -> None:
    """F14: what has not begun of it is cancelled, what is under way is told to stop; a retry does what is left."""
    await flows.start({"m": mapped([0, 1, 2, 3]), "z": work("m")})
    held = await flows.claim(3)
    await flows.say(held["m[0]"])
    await flows.say(held["m[1]"], Said.FAILED)
    assert await flows.steps() == {
        "m": "FAILED",
        "z": "CANCELLED",
        "m[0]": "SUCCEEDED",
        "m[1]": "FAILED",
        "m[2]": "RUNNING",
        "m[3]": "CANCELLED",
    }
    assert await flows.engine.heartbeat([("r", "m[2]", 1)]) == {("r", "m[2]", 1): True}
    await flows.say(held["m[2]"], Said.FAILED)
    with pytest.raises(Conflict):
        await flows.management.retry("r", "tester", "m[1]")
    await flows.management.retry("r", "tester", "m")
    again = await flows.claim()
    assert {name: one.inputs for name, one in again.items()} == {f"m[{n}]": {"item": n} for n in (1, 2, 3)}
    for one in again.values():
        await flows.say(one)
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_a_map_may_do_without_items_or_at_all(flows: FlowsStepper) -> None:
    """F7, F14: an item that is not required is skipped; so is a map."""
    await flows.start(
        {"m": mapped([0, 1], do={"required": False}), "n": mapped([0], required=False), "z": work("m", "n")}
    )
    await flows.work("m[0]", "n[0]")
    steps = await flows.steps()
    assert (steps["m"], steps["n"], steps["m[0]"], steps["n[0]"]) == ("SUCCEEDED", "SKIPPED", "SKIPPED", "FAILED")
    assert (steps["z"], await flows.status()) == ("SUCCEEDED", "SUCCEEDED")


async def test_an_item_of_a_map_that_is_over_is_not_begun_again(flows: FlowsStepper) -> None:
    """F11, F14: given back or lost, nobody needs it any more; one that is done all the same is kept."""
    await flows.start({"m": mapped([0, 1, 2, 3, 4], required=False), "z": work("m")})
    held = await flows.claim(4)
    await flows.say(held["m[0]"], Said.FAILED)
    await flows.say(held["m[1]"], Said.RELEASED)
    await flows.say(held["m[2]"])
    assert await flows.lose() == 1
    steps = await flows.steps()
    assert [steps[f"m[{n}]"] for n in range(5)] == ["FAILED", "CANCELLED", "SUCCEEDED", "CANCELLED", "CANCELLED"]
    assert await flows.work() == ["z"]
    assert await flows.status() == "SUCCEEDED"


async def test_a_retry_leaves_a_map_alone_that_was_done_without(flows: FlowsStepper) -> None:
    """F10, F14: failed items of a map that was skipped are no failures of the run."""
    await flows.start({"m": mapped([0, 1], required=False), "b": work(), "z": work("m", "b")})
    held = await flows.claim()
    for name, said in (("m[0]", Said.FAILED), ("m[1]", Said.CANCELLED), ("b", Said.FAILED)):
        assert await flows.say(held[name], said) is Answer.SETTLED
    await flows.management.retry("r", "tester", "b")
    await flows.work()
    steps = await flows.steps()
    assert (steps["m"], steps["m[0]"], steps["z"]) == ("SKIPPED", "FAILED", "SUCCEEDED")
    assert await flows.status() == "SUCCEEDED"


async def test_a_flow_within_gives_what_its_last_steps_gave(flows: FlowsStepper) -> None:
    """F14: its references are its own; the step around it ends as it does."""
    within = {"x": work(), "y": work("x", inputs={"v": "${steps.x.outputs.v}"})}
    await flows.start({"a": inner(within), "z": work("a")})
    await flows.say((await flows.claim())["x"], outputs={"v": 7})
    held = (await flows.claim())["y"]
    assert held.inputs == {"v": 7}
    await flows.say(held, outputs={"w": 8})
    await flows.tell_outer()
    told = (await flows.step("a"))["outputs"]
    assert told == {"runId": "r~a", "outputs": {"y": {"w": 8}}, "truncated": False}
    await flows.work()
    assert (await flows.status(), await flows.status("r~a")) == ("SUCCEEDED", "SUCCEEDED")


async def test_a_flow_within_fails_its_step_and_is_tried_anew(flows: FlowsStepper) -> None:
    """F14: a retry of the step makes a run of its own."""
    await flows.start({"a": inner({"x": work()}), "z": work("a")})
    await flows.work("x")
    await flows.tell_outer()
    assert (await flows.step("a"))["error"]["code"] == "INNER_RUN_FAILED"
    assert await flows.status() == "FAILED"
    await flows.management.retry("r", "tester", "a")
    await flows.work()
    await flows.tell_outer()
    await flows.work()
    assert (await flows.status(), await flows.status("r~a"), await flows.status("r~a~2")) == (
        "SUCCEEDED",
        "FAILED",
        "SUCCEEDED",
    )


async def test_a_flow_within_is_cancelled_with_the_one_around_it(flows: FlowsStepper) -> None:
    """F9, F14: and the other way round its step has failed."""
    await flows.start({"a": inner({"x": work()})})
    await flows.management.cancel("r", "tester")
    await flows.tell_outer()
    assert (await flows.status("r~a"), await flows.steps()) == ("CANCELLED", {"a": "CANCELLED"})
    await flows.start({"a": inner({"x": work()})}, "other")
    await flows.management.cancel("other~a", "tester")
    await flows.tell_outer()
    assert (await flows.step("a", "other"))["error"]["code"] == "INNER_RUN_CANCELLED"


async def test_flows_within_flows_have_a_bottom(flows: FlowsStepper) -> None:
    """F14: what is too deep fails, and all around it."""
    for n in range(DEPTH_LIMIT + 2):
        flows.named.add(f"f{n}", {"a": {"kind": "flow", "inputs": {"flow": f"f{n + 1}"}}})
    await flows.start(None, flow="f0")
    for _ in range(DEPTH_LIMIT):
        await flows.keeper.admit()
    assert await flows.db.fetchval("SELECT max(depth) FROM flow_run") == DEPTH_LIMIT
    await flows.tell_outer()
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE status <> 'FAILED'") == 0
    assert await flows.db.fetchval("SELECT count(*) FROM flow_step WHERE error ->> 'code' = 'TOO_DEEP'") == 1


async def test_a_flow_does_not_run_within_itself(flows: FlowsStepper) -> None:
    """F14: neither directly, nor inside others, nor among steps given inline; it fails before it has grown."""
    again = {"kind": "flow", "inputs": {"flow": "snake"}}
    flows.named.add("snake", {"a": again, "b": again, "c": {"kind": "flow", "inputs": {"flow": "other"}}})
    flows.named.add("other", {"d": inner({"e": again})})
    await flows.start(None, flow="snake")
    assert (await flows.step("a"))["error"]["code"] == "FLOW_WITHIN_ITSELF"
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") <= 2
    flows.named.add("snake", {"c": {"kind": "flow", "inputs": {"flow": "other"}}})
    await flows.start(None, "deep", flow="snake")
    await flows.keeper.admit()
    await flows.tell_outer()
    assert (await flows.step("e", "deep~c~d"))["error"]["code"] == "FLOW_WITHIN_ITSELF"
    assert await flows.status("deep") == "FAILED"


# F16: limits and schedules.


async def test_a_flow_has_so_many_runs_at_once(flows: FlowsStepper) -> None:
    """F16: the others wait as PENDING, and begin in order."""
    flows.named.add("one", {"a": work()}, maxActiveRuns=1)
    for name in ("x", "y", "z"):
        await flows.start(None, name, flow="one")
    assert [await flows.status(name) for name in ("x", "y", "z")] == ["RUNNING", "PENDING", "PENDING"]
    with pytest.raises(Conflict):
        await flows.management.skip("y", "a", "tester")
    await flows.management.cancel("y", "tester")
    assert (await flows.claim()).keys() == {"a"}
    await flows.keeper.admit()
    assert await flows.claim() == {}
    await flows.management.cancel("x", "tester")
    await flows.keeper.admit()
    assert [await flows.status(name) for name in ("x", "y", "z")] == ["CANCELLED", "CANCELLED", "RUNNING"]


async def test_a_kind_has_so_many_steps_at_once(database_url: str, tmp_path: Path) -> None:
    """F16: whoever asks, and whatever a report frees."""
    async with flows_stepper(database_url, tmp_path, limits={"work": 2}) as flows:
        await flows.start({f"s{n}": work() for n in range(5)} | {"t": work("s0")})
        held = await flows.claim(worker="one")
        assert len(held) == 2
        assert await flows.claim(worker="two") == {}
        told = [(held["s0"], report(held["s0"]))]
        _, handed = await flows.counter.settle("one", told, ["work"], 5)
        assert list(handed) == []
        assert len(await flows.claim(worker="two")) == 1


@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [("none", ["05"]), ("last", ["05"]), ("all", ["01", "02", "03", "04", "05"])],
)
async def test_a_schedule_catches_up_as_it_says(flows: FlowsStepper, catch_up: str, expected: list[str]) -> None:
    """F16: of the times that passed unseen none, the last or all are made up for; the one that is now is kept."""
    schedule = {"cron": "* * * * *", "catchUp": catch_up, "overlap": True}
    flows.named.add("tick", {"a": work()}, schedule=schedule)
    await flows.keeper.keep_schedules()
    flows.clock.advance(timedelta(minutes=5, seconds=10))
    for _ in range(8):
        await flows.keeper.keep_schedules()
    rows = await flows.db.fetch("SELECT run_id, scheduled_for FROM flow_run ORDER BY id")
    assert [row["run_id"] for row in rows] == [f"tick-20260101T00{minute}00Z" for minute in expected]
    assert [f"{row['scheduled_for']:%M}" for row in rows] == expected


async def test_a_schedule_that_is_not_due_writes_nothing(flows: FlowsStepper) -> None:
    """F3, F16: looking whether it is time leaves no trace, however often it is done."""
    flows.named.add("tick", {"a": work()}, schedule={"cron": "0 0 * * *"})
    await flows.keeper.keep_schedules()
    before = await flows.db.fetchrow("SELECT xmin, ctid FROM flow_schedule")
    for _ in range(3):
        await flows.keeper.keep_schedules()
    assert await flows.db.fetchrow("SELECT xmin, ctid FROM flow_schedule") == before


async def test_a_schedule_does_not_overlap(flows: FlowsStepper) -> None:
    """F16: while its last run is under way no other is started; afterwards it goes on."""
    flows.named.add("tick", {"a": work()}, schedule={"cron": "* * * * *"})
    await flows.keeper.keep_schedules()
    for _ in range(3):
        flows.clock.advance(timedelta(minutes=1))
        await flows.keeper.keep_schedules()
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 1
    await flows.work()
    await flows.keeper.keep_schedules()
    flows.clock.advance(timedelta(minutes=1))
    await flows.keeper.keep_schedules()
    names = [row["run_id"] for row in await flows.db.fetch("SELECT run_id FROM flow_run ORDER BY id")]
    assert names == ["tick-20260101T000100Z", "tick-20260101T000400Z"]


# F19: resume.


async def resumable(flows: FlowsStepper) -> None:
    """a → b → c, with an artifact each; then d alone."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work()})
    while held := await flows.claim(1):
        for one in held.values():
            await flows.write(one)
            await flows.say(one, outputs={"by": one.step_id}, artifacts=["out.txt"])


async def test_resume_does_again_what_comes_from_a_step(flows: FlowsStepper) -> None:
    """F19: a new run; what was done before the step is taken over with outputs and artifacts."""
    await resumable(flows)
    assert await flows.management.resume("r", "b", "tester", "again") == "again"
    assert await flows.steps("again") == {"a": "SUCCEEDED", "d": "SUCCEEDED", "b": "READY", "c": "PENDING"}
    assert (await flows.step("a", "again"))["outputs"] == {"by": "a"}
    assert await flows.engine.read("again", "a", "out.txt") == b"r/a/1"
    assert await flows.work() == ["b", "c"]
    assert (await flows.status("again"), await flows.status()) == ("SUCCEEDED", "SUCCEEDED")


@pytest.mark.parametrize("harm", ["changed", "removed"])
async def test_resume_does_again_what_no_longer_holds(flows: FlowsStepper, harm: str) -> None:
    """F19: an artifact whose checksum is another, or that is gone, is made again, with all that comes after."""
    await resumable(flows)
    if harm == "changed":
        await flows.storage.put("runs/r/a/out.txt", b"r/a/2")
    else:
        await flows.storage.delete("runs/r/a/out.txt")
    await flows.management.resume("r", "c", "tester", "again")
    assert await flows.steps("again") == {"a": "READY", "d": "SUCCEEDED", "b": "PENDING", "c": "PENDING"}
    assert await flows.work() == ["a", "b", "c"]


async def test_resume_of_what_is_not_there_is_refused(flows: FlowsStepper) -> None:
    """F19: neither an unknown step nor a name that is taken."""
    await resumable(flows)
    with pytest.raises(NotFound):
        await flows.management.resume("r", "nobody", "tester")
    with pytest.raises(NotFound):
        await flows.management.resume("nobody", "a", "tester")
    with pytest.raises(Conflict):
        await flows.management.resume("r", "a", "tester", "r")
