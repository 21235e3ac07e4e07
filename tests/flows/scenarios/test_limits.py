"""F14, F16: what is too much is refused, cut or waits; and no one's trouble is another's."""

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
from tests.flows.scenarios.test_races import statements
from tests.flows.stepper import FlowsStepper, flow_step, flows_stepper, map_step, work

EVERY_MINUTE = {"cron": "* * * * *"}


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path) as one:
        yield one


def named(flow: str, **more: Any) -> dict[str, Any]:
    """A flow within, by its name."""
    return {"kind": "flow", "inputs": {"flow": flow}, **more}


# F14, F16: inner runs.


async def test_a_flow_within_waits_for_others_of_its_name(flows: FlowsStepper) -> None:
    """F16: maxActiveRuns counts the runs of a flow wherever they are."""
    flows.catalogue.add("one", {"a": work()}, maxActiveRuns=1)
    for name in ("x", "y"):
        await flows.start({"f": named("one")}, name)
    await flows.maintenance.start_waiting_runs()
    assert [await flows.status(f"{name}~f") for name in ("x", "y")] == ["RUNNING", "PENDING"]
    assert await flows.work() == ["a"]
    await flows.maintenance.start_waiting_runs()
    assert await flows.work() == ["a"]
    await flows.settle_sub_runs()
    assert [await flows.status(name) for name in ("x", "y")] == ["SUCCEEDED", "SUCCEEDED"]


async def test_a_flow_within_that_waits_is_rung_for(flows: FlowsStepper) -> None:
    """F14: who admits runs is told of it, and need not wait for the next look."""
    flows.catalogue.add("one", {"a": work()})
    notified = flows.notifier.next_event(engine.RUNS)
    await flows.start({"f": named("one")})
    assert notified.is_set()


# F2, F14: sizes.


async def test_the_items_of_a_map_have_a_size(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: all of them together; the map fails before there is no memory left."""
    monkeypatch.setattr(advance, "ITEMS_LIMIT", 10_000)
    each = {"inputs": {"text": "${scope.text}"}}
    await flows.start({"m": map_step(list(range(20)), do=each)}, scope={"text": "x" * 1_000})
    assert (await flows.step("m"))["error"]["code"] == "TOO_LARGE"
    assert (await flows.steps(), await flows.status()) == ({"m": "FAILED"}, "FAILED")
    await flows.start({"m": map_step(list(range(5)), do=each)}, "few", scope={"text": "x" * 1_000})
    assert len(await flows.claim()) == 5


@pytest.mark.parametrize("where", ["request", "defaults", "inner"])
async def test_a_scope_has_a_size(flows: FlowsStepper, where: str) -> None:
    """F2: it is handed out with every step; nothing is kept of a run whose scope is more."""
    half, more = {"a": "x" * (contract.SCOPE_LIMIT // 2)}, {"b": "x" * (contract.SCOPE_LIMIT // 2)}
    if where == "inner":
        await flows.start({"f": {**flow_step({"a": work()}), "inputs": {"steps": {}, "scope": half | more}}})
        assert (await flows.step("f"))["error"]["code"] == "SCOPE_TOO_LARGE"
        return
    flows.catalogue.add("large", {"a": work()}, scope=half)
    asked: dict[str, Any] = {"flow": "large", "scope": more}
    if where == "request":
        asked = {"steps": {"a": work()}, "scope": half | more}
    with pytest.raises(Invalid) as refused:
        await flows.start(**asked)
    assert refused.value.code == "SCOPE_TOO_LARGE"
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run") == 0
    await flows.start({"a": work()}, scope=half)


async def test_a_step_logs_so_much(flows: FlowsStepper, monkeypatch: pytest.MonkeyPatch) -> None:
    """F18: what comes after that is dropped, also of later attempts; other steps log on."""
    monkeypatch.setattr(engine, "LOG_LINES", 5)
    await flows.start({"a": work(retry={"maxAttempts": 2, "backoff": 0}), "b": work()})
    held = await flows.claim()
    for _ in range(4):
        for one in held.values():
            if one.step_id == "a":
                await flows.engine.log("r", "a", one.fence, [("info", "line")] * 3)
    await flows.engine.log("r", "b", held["b"].fence, [("info", "line")])
    rows = await flows.db.fetch("SELECT n, count(*) FROM flow_log GROUP BY n ORDER BY n")
    assert [row["count"] for row in rows] == [6, 1]  # the batch that reaches it is the last


async def test_the_longest_durations_can_be_kept(flows: FlowsStepper) -> None:
    """F9, F10: heartbeats and reports of such steps are as any."""
    long = timedelta(days=366)
    retry = {"maxAttempts": 1_000, "backoff": long, "maxBackoff": long}
    await flows.start({"a": work(timeout=long), "b": work(retry=retry)})
    held = await flows.claim()
    told = await flows.engine.heartbeat([("r", name, one.fence) for name, one in held.items()])
    assert set(told.values()) == {False}
    await flows.db.execute("UPDATE flow_step SET attempts = 999 WHERE step_id = 'b'")
    assert await flows.report(held["b"], contract.StepReportKind.FAILED) is contract.StepReportAnswer.SETTLED
    assert (await flows.steps())["b"] == "READY"


@pytest.mark.parametrize("part", [{"retry": {"maxAttempts": 2}}, {"timeout": 5}])
@pytest.mark.parametrize("step", [map_step([1]), flow_step({"a": work()})])
def test_what_would_not_be_heeded_is_refused(step: dict[str, Any], part: dict[str, Any]) -> None:
    """F10, F14: the engine's own kinds have neither `retry` nor `timeout`; it is told where they belong."""
    with pytest.raises(Invalid) as refused:
        validate_steps({"s": StepSpec.model_validate({**step, **part})}, {})
    assert (refused.value.code, refused.value.details["part"]) == ("BAD_STEP", next(iter(part)))
    assert refused.value.hint is not None


# F16: schedules.


def test_a_flow_that_runs_by_itself_has_a_shorter_name(tmp_path: Path) -> None:
    """F15, F16: its runs are called by it and their time."""
    file = tmp_path / "flow.yaml"
    for length, is_good in ((80, True), (81, False)):
        file.write_text(orjson.dumps({"name": "a" * length, "steps": {}, "schedule": EVERY_MINUTE}).decode())
        if is_good:
            assert isinstance(load_file(file), FlowSpec)
        else:
            with pytest.raises(BadConfig, match="80 characters"):
                load_file(file)


# F3: width.


async def test_many_that_refer_to_one_ask_for_it_once(database_url: str, tmp_path: Path) -> None:
    """F3, F8: how many steps are looked at decides how much is written, not how often it is asked."""
    async with flows_stepper(database_url, tmp_path, size=1) as flows:
        counts = []
        for width in (4, 5, 50):
            refers = {"inputs": {"v": "${steps.root.outputs.v}"}, "when": "steps.root.outputs.v > 0"}
            many = {f"s{n}": work("root", onSkip="skip", **refers) for n in range(width)}
            await flows.start({"root": work(), **many}, f"r{width}")
            held = (await flows.claim())["root"]
            async with statements(flows) as sent:
                await flows.report(held, outputs={"v": 1})
            counts.append(len(sent))
            assert {one.inputs["v"] for one in (await flows.claim()).values()} == {1}
        assert counts[1] == counts[2]  # the first asks for the types of columns besides


async def test_what_is_done_to_all_steps_of_a_run_does_not_compare_all_with_all(flows: FlowsStepper) -> None:
    """F3: each step is looked up, not looked for, also while the database knows nothing yet of how many there are."""
    width = 300
    many = {f"s{n}": work("root") for n in range(width)}
    await flows.start({"root": work(), **many, "end": work(*many)})
    async with flows.db.transaction() as tx:
        run, now = await flows.engine.find_run(tx, "r"), flows.clock.now()
        acts: dict[str, tuple[Any, ...]] = {
            "recount": (run,),
            "cancel_waiting": (run, None, "why", now, "tester"),
            "reopen": (run, list(range(width + 2)), now, "tester", "why"),
        }
        for name, given in acts.items():
            rows = await tx.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {store.SQL[name]}", *given)
            plan = (orjson.loads(rows) if isinstance(rows, str) else rows)[0]["Plan"]
            assert sum(_seen(plan)) < 60 * width, name


def _seen(plan: dict[str, Any]) -> list[float]:
    """How many rows each part of a plan looked at, those it threw away among them."""
    thrown = sum(count for name, count in plan.items() if name.startswith("Rows Removed by"))
    rows = (plan["Actual Rows"] + thrown) * plan["Actual Loops"]
    return [rows, *(one for part in plan.get("Plans", []) for one in _seen(part))]
