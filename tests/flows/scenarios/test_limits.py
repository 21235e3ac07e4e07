"""F14, F16: work over a limit is refused, truncated or waits, and does not affect other work."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.flows import contract, store
from penstock.flows.definition.loader import load_file
from penstock.flows.definition.spec import FlowSpec, StepSpec
from penstock.flows.definition.validation import validate_steps
from penstock.flows.engine import advance, engine
from penstock.kernel.errors import BadConfig, Invalid
from tests.flows.scenarios.test_races import record_statements
from tests.flows.stepper import FlowsStepper, flow_step, flows_stepper, map_step, work

EVERY_MINUTE = {"cron": "* * * * *"}


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path) as stepper:
        yield stepper


def named_flow(flow: str, **more: Any) -> dict[str, Any]:
    """Return a step that runs the flow with this name."""
    return {"kind": "flow", "inputs": {"flow": flow}, **more}


# F14, F16: inner runs.


async def test_inner_runs_count_against_the_limit_of_their_flow(flows: FlowsStepper) -> None:
    """F16: maxActiveRuns counts inner runs and top-level runs of a flow."""
    flows.catalogue.add("one", {"a": work()}, maxActiveRuns=1)
    for name in ("x", "y"):
        await flows.start({"f": named_flow("one")}, name)
    await flows.maintenance.start_waiting_runs()
    assert [await flows.status(f"{name}~f") for name in ("x", "y")] == ["RUNNING", "PENDING"]
    assert await flows.work() == ["a"]
    await flows.maintenance.start_waiting_runs()
    assert await flows.work() == ["a"]
    await flows.settle_sub_runs()
    assert [await flows.status(name) for name in ("x", "y")] == ["SUCCEEDED", "SUCCEEDED"]


async def test_waiting_inner_runs_send_a_notification(flows: FlowsStepper) -> None:
    """F14: a waiting inner run notifies the task that starts runs, which need not wait for its next interval."""
    flows.catalogue.add("one", {"a": work()})
    notified = flows.notifier.get_next_event(engine.RUNS)
    await flows.start({"f": named_flow("one")})
    assert notified.is_set()


# F2, F14: sizes.


async def test_items_of_a_map_have_a_maximum_size(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: a map whose items together exceed the maximum size fails before it uses up the memory."""
    monkeypatch.setattr(advance, "ITEMS_LIMIT", 10_000)
    each = {"inputs": {"text": "${scope.text}"}}
    await flows.start({"m": map_step(list(range(20)), do=each)}, scope={"text": "x" * 1_000})
    assert (await flows.step("m"))["error"]["code"] == "TOO_LARGE"
    assert (await flows.steps(), await flows.status()) == ({"m": "FAILED"}, "FAILED")
    await flows.start({"m": map_step(list(range(5)), do=each)}, "few", scope={"text": "x" * 1_000})
    assert len(await flows.claim()) == 5


@pytest.mark.parametrize("where", ["request", "defaults", "inner"])
async def test_a_scope_has_a_maximum_size(flows: FlowsStepper, where: str) -> None:
    """F2: a run whose scope exceeds the maximum size is refused and leaves no row."""
    half, more = {"a": "x" * (contract.SCOPE_LIMIT // 2)}, {"b": "x" * (contract.SCOPE_LIMIT // 2)}
    if where == "inner":
        await flows.start({"f": {**flow_step({"a": work()}), "inputs": {"steps": {}, "scope": half | more}}})
        assert (await flows.step("f"))["error"]["code"] == "SCOPE_TOO_LARGE"
        return
    flows.catalogue.add("large", {"a": work()}, scope=half)
    request: dict[str, Any] = {"flow": "large", "scope": more}
    if where == "request":
        request = {"steps": {"a": work()}, "scope": half | more}
    with pytest.raises(Invalid) as refused:
        await flows.start(**request)
    assert refused.value.code == "SCOPE_TOO_LARGE"
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 0
    await flows.start({"a": work()}, scope=half)


async def test_logs_of_a_step_have_a_maximum_length(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F18: lines after the maximum are dropped, also of later attempts; other steps are not affected."""
    monkeypatch.setattr(engine, "LOG_LINES", 5)
    await flows.start({"a": work(retry={"maxAttempts": 2, "backoff": 0}), "b": work()})
    claimed = await flows.claim()
    for _ in range(4):
        for step in claimed.values():
            if step.step_id == "a":
                await flows.engine.log("r", "a", step.fence, [("info", "line")] * 3)
    await flows.engine.log("r", "b", claimed["b"].fence, [("info", "line")])
    rows = await flows.db.fetch("SELECT n, count(*) FROM flow_log GROUP BY n ORDER BY n")
    assert [row["count"] for row in rows] == [6, 1]  # the batch that reaches the maximum is stored whole


async def test_the_longest_durations_can_be_stored(flows: FlowsStepper) -> None:
    """F9, F10: steps with the longest durations accept heartbeats and reports."""
    long = timedelta(days=366)
    retry = {"maxAttempts": 1_000, "backoff": long, "maxBackoff": long}
    await flows.start({"a": work(timeout=long), "b": work(retry=retry)})
    claimed = await flows.claim()
    answers = await flows.engine.heartbeat([("r", name, step.fence) for name, step in claimed.items()])
    assert set(answers.values()) == {False}
    await flows.db.execute("UPDATE flow_step SET attempts = 999 WHERE step_id = 'b'")
    assert await flows.report(claimed["b"], contract.StepReportKind.FAILED) is contract.StepReportAnswer.SETTLED
    assert (await flows.steps())["b"] == "READY"


@pytest.mark.parametrize("part", [{"retry": {"maxAttempts": 2}}, {"timeout": 5}])
@pytest.mark.parametrize("step", [map_step([1]), flow_step({"a": work()})])
def test_settings_without_effect_are_refused(step: dict[str, Any], part: dict[str, Any]) -> None:
    """F10, F14: `retry` and `timeout` of a map or an inner flow are refused, with a hint where they belong."""
    with pytest.raises(Invalid) as refused:
        validate_steps({"s": StepSpec.model_validate({**step, **part})}, {})
    assert (refused.value.code, refused.value.details["part"]) == ("BAD_STEP", next(iter(part)))
    assert refused.value.hint is not None


# F16: schedules.


def test_names_of_scheduled_flows_are_shorter(tmp_path: Path) -> None:
    """F15, F16: the name of a scheduled flow has at most 80 characters, because its run ids contain the time, too."""
    file = tmp_path / "flow.yaml"
    for length, is_good in ((80, True), (81, False)):
        file.write_text(orjson.dumps({"name": "a" * length, "steps": {}, "schedule": EVERY_MINUTE}).decode())
        if is_good:
            assert isinstance(load_file(file), FlowSpec)
        else:
            with pytest.raises(BadConfig, match="80 characters"):
                load_file(file)


# F3: width.


async def test_references_to_one_step_are_read_once(database_url: str, tmp_path: Path) -> None:
    """F3, F8: the number of statements does not depend on how many steps refer to the outputs of one step."""
    async with flows_stepper(database_url, tmp_path, size=1) as flows:
        counts = []
        for width in (4, 5, 50):
            refers = {"inputs": {"v": "${steps.root.outputs.v}"}, "when": "steps.root.outputs.v > 0"}
            many = {f"s{n}": work("root", onSkip="skip", **refers) for n in range(width)}
            await flows.start({"root": work(), **many}, f"r{width}")
            claimed = (await flows.claim())["root"]
            async with record_statements(flows) as sent:
                await flows.report(claimed, outputs={"v": 1})
            counts.append(len(sent))
            assert {step.inputs["v"] for step in (await flows.claim()).values()} == {1}
        assert counts[1] == counts[2]  # the first round also reads the types of columns


async def test_statements_for_all_steps_of_a_run_scan_linearly(flows: FlowsStepper) -> None:
    """F3: statements find each step through an index, also while the database has no statistics of the table."""
    width = 300
    many = {f"s{n}": work("root") for n in range(width)}
    await flows.start({"root": work(), **many, "end": work(*many)})
    async with flows.db.transaction() as tx:
        run, now = await flows.engine.find_run(tx, "r"), flows.clock.now()
        statements: dict[str, tuple[Any, ...]] = {
            "recount": (run,),
            "cancel_waiting": (run, None, "why", now, "tester"),
            "reopen": (run, list(range(width + 2)), now, "tester", "why"),
        }
        for name, arguments in statements.items():
            rows = await tx.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {store.SQL[name]}", *arguments)
            plan = (orjson.loads(rows) if isinstance(rows, str) else rows)[0]["Plan"]
            assert sum(_count_scanned_rows(plan)) < 60 * width, name


def _count_scanned_rows(plan: dict[str, Any]) -> list[float]:
    """Return the number of rows that each node of a plan scanned, including filtered rows."""
    filtered = sum(count for name, count in plan.items() if name.startswith("Rows Removed by"))
    rows = (plan["Actual Rows"] + filtered) * plan["Actual Loops"]
    return [rows, *(count for part in plan.get("Plans", []) for count in _count_scanned_rows(part))]
