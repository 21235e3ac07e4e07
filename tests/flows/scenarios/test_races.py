"""Concurrent operations on a real PostgreSQL: one wins, and the result is as if they had run in turn."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import pytest

from penstock.flows.contract import StepReportAnswer, StepReportKind
from penstock.flows.model import ClaimedStep
from penstock.kernel.errors import Conflict
from tests.flows.stepper import LEASE, FlowsStepper, flows_stepper, make_report, map_step, work
from tests.support.soak import Campaign, examples
from tests.support.wait import becomes

T = TypeVar("T")
ROUNDS = examples(16, soak=400)
LOCK_WAITS = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
INCONSISTENT = """
    SELECT r.run_id, r.status, t.step_id, t.status, t.unmet FROM flow_run r JOIN flow_step t ON t.run = r.id
    WHERE r.status NOT IN ('PENDING', 'RUNNING') AND t.status IN ('PENDING', 'READY')
       OR t.status = 'PENDING' AND t.unmet <> (
           SELECT count(*) FROM flow_step p
           WHERE p.run = t.run AND p.n = ANY (t.depends_on) AND p.status NOT IN ('SUCCEEDED', 'SKIPPED'))"""


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path, size=24) as stepper:
        yield stepper


@asynccontextmanager
async def block_run(flows: FlowsStepper, run_id: str, waiting: int) -> AsyncIterator[None]:
    """Lock a run until as many tasks of the block as *waiting* wait for it, then let all of them continue."""
    async with flows.db.transaction() as tx:
        await tx.execute("SELECT FROM flow_run WHERE run_id = $1 FOR UPDATE", run_id)
        yield

        async def all_wait() -> bool:
            return bool(await flows.db.fetchval(LOCK_WAITS) >= waiting)

        await becomes(all_wait, f"{waiting} tasks wait for the run")


async def gather_outcomes(*work: Awaitable[T]) -> list[T | Conflict]:
    """Return the results of concurrent operations; a conflict is a result, any other error is raised."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Conflict):
            raise result
    return results  # type: ignore[return-value]


async def check_consistency(flows: FlowsStepper) -> None:
    assert await flows.db.fetch(INCONSISTENT) == []
    assert await flows.maintenance.repair() == 0


async def settle(flows: FlowsStepper, steps: Sequence[ClaimedStep], by: str) -> Sequence[StepReportAnswer]:
    """Report the success of steps as the work loop does, or as a worker over HTTP does."""
    if by == "loop":
        answers, _ = await flows.work_source.settle("w", [(step, make_report(step)) for step in steps], [], 0)
        return answers
    return await flows.engine.report([make_report(step) for step in steps], "w")


# F4: claims.


async def test_concurrent_claims_return_each_step_once(flows: FlowsStepper) -> None:
    """F4: twenty workers claim until no step is left; no step is claimed twice."""
    for n in range(10):
        await flows.start({f"s{m}": work() for m in range(30)}, f"r{n}")

    async def keep_claiming(worker: str) -> list[ClaimedStep]:
        claimed: list[ClaimedStep] = []
        while steps := await flows.engine.claim(worker, {"work": 7}, limit=7):
            claimed += steps
        return claimed

    by_worker = await asyncio.gather(*(keep_claiming(f"w{n}") for n in range(20)))
    names = Counter((step.run_id, step.step_id) for steps in by_worker for step in steps)
    assert (len(names), set(names.values())) == (300, {1})
    assert {step.fence for steps in by_worker for step in steps} == {1}
    workers = await flows.db.fetch("SELECT worker, count(*) FROM flow_step GROUP BY worker")
    assert dict(map(tuple, workers)) == {f"w{n}": len(steps) for n, steps in enumerate(by_worker) if steps}


async def test_concurrent_claims_respect_the_limit_of_a_kind(database_url: str, tmp_path: Path) -> None:
    """F16: never more steps of a kind run than its limit allows."""
    async with flows_stepper(database_url, tmp_path, size=24, limits={"work": 3}) as flows:
        await flows.start({f"s{m}": work() for m in range(12)})
        for _ in range(4):
            claims = await asyncio.gather(*(flows.claim(2, f"w{n}") for n in range(20)))
            claimed = [step for steps in claims for step in steps.values()]
            assert len(claimed) == 3
            await asyncio.gather(*(flows.report(step) for step in claimed))
        assert await flows.status() == "SUCCEEDED"


async def test_concurrent_starts_respect_the_limit_of_a_flow(flows: FlowsStepper) -> None:
    """F16: of twenty runs created concurrently two start, and each further run starts when another ends."""
    flows.catalogue.add("two", {"a": work()}, maxActiveRuns=2)
    await asyncio.gather(*(flows.start(None, f"r{n}", flow="two") for n in range(20)))
    for done in range(0, 20, 2):
        count = "SELECT count(*) FROM flow_run WHERE status = $1"
        assert await flows.db.fetchval(count, "RUNNING") == 2
        assert await flows.db.fetchval(count, "SUCCEEDED") == done
        await flows.work()
        await asyncio.gather(*(flows.maintenance.start_waiting_runs() for _ in range(4)))


async def test_concurrent_requests_with_the_same_id_create_one_run(flows: FlowsStepper) -> None:
    """F2: a request that is sent twenty times concurrently creates one run."""
    await asyncio.gather(*(flows.start({"a": work(), "b": work("a")}) for _ in range(20)))
    assert await flows.db.fetchval("SELECT count(*) FROM flow_step") == 2
    assert len(await flows.moves("flows.run")) == 1


# F3: reports.


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("by", ["loop", "http"])
async def test_concurrent_ends_of_two_parents_ready_their_child_once(
    flows: FlowsStepper, by: str, campaign: Campaign
) -> None:
    """F3: the child becomes READY once, in any interleaving of the two reports."""
    campaign.rounds = examples(60, soak=2_000)
    for n in range(campaign.rounds):
        await flows.start({"a": work(), "b": work(), "c": work("a", "b")}, f"r{n}")
    claimed = await flows.engine.claim("w", {"work": 5_000}, limit=5_000)
    pairs: dict[str, list[ClaimedStep]] = {}
    for step in claimed:
        pairs.setdefault(step.run_id, []).append(step)
    for pair in pairs.values():
        assert await asyncio.gather(*(settle(flows, [step], by) for step in pair)) == [[StepReportAnswer.SETTLED]] * 2
    moves = await flows.moves()
    ready = Counter(subject for subject, _, target, _ in moves if subject.endswith("/c") and target == "READY")
    assert (len(ready), set(ready.values())) == (len(pairs), {1})
    await check_consistency(flows)


@pytest.mark.parametrize("by", ["loop", "http"])
async def test_parents_that_wait_for_a_lock_ready_their_child(flows: FlowsStepper, by: str) -> None:
    """F3: reports that start without seeing each other's changes lose no update."""
    parents = [f"p{n}" for n in range(8)]
    await flows.start({**{name: work() for name in parents}, "child": work(*parents)})
    claimed = await flows.claim()
    async with block_run(flows, "r", len(parents)):
        tasks = [asyncio.create_task(settle(flows, [step], by)) for step in claimed.values()]
    assert await asyncio.gather(*tasks) == [[StepReportAnswer.SETTLED]] * len(parents)
    assert (await flows.steps())["child"] == "READY"
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


@pytest.mark.parametrize("by", ["loop", "http"])
async def test_last_steps_that_wait_for_a_lock_end_their_run(flows: FlowsStepper, by: str) -> None:
    """F3: the run ends with the last of its steps, also after an operator has skipped a step."""
    await flows.start({**{f"s{n}": work() for n in range(8)}, "t": work("s0"), "u": work("t")})
    await flows.operations.skip("r", "u", "tester")
    await flows.operations.skip("r", "t", "tester")
    claimed = await flows.claim()
    async with block_run(flows, "r", 8):
        tasks = [asyncio.create_task(settle(flows, [step], by)) for step in claimed.values()]
    await asyncio.gather(*tasks)
    assert await flows.status() == "SUCCEEDED"
    assert [target for *_, target, _ in await flows.moves("flows.run")] == ["RUNNING", "SUCCEEDED"]


async def test_concurrent_ends_of_items_end_their_map_once(flows: FlowsStepper) -> None:
    """F14: the map succeeds, and its successor becomes READY."""
    await flows.start({"m": map_step(list(range(8))), "z": work("m")})
    claimed = await flows.claim()
    async with block_run(flows, "r", 8):
        tasks = [asyncio.create_task(settle(flows, [step], "http")) for step in claimed.values()]
    await asyncio.gather(*tasks)
    steps = await flows.steps()
    assert (steps["m"], steps["z"]) == ("SUCCEEDED", "READY")


@pytest.mark.parametrize("by", ["loop", "http"])
async def test_batches_in_any_order_do_not_deadlock(flows: FlowsStepper, by: str) -> None:
    """F5: concurrent batches over the same runs, each in its own order, all succeed without a deadlock."""
    rng = random.Random(7)
    steps = {f"s{n}": work() for n in range(12)} | {f"t{n}": work(*(f"s{m}" for m in range(n + 1))) for n in range(12)}
    for n in range(16):
        await flows.start(steps, f"r{n}")
    for _ in range(2):
        claimed = await flows.engine.claim("w", {"work": 500}, limit=500)
        rng.shuffle(claimed)
        batches = [claimed[first : first + 12] for first in range(0, len(claimed), 12)]
        answers = await asyncio.gather(*(settle(flows, batch, by) for batch in batches))
        assert {answer for batch in answers for answer in batch} == {StepReportAnswer.SETTLED}
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE status = 'SUCCEEDED'") == 16
    await check_consistency(flows)


class ConcurrentActors:
    """Workers of both kinds, the reaper and operators, on the same few runs."""

    def __init__(self, flows: FlowsStepper, runs: Sequence[str], steps: Sequence[str]) -> None:
        self.flows, self.runs, self.steps = flows, runs, steps
        self.rng = random.Random(11)

    async def work(self, by: str) -> None:
        for _ in range(ROUNDS):
            claimed = await self.flows.engine.claim(by, {"work": 4}, limit=4)
            reports = [
                (step, make_report(step, self.rng.choice([*[StepReportKind.SUCCEEDED] * 9, StepReportKind.FAILED])))
                for step in claimed
            ]
            if by == "loop":
                await self.flows.work_source.settle("w", reports, ["work"], 0)
            else:
                await self.flows.engine.report([report for _, report in reports])

    async def operate(self) -> None:
        operations = self.flows.operations
        for _ in range(ROUNDS):
            run, step = self.rng.choice(self.runs), self.rng.choice(self.steps)
            choices: list[Callable[[], Awaitable[object]]] = [
                partial(operations.cancel, run, "tester"),
                partial(operations.retry, run, "tester"),
                partial(operations.retry, run, "tester", step),
                partial(operations.skip, run, step, "tester"),
            ]
            await gather_outcomes(self.rng.choice(choices)())

    async def reap(self) -> None:
        for _ in range(ROUNDS):
            self.flows.clock.advance(LEASE / 20)
            await self.flows.engine.reap()


async def test_all_concurrent_actors_leave_consistent_runs(flows: FlowsStepper) -> None:
    """F3–F11: in any interleaving of workers, reaper and operators every run ends, and counters are correct."""
    steps = {f"s{n}": work(*(f"s{m}" for m in range(n) if (n + m) % 3 == 0)) for n in range(10)}
    steps |= {"m": map_step([1, 2, 3], "s1"), "z": work("m")}
    runs = [f"r{n}" for n in range(6)]
    for name in runs:
        await flows.start(steps, name)
    actors = ConcurrentActors(flows, runs, list(steps))
    workers = [actors.work(by) for by in ("loop", "loop", "http", "http")]
    await asyncio.gather(*workers, actors.operate(), actors.operate(), actors.reap())
    await check_consistency(flows)
    await flows.expire_leases()
    await flows.work()
    await check_consistency(flows)
    assert {await flows.status(name) for name in runs} <= {"SUCCEEDED", "FAILED", "CANCELLED"}


# F9–F11: operations that exclude each other.


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_cancel_and_last_success_race(flows: FlowsStepper, campaign: Campaign) -> None:
    """F9: a cancel and the last success exclude each other: the first of them decides the status of the run."""
    results = Counter[str]()
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work("a")}, name)
        first = (await flows.claim())["a"]
        await flows.report(first)
        last = (await flows.claim())["b"]
        async with block_run(flows, name, 2):
            rivals = [flows.operations.cancel(name, "tester"), settle(flows, [last], "loop" if n % 2 else "http")]
            tasks = [asyncio.ensure_future(rival) for rival in (rivals if n % 4 < 2 else rivals[::-1])]
        cancelled, settled = (await gather_outcomes(*tasks))[:: 1 if n % 4 < 2 else -1]
        assert settled == [StepReportAnswer.SETTLED]
        status = await flows.status(name)
        assert status == ("SUCCEEDED" if isinstance(cancelled, Conflict) else "CANCELLED")
        assert (await flows.steps(name))["b"] == "SUCCEEDED"
        results[status] += 1
    assert len(results) == 2, results
    await check_consistency(flows)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_retry_and_cancel_race(flows: FlowsStepper, campaign: Campaign) -> None:
    """F9, F10: the run and all its steps are open, or the run and all its steps are cancelled."""
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work("a"), "c": work("b")}, name)
        await flows.report((await flows.claim())["a"], StepReportKind.FAILED)
        retried, cancelled = await gather_outcomes(
            flows.operations.retry(name, "tester"), flows.operations.cancel(name, "tester")
        )
        assert retried == ["a", "b", "c"]
        steps = set((await flows.steps(name)).values())
        if isinstance(cancelled, Conflict):
            assert (await flows.status(name), steps) == ("RUNNING", {"READY", "PENDING"})
            await flows.operations.cancel(name, "tester")
        else:
            assert (await flows.status(name), steps) == ("CANCELLED", {"CANCELLED"})
    await check_consistency(flows)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_reaper_and_late_report_race(flows: FlowsStepper, campaign: Campaign) -> None:
    """F11: either the late report ends the step, or the step is READY under a new fence; never both."""
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work("a")}, name)
        claimed = (await flows.claim())["a"]
        flows.clock.advance(2 * LEASE)
        reaped, [answer] = await asyncio.gather(
            flows.engine.reap(), settle(flows, [claimed], "loop" if n % 2 else "http")
        )
        step = await flows.step("a", name)
        if answer is StepReportAnswer.SETTLED:
            assert (reaped, step["status"], step["fence"]) == (0, "SUCCEEDED", claimed.fence)
        else:
            assert (reaped, step["status"], step["fence"]) == (1, "READY", claimed.fence + 1)
        await flows.operations.cancel(name, "tester")
    await check_consistency(flows)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_claim_and_cancel_race(flows: FlowsStepper, campaign: Campaign) -> None:
    """F4, F9: a step is either claimed and then stopped, or never claimed."""
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work()}, name)
        claimed, _, skipped = await gather_outcomes(
            flows.claim(1), flows.operations.cancel(name, "tester"), flows.operations.skip(name, "b", "tester")
        )
        assert isinstance(claimed, dict)
        steps = await flows.steps(name)
        for step, status in steps.items():
            assert (status == "RUNNING") == (step in claimed)
        assert isinstance(skipped, Conflict) or steps["b"] in ("SKIPPED", "READY", "CANCELLED", "RUNNING")
        for claim in claimed.values():
            assert await flows.report(claim, StepReportKind.RELEASED) is StepReportAnswer.SETTLED
        if await flows.status(name) == "RUNNING":
            await flows.operations.cancel(name, "tester")
    await check_consistency(flows)


# F3: width.


@asynccontextmanager
async def record_statements(flows: FlowsStepper) -> AsyncIterator[list[str]]:
    """Record the statements that the block sends; the pool has one connection."""
    sent: list[str] = []

    def record(query: Any) -> None:
        sent.append(query.query)

    async with flows.db.connection() as connection:
        connection.add_query_logger(record)
    yield sent
    async with flows.db.connection() as connection:
        connection.remove_query_logger(record)


def make_fan(width: int) -> dict[str, Any]:
    """Return a first step, *width* steps after it, and a last step after all of those."""
    many = {f"s{n}": work("first") for n in range(width)}
    return {"first": work(), **many, "last": work(*many)}


async def measure_fan(flows: FlowsStepper, width: int) -> tuple[list[int], float]:
    """Return the number of statements after each phase of a wide run, and the seconds of the whole run."""
    name, counts, started = f"r{width}", list[int](), perf_counter()
    async with record_statements(flows) as sent:
        await flows.start(make_fan(width), name)
        counts.append(len(sent))
        await flows.work_step()
        counts.append(len(sent))
        claimed = await flows.engine.claim("w", {"work": width}, limit=width)
        counts.append(len(sent))
        assert len(claimed) == width
        for first in range(0, width, width // 10):
            await settle(flows, claimed[first : first + width // 10], "loop")
        counts.append(len(sent))
        await flows.work_step()
    assert await flows.status(name) == "SUCCEEDED"
    return [*counts, len(sent)], perf_counter() - started


async def count_index_reads(flows: FlowsStepper) -> int:
    """Return the number of index entries of steps that were read so far."""
    await flows.db.execute("SELECT pg_stat_force_next_flush()")
    query = "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relname = 'flow_step'"
    return int(await flows.db.fetchval(query))


async def test_cost_per_step_does_not_grow_with_width(database_url: str, tmp_path: Path) -> None:
    """F3: statements and reads per step do not grow with the number of steps, also with plans cached for few."""
    async with flows_stepper(database_url, tmp_path, size=1) as flows:
        for width in (10, 11, 12, 13, 14, 15, 16):
            await measure_fan(flows, width)
        reads = [await count_index_reads(flows)]
        narrow, _ = await measure_fan(flows, 100)
        reads.append(await count_index_reads(flows))
        wide, _ = await measure_fan(flows, 1_000)
        reads.append(await count_index_reads(flows))
        assert wide == narrow
        assert reads[2] - reads[1] < 3 * 10 * (reads[1] - reads[0]), reads


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_ten_thousand_steps_take_linear_time(database_url: str, tmp_path: Path) -> None:
    """F3: there is no quadratic work: ten times the width takes far less than a hundred times as long."""
    async with flows_stepper(database_url, tmp_path, size=1) as flows:
        await measure_fan(flows, 100)
        narrow, took = await measure_fan(flows, 1_000)
        wide, took_wide = await measure_fan(flows, examples(2_000, soak=10_000))
        assert wide == narrow
        assert examples(1, soak=0) or took_wide < 40 * took, (took, took_wide)
