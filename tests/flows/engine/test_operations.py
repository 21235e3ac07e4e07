"""F10, F14, F19: operations of users on active runs, on sub-runs and on ended runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.kernel.errors import Conflict, NotFound
from tests.flows.scenarios.test_races import LOCK_WAITS, block_run
from tests.flows.stepper import DIAMOND, FlowsStepper, flow_step, flows_stepper, make_report, map_step, work
from tests.support.wait import becomes


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path) as stepper:
        yield stepper


@pytest.mark.parametrize("capacity", [0, 1])
async def test_report_that_waited_for_a_skip_counts_all_steps(flows: FlowsStepper, capacity: int) -> None:
    """F3: the run ends with its last step, although the report read the run before the skip."""
    await flows.start({"a": work(), "b": work("a"), "x": work()})
    claimed = await flows.claim(1)
    async with block_run(flows, "r", 2):
        skipping = asyncio.create_task(flows.operations.skip("r", "x", "tester"))

        async def waits() -> bool:
            return bool(await flows.db.fetchval(LOCK_WAITS) == 1)

        await becomes(waits, "the skip is the first to wait")
        batch = [(claimed["a"], make_report(claimed["a"]))]
        settling = asyncio.create_task(flows.work_source.settle("w", batch, ["work"], capacity))
    await skipping
    answers, prefetched = await settling
    assert (answers, len(prefetched)) == ([StepReportAnswer.SETTLED], capacity)
    for step in prefetched:
        await flows.report(step)
    await flows.work()
    assert await flows.status() == "SUCCEEDED"
    assert await flows.maintenance.repair() == 0


async def test_skipped_map_starts_no_items(flows: FlowsStepper) -> None:
    """F10, F14: a failed map is skipped with all its items."""
    await flows.start({"m": map_step([1, 2, 3]), "z": work("m")})
    await flows.report((await flows.claim(1))["m[0]"], StepReportKind.FAILED)
    await flows.operations.skip("r", "m", "tester")
    steps = await flows.steps()
    assert [steps[f"m[{n}]"] for n in range(3)] == ["FAILED", "CANCELLED", "CANCELLED"]
    assert await flows.work() == ["z"]
    assert await flows.status() == "SUCCEEDED"


async def test_repeated_request_after_a_change_of_the_flow(flows: FlowsStepper) -> None:
    """F2: a client that repeats its request after a deployment gets its run."""
    flows.catalogue.add("f", {"a": work()})
    await flows.start(None, flow="f", scope={"v": 1})
    flows.catalogue.add("f", {"a": work(), "b": work("a")})
    await flows.start(None, flow="f", scope={"v": 1})
    assert await flows.steps() == {"a": "READY"}
    with pytest.raises(Conflict, match="with a different request"):
        await flows.start(None, flow="f", scope={"v": 2})


async def test_stopped_step_of_a_retried_run_is_released(flows: FlowsStepper) -> None:
    """F9, F10: a step that stopped after its run was retried is READY at once, without waiting for its lease."""
    await flows.start({"a": work(retry={"maxAttempts": 1}), "b": work("a")})
    claimed = (await flows.claim())["a"]
    await flows.operations.cancel("r", "tester")
    assert await flows.engine.heartbeat([("r", "a", claimed.fence)]) == {("r", "a", claimed.fence): True}
    await flows.operations.retry("r", "tester")
    assert await flows.report(claimed, StepReportKind.CANCELLED) is StepReportAnswer.SETTLED
    assert await flows.work() == ["a", "b"]
    assert await flows.status() == "SUCCEEDED"


async def test_resume_reuses_skipped_steps(flows: FlowsStepper) -> None:
    """F19: a skipped step keeps its reason and its error, and the steps after it are reused."""
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


async def test_reused_steps_are_in_the_history(flows: FlowsStepper) -> None:
    """F18, F19: the history names the user; a step that was reused as skipped can be retried."""
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


async def test_resume_at_a_skipped_step_evaluates_it_again(flows: FlowsStepper) -> None:
    """F19: the named step and the steps after it are not reused."""
    await flows.start({"a": work(required=False), "b": work("a")})
    await flows.work("a")
    await flows.operations.resume("r", "a", "tester", "again")
    assert await flows.work() == ["a", "b"]


async def test_ended_sub_run_continues_only_with_its_step(flows: FlowsStepper) -> None:
    """F10, F14: retry and skip of an ended sub-run are refused; its step can be retried."""
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


async def test_step_of_an_active_sub_run_can_be_skipped(flows: FlowsStepper) -> None:
    """F10, F14: a skip works in a sub-run as in any other run."""
    await flows.start({"f": flow_step({"x": work(), "y": work("x")})})
    await flows.operations.skip("r~f", "x", "tester")
    assert await flows.work() == ["y"]
    await flows.settle_sub_runs()
    assert await flows.status() == "SUCCEEDED"


async def test_skip_does_not_reopen_a_cancelled_run(flows: FlowsStepper) -> None:
    """F9, F10: a cancelled run continues only after a retry."""
    await flows.start({"a": work(), "b": work(), "c": work("b")})
    await flows.operations.cancel("r", "tester")
    with pytest.raises(Conflict) as refused:
        await flows.operations.skip("r", "a", "tester")
    assert (refused.value.code, await flows.status()) == ("RUN_CANCELLED", "CANCELLED")
    await flows.operations.retry("r", "tester")
    await flows.operations.skip("r", "a", "tester")
    assert await flows.work() == ["b", "c"]


async def test_succeeded_run_cannot_be_retried(flows: FlowsStepper) -> None:
    """F10, F19: also with skipped steps; the hint names resume."""
    await flows.start({"a": work(required=False), "b": work()})
    await flows.work("a")
    for step in ("a", None):
        with pytest.raises(Conflict) as refused:
            await flows.operations.retry("r", "tester", step)
        assert (refused.value.code, refused.value.hint) == (
            "CANNOT_RETRY",
            "start a new run from a step: `penstock flow run --resume r --from STEP`",
        )


async def test_cancel_stops_a_run(flows: FlowsStepper) -> None:
    """F9: waiting steps are cancelled, running steps must stop; of two ends the first counts."""
    await flows.start({"a": work(), "b": work("a"), "c": work()})
    claimed = await flows.claim(1)
    await flows.operations.cancel("r", "tester", "enough")
    assert await flows.steps() == {"a": "RUNNING", "b": "CANCELLED", "c": "CANCELLED"}
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): True}
    assert await flows.report(claimed["a"]) is StepReportAnswer.SETTLED
    assert (await flows.status(), (await flows.steps())["a"]) == ("CANCELLED", "SUCCEEDED")
    before = await flows.fingerprint()
    await flows.operations.cancel("r", "tester")
    assert (await flows.fingerprint())[:2] == before[:2]
    await flows.start({}, "done")
    with pytest.raises(Conflict, match="SUCCEEDED"):
        await flows.operations.cancel("done", "tester")
    assert await flows.status("done") == "SUCCEEDED"


async def test_retry_continues_after_a_failure(flows: FlowsStepper) -> None:
    """F10: the run is reopened with its cancelled steps; succeeded steps do not run again."""
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


async def test_retry_of_one_of_two_failures_ends_failed(flows: FlowsStepper) -> None:
    """F10: steps after the other failure stay cancelled, and the run ends when the rest has ended."""
    await flows.start({"x": work(), "y": work(), "z": work("x", "y")})
    claimed = await flows.claim()
    for step in claimed.values():
        await flows.report(step, StepReportKind.FAILED)
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


async def test_retry_continues_a_cancelled_run(flows: FlowsStepper) -> None:
    """F10: all cancelled steps run, and steps that were running all the time continue."""
    await flows.start(DIAMOND)
    claimed = await flows.claim()
    await flows.operations.cancel("r", "tester")
    await flows.operations.retry("r", "tester")
    assert await flows.engine.heartbeat([("r", "a", 1)]) == {("r", "a", 1): False}
    await flows.report(claimed["a"])
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


async def test_users_skip_steps(flows: FlowsStepper) -> None:
    """F10: a waiting, ready or failed step can be skipped, but not a running or succeeded one."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work()})
    await flows.operations.skip("r", "c", "tester")
    await flows.operations.skip("r", "a", "tester")
    assert await flows.steps() == {"a": "SKIPPED", "b": "READY", "c": "SKIPPED", "d": "READY"}
    claimed = await flows.claim()
    with pytest.raises(Conflict):
        await flows.operations.skip("r", "b", "tester")
    await flows.report(claimed["d"])
    await flows.report(claimed["b"], StepReportKind.FAILED)
    await flows.operations.skip("r", "b", "tester")
    assert await flows.status() == "SUCCEEDED"
    with pytest.raises(Conflict):
        await flows.operations.skip("r", "d", "tester")


async def test_run_does_not_end_before_its_steps(flows: FlowsStepper) -> None:
    """F10: a skip of the last step does not end the run while earlier steps are open."""
    await flows.start({"a": work(), "z": work("a")})
    await flows.operations.skip("r", "z", "tester")
    assert (await flows.status(), (await flows.steps())["a"]) == ("RUNNING", "READY")
    assert await flows.work() == ["a"]
    assert await flows.status() == "SUCCEEDED"


async def start_resumable_run(flows: FlowsStepper) -> None:
    """Create a failed run: a → b → c, with an artifact each, and a separate d."""
    await flows.start({"a": work(), "b": work("a"), "c": work("b"), "d": work()})
    while claimed := await flows.claim(1):
        for step in claimed.values():
            await flows.write(step)
            await flows.report(step, outputs={"by": step.step_id}, artifacts=["out.txt"])


async def test_resume_repeats_a_step_and_its_descendants(flows: FlowsStepper) -> None:
    """F19: a new run reuses the outputs and artifacts of the earlier steps."""
    await start_resumable_run(flows)
    assert await flows.operations.resume("r", "b", "tester", "again") == "again"
    assert await flows.steps("again") == {"a": "SUCCEEDED", "d": "SUCCEEDED", "b": "READY", "c": "PENDING"}
    assert (await flows.step("a", "again"))["outputs"] == {"by": "a"}
    assert await flows.engine.read_artifact("again", "a", "out.txt") == b"r/a/1"
    assert await flows.work() == ["b", "c"]
    assert (await flows.status("again"), await flows.status()) == ("SUCCEEDED", "SUCCEEDED")


@pytest.mark.parametrize("harm", ["changed", "removed"])
async def test_resume_repeats_steps_with_changed_artifacts(flows: FlowsStepper, harm: str) -> None:
    """F19: a step whose artifact was changed or deleted runs again, with all steps after it."""
    await start_resumable_run(flows)
    if harm == "changed":
        await flows.storage.put("runs/r/a/out.txt", b"r/a/2")
    else:
        await flows.storage.delete("runs/r/a/out.txt")
    await flows.operations.resume("r", "c", "tester", "again")
    assert await flows.steps("again") == {"a": "READY", "d": "SUCCEEDED", "b": "PENDING", "c": "PENDING"}
    assert await flows.work() == ["a", "b", "c"]


async def test_resume_of_unknown_steps_and_used_ids_is_refused(flows: FlowsStepper) -> None:
    """F19: an unknown step and an existing run id are refused."""
    await start_resumable_run(flows)
    with pytest.raises(NotFound):
        await flows.operations.resume("r", "unknown", "tester")
    with pytest.raises(NotFound):
        await flows.operations.resume("unknown", "a", "tester")
    with pytest.raises(Conflict):
        await flows.operations.resume("r", "a", "tester", "r")
