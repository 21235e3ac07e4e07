"""F10, F14, F19: what people do to runs that are under way, inside others, or over."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.kernel.errors import Conflict, NotFound
from tests.flows.scenarios.test_races import WAITING, held_back
from tests.flows.stepper import DIAMOND, FlowsStepper, flow_step, flows_stepper, make_report, map_step, work
from tests.support.wait import becomes


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path) as one:
        yield one


@pytest.mark.parametrize("capacity", [0, 1])
async def test_a_report_that_waited_for_a_skip_counts_as_it_does(flows: FlowsStepper, capacity: int) -> None:
    """F3: the run ends with its last step, though who reports one saw it as it was before the skip."""
    await flows.start({"a": work(), "b": work("a"), "x": work()})
    held = await flows.claim(1)
    async with held_back(flows, "r", 2):
        skipping = asyncio.create_task(flows.operations.skip("r", "x", "tester"))

        async def waits() -> bool:
            return bool(await flows.db.fetchval(WAITING) == 1)

        await becomes(waits, "the skip is the first to wait")
        told = [(held["a"], make_report(held["a"]))]
        settling = asyncio.create_task(flows.work_source.settle("w", told, ["work"], capacity))
    await skipping
    answers, handed = await settling
    assert (answers, len(handed)) == ([StepReportAnswer.SETTLED], capacity)
    for one in handed:
        await flows.report(one)
    await flows.work()
    assert await flows.status() == "SUCCEEDED"
    assert await flows.maintenance.repair() == 0


async def test_to_skip_a_map_that_failed_begins_none_of_its_items(flows: FlowsStepper) -> None:
    """F10, F14: it is done without, with all that is in it."""
    await flows.start({"m": map_step([1, 2, 3]), "z": work("m")})
    await flows.report((await flows.claim(1))["m[0]"], StepReportKind.FAILED)
    await flows.operations.skip("r", "m", "tester")
    steps = await flows.steps()
    assert [steps[f"m[{n}]"] for n in range(3)] == ["FAILED", "CANCELLED", "CANCELLED"]
    assert await flows.work() == ["z"]
    assert await flows.status() == "SUCCEEDED"


async def test_the_same_request_is_the_same_after_its_flow_was_written_anew(flows: FlowsStepper) -> None:
    """F2: a client that repeats itself after a deployment is answered with its run."""
    flows.catalogue.add("f", {"a": work()})
    await flows.start(None, flow="f", scope={"v": 1})
    flows.catalogue.add("f", {"a": work(), "b": work("a")})
    await flows.start(None, flow="f", scope={"v": 1})
    assert await flows.steps() == {"a": "READY"}
    with pytest.raises(Conflict, match="with a different request"):
        await flows.start(None, flow="f", scope={"v": 2})


async def test_who_stopped_for_a_run_that_goes_on_gives_its_step_back(flows: FlowsStepper) -> None:
    """F9, F10: cancelled, stopped, and tried again before the worker said so: nothing waits for a lease."""
    await flows.start({"a": work(retry={"maxAttempts": 1}), "b": work("a")})
    held = (await flows.claim())["a"]
    await flows.operations.cancel("r", "tester")
    assert await flows.engine.heartbeat([("r", "a", held.fence)]) == {("r", "a", held.fence): True}
    await flows.operations.retry("r", "tester")
    assert await flows.report(held, StepReportKind.CANCELLED) is StepReportAnswer.SETTLED
    assert await flows.work() == ["a", "b"]
    assert await flows.status() == "SUCCEEDED"


async def test_resume_does_without_what_was_done_without(flows: FlowsStepper) -> None:
    """F19: a skipped step stays so, with its reason and its error, and what came after it is taken over."""
    await flows.start(
        {
            "judged": work(when="scope.wanted"),
            "failed": work(required=False),
            "dear": work("judged", "failed"),
            "last": work("dear"),
        }
    )
    await flows.work("last", "failed")
    await flows.operations.resume("r", "last", "tester", "again")
    assert await flows.work() == ["last"]
    steps = {name: await flows.step(name, "again") for name in ("judged", "failed", "dear")}
    assert [step["status"] for step in steps.values()] == ["SKIPPED", "SKIPPED", "SUCCEEDED"]
    assert "condition is false" in steps["judged"]["reason"]
    assert steps["failed"]["error"]["code"] == "BROKEN"
    assert await flows.status("again") == "SUCCEEDED"


async def test_what_is_taken_over_is_in_the_history(flows: FlowsStepper) -> None:
    """F18, F19: who took over what is told; a step that was taken over as skipped can be tried after all."""
    await flows.start({"done": work(), "without": work(required=False), "last": work("done")})
    await flows.work("without", "last")
    await flows.operations.resume("r", "last", "tester", "again")
    mine = [move for move in await flows.moves() if move[0].startswith("again/") and move[3] == "tester"]
    assert sorted(mine) == [
        ("again/done", "PENDING", "SUCCEEDED", "tester"),
        ("again/without", "PENDING", "SKIPPED", "tester"),
    ]
    await flows.operations.retry("again", "tester", "without")
    assert ("again/without", "SKIPPED", "PENDING", "tester") in await flows.moves()
    assert sorted(await flows.work()) == ["last", "without"]


async def test_resume_at_a_skipped_step_judges_it_anew(flows: FlowsStepper) -> None:
    """F19: the step that is named is not taken over, nor what comes after it."""
    await flows.start({"a": work(required=False), "b": work("a")})
    await flows.work("a")
    await flows.operations.resume("r", "a", "tester", "again")
    assert await flows.work() == ["a", "b"]


async def test_what_is_inside_a_step_goes_on_with_the_step(flows: FlowsStepper) -> None:
    """F10, F14: an inner run that has ended is neither tried again nor skipped in by itself."""
    await flows.start({"f": flow_step({"x": work(), "y": work("x")})})
    await flows.work("y")
    await flows.settle_sub_runs()
    before = await flows.fingerprint()
    for act in (flows.operations.retry("r~f", "tester"), flows.operations.skip("r~f", "y", "tester")):
        with pytest.raises(Conflict) as refused:
            await act
        assert refused.value.code == "SUB_RUN"
    assert await flows.fingerprint() == before
    await flows.operations.retry("r", "tester", "f")
    await flows.work()
    await flows.settle_sub_runs()
    assert await flows.status() == "SUCCEEDED"


async def test_a_step_is_skipped_inside_a_run_that_goes_on(flows: FlowsStepper) -> None:
    """F10, F14: what is under way can be done without, inside as anywhere."""
    await flows.start({"f": flow_step({"x": work(), "y": work("x")})})
    await flows.operations.skip("r~f", "x", "tester")
    assert await flows.work() == ["y"]
    await flows.settle_sub_runs()
    assert await flows.status() == "SUCCEEDED"


async def test_a_cancelled_run_is_not_taken_up_by_a_skip(flows: FlowsStepper) -> None:
    """F9, F10: what somebody cancelled goes on when it is tried again, not by the way."""
    await flows.start({"a": work(), "b": work(), "c": work("b")})
    await flows.operations.cancel("r", "tester")
    with pytest.raises(Conflict) as refused:
        await flows.operations.skip("r", "a", "tester")
    assert (refused.value.code, await flows.status()) == ("RUN_CANCELLED", "CANCELLED")
    await flows.operations.retry("r", "tester")
    await flows.operations.skip("r", "a", "tester")
    assert await flows.work() == ["b", "c"]


async def test_a_run_that_succeeded_is_not_tried_again(flows: FlowsStepper) -> None:
    """F10, F19: not even what was skipped in it; who wants that is told of resume."""
    await flows.start({"a": work(required=False), "b": work()})
    await flows.work("a")
    for step in ("a", None):
        with pytest.raises(Conflict) as refused:
            await flows.operations.retry("r", "tester", step)
        assert (refused.value.code, refused.value.hint) == (
            "CANNOT_RETRY",
            "start a new run from a step: `penstock flow run --resume r --from STEP`",
        )


async def test_cancel_stops_what_waits_and_tells_what_runs(flows: FlowsStepper) -> None:
    """F9: waiting steps are cancelled, running ones told; the first end wins, in both directions."""
    await flows.start({"a": work(), "b": work("a"), "c": work()})
    held = await flows.claim(1)
    await flows.operations.cancel("r", "tester", "enough")
    assert await flows.steps() == {"a": "RUNNING", "b": "CANCELLED", "c": "CANCELLED"}
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): True}
    assert await flows.report(held["a"]) is StepReportAnswer.SETTLED
    assert (await flows.status(), (await flows.steps())["a"]) == ("CANCELLED", "SUCCEEDED")
    before = await flows.fingerprint()
    await flows.operations.cancel("r", "tester")
    assert (await flows.fingerprint())[:2] == before[:2]
    await flows.start({}, "done")
    with pytest.raises(Conflict, match="SUCCEEDED"):
        await flows.operations.cancel("done", "tester")
    assert await flows.status("done") == "SUCCEEDED"


async def test_retry_goes_on_where_it_failed(flows: FlowsStepper) -> None:
    """F10: the run is opened again with what was cancelled; what succeeded is not done again."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work("a")})
    await flows.work("b")
    assert await flows.operations.retry("r", "tester", "b") == ["b", "c", "d"]
    assert await flows.status() == "RUNNING"
    assert sorted(await flows.work()) == ["b", "c", "d"]
    assert await flows.status() == "SUCCEEDED"
    with pytest.raises(Conflict):
        await flows.operations.retry("r", "tester")
    with pytest.raises(Conflict):
        await flows.operations.retry("r", "tester", "b")


async def test_a_retry_beside_another_failure_ends_failed(flows: FlowsStepper) -> None:
    """F10: what also waits for another failure stays cancelled, and the run ends with what can be done."""
    await flows.start({"x": work(), "y": work(), "z": work("x", "y")})
    held = await flows.claim()
    for one in held.values():
        await flows.report(one, StepReportKind.FAILED)
    await flows.operations.retry("r", "tester", "x")
    assert await flows.steps() == {"x": "READY", "y": "FAILED", "z": "CANCELLED"}
    assert await flows.work() == ["x"]
    assert await flows.status() == "FAILED"
    assert await flows.maintenance.repair() == 0
    with pytest.raises(Conflict, match="y"):
        await flows.operations.retry("r", "tester", "z")
    await flows.operations.retry("r", "tester")
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_a_cancelled_run_goes_on_after_a_retry(flows: FlowsStepper) -> None:
    """F10: with all that was cancelled; what was under way all along goes on too."""
    await flows.start(DIAMOND)
    held = await flows.claim()
    await flows.operations.cancel("r", "tester")
    await flows.operations.retry("r", "tester")
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): False}
    await flows.report(held["a"])
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_a_step_is_skipped_by_hand(flows: FlowsStepper) -> None:
    """F10: before its turn, at it, or after it failed; not while it runs, nor once it is done."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work()})
    await flows.operations.skip("r", "c", "tester")
    await flows.operations.skip("r", "a", "tester")
    assert await flows.steps() == {"a": "SKIPPED", "b": "READY", "c": "SKIPPED", "d": "READY"}
    held = await flows.claim()
    with pytest.raises(Conflict):
        await flows.operations.skip("r", "b", "tester")
    await flows.report(held["d"])
    await flows.report(held["b"], StepReportKind.FAILED)
    await flows.operations.skip("r", "b", "tester")
    assert await flows.status() == "SUCCEEDED"
    with pytest.raises(Conflict):
        await flows.operations.skip("r", "d", "tester")


async def test_a_run_does_not_end_before_its_steps(flows: FlowsStepper) -> None:
    """F10: to skip the last step ends nothing while those before it are open."""
    await flows.start({"a": work(), "z": work("a")})
    await flows.operations.skip("r", "z", "tester")
    assert (await flows.status(), (await flows.steps())["a"]) == ("RUNNING", "READY")
    assert await flows.work() == ["a"]
    assert await flows.status() == "SUCCEEDED"


async def resumable(flows: FlowsStepper) -> None:
    """a → b → c, with an artifact each; then d alone."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work()})
    while held := await flows.claim(1):
        for one in held.values():
            await flows.write(one)
            await flows.report(one, outputs={"by": one.step_id}, artifacts=["out.txt"])


async def test_resume_does_again_what_comes_from_a_step(flows: FlowsStepper) -> None:
    """F19: a new run; what was done before the step is taken over with outputs and artifacts."""
    await resumable(flows)
    assert await flows.operations.resume("r", "b", "tester", "again") == "again"
    assert await flows.steps("again") == {"a": "SUCCEEDED", "d": "SUCCEEDED", "b": "READY", "c": "PENDING"}
    assert (await flows.step("a", "again"))["outputs"] == {"by": "a"}
    assert await flows.engine.read_artifact("again", "a", "out.txt") == b"r/a/1"
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
    await flows.operations.resume("r", "c", "tester", "again")
    assert await flows.steps("again") == {"a": "READY", "d": "SUCCEEDED", "b": "PENDING", "c": "PENDING"}
    assert await flows.work() == ["a", "b", "c"]


async def test_resume_of_what_is_not_there_is_refused(flows: FlowsStepper) -> None:
    """F19: neither an unknown step nor a name that is taken."""
    await resumable(flows)
    with pytest.raises(NotFound):
        await flows.operations.resume("r", "nobody", "tester")
    with pytest.raises(NotFound):
        await flows.operations.resume("nobody", "a", "tester")
    with pytest.raises(Conflict):
        await flows.operations.resume("r", "a", "tester", "r")
