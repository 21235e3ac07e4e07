"""Those who come at the same time, on a real PostgreSQL: one wins, and what follows is as if they had come in turn."""

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
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
ASTRAY = """
    SELECT r.run_id, r.status, t.step_id, t.status, t.unmet FROM flow_run r JOIN flow_step t ON t.run = r.id
    WHERE r.status NOT IN ('PENDING', 'RUNNING') AND t.status IN ('PENDING', 'READY')
       OR t.status = 'PENDING' AND t.unmet <> (
           SELECT count(*) FROM flow_step p
           WHERE p.run = t.run AND p.n = ANY (t.depends_on) AND p.status NOT IN ('SUCCEEDED', 'SKIPPED'))"""


@pytest.fixture
async def flows(database_url: str, tmp_path: Path) -> AsyncIterator[FlowsStepper]:
    async with flows_stepper(database_url, tmp_path, size=24) as one:
        yield one


@asynccontextmanager
async def held_back(flows: FlowsStepper, run_id: str, waiting: int) -> AsyncIterator[None]:
    """Whoever is started within waits for the run, until so many do; then all go at once."""
    async with flows.db.transaction() as tx:
        await tx.execute("SELECT FROM flow_run WHERE run_id = $1 FOR UPDATE", run_id)
        yield

        async def all_wait() -> bool:
            return bool(await flows.db.fetchval(WAITING) >= waiting)

        await becomes(all_wait, f"{waiting} wait for the run")


async def at_once(*work: Awaitable[T]) -> list[T | Conflict]:
    """What became of each; a conflict is an answer, anything else goes wrong."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, Conflict):
            raise one
    return found  # type: ignore[return-value]


async def is_consistent(flows: FlowsStepper) -> None:
    assert await flows.db.fetch(ASTRAY) == []
    assert await flows.maintenance.repair() == 0


async def settle(flows: FlowsStepper, held: Sequence[ClaimedStep], by: str) -> Sequence[StepReportAnswer]:
    """As a work loop hands in what it did, or as a worker over HTTP does."""
    if by == "loop":
        answers, _ = await flows.work_source.settle("w", [(one, make_report(one)) for one in held], [], 0)
        return answers
    return await flows.engine.report([make_report(one) for one in held], "w")


# F4: claims.


async def test_of_many_claimers_one_wins_each_step(flows: FlowsStepper) -> None:
    """F4: twenty ask at once, again and again, until nothing is left; nothing is handed out twice."""
    for n in range(10):
        await flows.start({f"s{m}": work() for m in range(30)}, f"r{n}")

    async def keep_claiming(worker: str) -> list[ClaimedStep]:
        found: list[ClaimedStep] = []
        while held := await flows.engine.claim(worker, {"work": 7}, limit=7):
            found += held
        return found

    claimed = await asyncio.gather(*(keep_claiming(f"w{n}") for n in range(20)))
    names = Counter((one.run_id, one.step_id) for held in claimed for one in held)
    assert (len(names), set(names.values())) == (300, {1})
    assert {one.fence for held in claimed for one in held} == {1}
    workers = await flows.db.fetch("SELECT worker, count(*) FROM flow_step GROUP BY worker")
    assert dict(map(tuple, workers)) == {f"w{n}": len(held) for n, held in enumerate(claimed) if held}


async def test_a_limit_holds_whoever_asks_at_once(database_url: str, tmp_path: Path) -> None:
    """F16: never more of a kind than there may be."""
    async with flows_stepper(database_url, tmp_path, size=24, limits={"work": 3}) as flows:
        await flows.start({f"s{m}": work() for m in range(12)})
        for _ in range(4):
            claims = await asyncio.gather(*(flows.claim(2, f"w{n}") for n in range(20)))
            held = [one for some in claims for one in some.values()]
            assert len(held) == 3
            await asyncio.gather(*(flows.report(one) for one in held))
        assert await flows.status() == "SUCCEEDED"


async def test_so_many_runs_of_a_flow_whoever_starts_them(flows: FlowsStepper) -> None:
    """F16: twenty at once; two are let in, and as those end the others."""
    flows.catalogue.add("two", {"a": work()}, maxActiveRuns=2)
    await asyncio.gather(*(flows.start(None, f"r{n}", flow="two") for n in range(20)))
    for done in range(0, 20, 2):
        count = "SELECT count(*) FROM flow_run WHERE status = $1"
        assert await flows.db.fetchval(count, "RUNNING") == 2
        assert await flows.db.fetchval(count, "SUCCEEDED") == done
        await flows.work()
        await asyncio.gather(*(flows.maintenance.start_waiting_runs() for _ in range(4)))


async def test_one_request_sent_many_times_makes_one_run(flows: FlowsStepper) -> None:
    """F2: at the same time, too."""
    await asyncio.gather(*(flows.start({"a": work(), "b": work("a")}) for _ in range(20)))
    assert await flows.db.fetchval("SELECT count(*) FROM flow_step") == 2
    assert len(await flows.moves("flows.run")) == 1


# F3: reports.


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
@pytest.mark.parametrize("by", ["loop", "http"])
async def test_two_parents_that_end_together_free_their_child_once(
    flows: FlowsStepper, by: str, campaign: Campaign
) -> None:
    """F3: the child has its turn, once, however the two fall together."""
    campaign.rounds = examples(60, soak=2_000)
    for n in range(campaign.rounds):
        await flows.start({"a": work(), "b": work(), "c": work("a", "b")}, f"r{n}")
    held = await flows.engine.claim("w", {"work": 5_000}, limit=5_000)
    pairs: dict[str, list[ClaimedStep]] = {}
    for one in held:
        pairs.setdefault(one.run_id, []).append(one)
    for pair in pairs.values():
        assert await asyncio.gather(*(settle(flows, [one], by) for one in pair)) == [[StepReportAnswer.SETTLED]] * 2
    turns = Counter(what for what, _, target, _ in await flows.moves() if what.endswith("/c") and target == "READY")
    assert (len(turns), set(turns.values())) == (len(pairs), {1})
    await is_consistent(flows)


@pytest.mark.parametrize("by", ["loop", "http"])
async def test_parents_that_waited_for_each_other_free_their_child_once(flows: FlowsStepper, by: str) -> None:
    """F3: none of them sees what the others did when it begins, and yet nothing is lost."""
    parents = [f"p{n}" for n in range(8)]
    await flows.start({**{name: work() for name in parents}, "child": work(*parents)})
    held = await flows.claim()
    async with held_back(flows, "r", len(parents)):
        ending = [asyncio.create_task(settle(flows, [one], by)) for one in held.values()]
    assert await asyncio.gather(*ending) == [[StepReportAnswer.SETTLED]] * len(parents)
    assert (await flows.steps())["child"] == "READY"
    await flows.work()
    assert await flows.status() == "SUCCEEDED"


@pytest.mark.parametrize("by", ["loop", "http"])
async def test_last_steps_that_waited_for_each_other_end_their_run(flows: FlowsStepper, by: str) -> None:
    """F3: the run ends with the last of them, also when somebody skipped a step before."""
    await flows.start({**{f"s{n}": work() for n in range(8)}, "t": work("s0"), "u": work("t")})
    await flows.operations.skip("r", "u", "tester")
    await flows.operations.skip("r", "t", "tester")
    held = await flows.claim()
    async with held_back(flows, "r", 8):
        ending = [asyncio.create_task(settle(flows, [one], by)) for one in held.values()]
    await asyncio.gather(*ending)
    assert await flows.status() == "SUCCEEDED"
    assert [target for *_, target, _ in await flows.moves("flows.run")] == ["RUNNING", "SUCCEEDED"]


async def test_items_that_end_together_end_their_map_once(flows: FlowsStepper) -> None:
    """F14: and what comes after it has its turn."""
    await flows.start({"m": map_step(list(range(8))), "z": work("m")})
    held = await flows.claim()
    async with held_back(flows, "r", 8):
        ending = [asyncio.create_task(settle(flows, [one], "http")) for one in held.values()]
    await asyncio.gather(*ending)
    steps = await flows.steps()
    assert (steps["m"], steps["z"]) == ("SUCCEEDED", "READY")


@pytest.mark.parametrize("by", ["loop", "http"])
async def test_batches_in_any_order_do_not_lock_each_other_out(flows: FlowsStepper, by: str) -> None:
    """F5: many settle batches over the same runs, each in its own order; nobody is the victim of a deadlock."""
    chance = random.Random(7)
    steps = {f"s{n}": work() for n in range(12)} | {f"t{n}": work(*(f"s{m}" for m in range(n + 1))) for n in range(12)}
    for n in range(16):
        await flows.start(steps, f"r{n}")
    for _ in range(2):
        held = await flows.engine.claim("w", {"work": 500}, limit=500)
        chance.shuffle(held)
        batches = [held[first : first + 12] for first in range(0, len(held), 12)]
        answers = await asyncio.gather(*(settle(flows, batch, by) for batch in batches))
        assert {answer for some in answers for answer in some} == {StepReportAnswer.SETTLED}
    assert await flows.db.fetchval("SELECT count(*) FROM flow_run WHERE status = 'SUCCEEDED'") == 16
    await is_consistent(flows)


class ConcurrentActors:
    """Workers of both sorts, the reaper and people, on the same few runs."""

    def __init__(self, flows: FlowsStepper, runs: Sequence[str], steps: Sequence[str]) -> None:
        self.flows, self.runs, self.steps = flows, runs, steps
        self.chance = random.Random(11)

    async def work(self, by: str) -> None:
        for _ in range(ROUNDS):
            held = await self.flows.engine.claim(by, {"work": 4}, limit=4)
            done = [
                (one, make_report(one, self.chance.choice([*[StepReportKind.SUCCEEDED] * 9, StepReportKind.FAILED])))
                for one in held
            ]
            if by == "loop":
                await self.flows.work_source.settle("w", done, ["work"], 0)
            else:
                await self.flows.engine.report([said for _, said in done])

    async def interfere(self) -> None:
        people = self.flows.operations
        for _ in range(ROUNDS):
            run, step = self.chance.choice(self.runs), self.chance.choice(self.steps)
            acts: list[Callable[[], Awaitable[object]]] = [
                partial(people.cancel, run, "tester"),
                partial(people.retry, run, "tester"),
                partial(people.retry, run, "tester", step),
                partial(people.skip, run, step, "tester"),
            ]
            await at_once(self.chance.choice(acts)())

    async def reap(self) -> None:
        for _ in range(ROUNDS):
            self.flows.clock.advance(LEASE / 20)
            await self.flows.engine.reap()


async def test_everybody_at_once_leaves_every_run_as_it_should_be(flows: FlowsStepper) -> None:
    """F3–F11: whoever comes when, nothing waits for ever, and every run ends."""
    steps = {f"s{n}": work(*(f"s{m}" for m in range(n) if (n + m) % 3 == 0)) for n in range(10)}
    steps |= {"m": map_step([1, 2, 3], "s1"), "z": work("m")}
    runs = [f"r{n}" for n in range(6)]
    for name in runs:
        await flows.start(steps, name)
    actors = ConcurrentActors(flows, runs, list(steps))
    workers = [actors.work(by) for by in ("loop", "loop", "http", "http")]
    await asyncio.gather(*workers, actors.interfere(), actors.interfere(), actors.reap())
    await is_consistent(flows)
    await flows.expire_leases()
    await flows.work()
    await is_consistent(flows)
    assert {await flows.status(name) for name in runs} <= {"SUCCEEDED", "FAILED", "CANCELLED"}


# F9–F11: against each other.


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_the_first_end_wins(flows: FlowsStepper, campaign: Campaign) -> None:
    """F9: a cancel and the last success: the run is what came first, and the other is told."""
    seen = Counter[str]()
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work("a")}, name)
        held = (await flows.claim())["a"]
        await flows.report(held)
        last = (await flows.claim())["b"]
        async with held_back(flows, name, 2):
            ways = [flows.operations.cancel(name, "tester"), settle(flows, [last], "loop" if n % 2 else "http")]
            tasks = [asyncio.ensure_future(one) for one in (ways if n % 4 < 2 else ways[::-1])]
        cancelled, settled = (await at_once(*tasks))[:: 1 if n % 4 < 2 else -1]
        assert settled == [StepReportAnswer.SETTLED]
        status = await flows.status(name)
        assert status == ("SUCCEEDED" if isinstance(cancelled, Conflict) else "CANCELLED")
        assert (await flows.steps(name))["b"] == "SUCCEEDED"
        seen[status] += 1
    assert len(seen) == 2, seen
    await is_consistent(flows)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_retry_and_cancel_come_in_some_order(flows: FlowsStepper, campaign: Campaign) -> None:
    """F9, F10: the run is open and everything of it, or cancelled and everything of it."""
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work("a"), "c": work("b")}, name)
        await flows.report((await flows.claim())["a"], StepReportKind.FAILED)
        retried, cancelled = await at_once(
            flows.operations.retry(name, "tester"), flows.operations.cancel(name, "tester")
        )
        assert retried == ["a", "b", "c"]
        steps = set((await flows.steps(name)).values())
        if isinstance(cancelled, Conflict):
            assert (await flows.status(name), steps) == ("RUNNING", {"READY", "PENDING"})
            await flows.operations.cancel(name, "tester")
        else:
            assert (await flows.status(name), steps) == ("CANCELLED", {"CANCELLED"})
    await is_consistent(flows)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_the_reaper_and_a_late_report_come_in_some_order(flows: FlowsStepper, campaign: Campaign) -> None:
    """F11: the step is done, or it is somebody else's; never both."""
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work("a")}, name)
        held = (await flows.claim())["a"]
        flows.clock.advance(2 * LEASE)
        reaped, [answer] = await asyncio.gather(flows.engine.reap(), settle(flows, [held], "loop" if n % 2 else "http"))
        step = await flows.step("a", name)
        if answer is StepReportAnswer.SETTLED:
            assert (reaped, step["status"], step["fence"]) == (0, "SUCCEEDED", held.fence)
        else:
            assert (reaped, step["status"], step["fence"]) == (1, "READY", held.fence + 1)
        await flows.operations.cancel(name, "tester")
    await is_consistent(flows)


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_a_claim_and_a_cancel_come_in_some_order(flows: FlowsStepper, campaign: Campaign) -> None:
    """F4, F9: a step is handed out and told to stop, or never handed out."""
    campaign.rounds = ROUNDS
    for n in range(ROUNDS):
        name = f"r{n}"
        await flows.start({"a": work(), "b": work()}, name)
        held, _, skipped = await at_once(
            flows.claim(1), flows.operations.cancel(name, "tester"), flows.operations.skip(name, "b", "tester")
        )
        assert isinstance(held, dict)
        steps = await flows.steps(name)
        for step, status in steps.items():
            assert (status == "RUNNING") == (step in held)
        assert isinstance(skipped, Conflict) or steps["b"] in ("SKIPPED", "READY", "CANCELLED", "RUNNING")
        for one in held.values():
            assert await flows.report(one, StepReportKind.RELEASED) is StepReportAnswer.SETTLED
        if await flows.status(name) == "RUNNING":
            await flows.operations.cancel(name, "tester")
    await is_consistent(flows)


# F3: width.


@asynccontextmanager
async def statements(flows: FlowsStepper) -> AsyncIterator[list[str]]:
    """The statements sent within; the pool has one connection."""
    sent: list[str] = []

    def note(query: Any) -> None:
        sent.append(query.query)

    async with flows.db.connection() as connection:
        connection.add_query_logger(note)
    yield sent
    async with flows.db.connection() as connection:
        connection.remove_query_logger(note)


def fan(width: int) -> dict[str, Any]:
    """One, many, one."""
    many = {f"s{n}": work("first") for n in range(width)}
    return {"first": work(), **many, "last": work(*many)}


async def fanned_out(flows: FlowsStepper, width: int) -> tuple[list[int], float]:
    """How many statements each part of a wide run takes, and how long all of it takes."""
    name, counts, began = f"r{width}", list[int](), perf_counter()
    async with statements(flows) as sent:
        await flows.start(fan(width), name)
        counts.append(len(sent))
        await flows.work_step()
        counts.append(len(sent))
        held = await flows.engine.claim("w", {"work": width}, limit=width)
        counts.append(len(sent))
        assert len(held) == width
        for first in range(0, width, width // 10):
            await settle(flows, held[first : first + width // 10], "loop")
        counts.append(len(sent))
        await flows.work_step()
    assert await flows.status(name) == "SUCCEEDED"
    return [*counts, len(sent)], perf_counter() - began


async def entries_read(flows: FlowsStepper) -> int:
    """How many index entries of steps were read so far."""
    await flows.db.execute("SELECT pg_stat_force_next_flush()")
    query = "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relname = 'flow_step'"
    return int(await flows.db.fetchval(query))


async def test_width_costs_no_more_per_step(database_url: str, tmp_path: Path) -> None:
    """F3: neither statements nor reads of a step grow with how many there are, though plans were made for few."""
    async with flows_stepper(database_url, tmp_path, size=1) as flows:
        for width in (10, 11, 12, 13, 14, 15, 16):
            await fanned_out(flows, width)
        reads = [await entries_read(flows)]
        narrow, _ = await fanned_out(flows, 100)
        reads.append(await entries_read(flows))
        wide, _ = await fanned_out(flows, 1_000)
        reads.append(await entries_read(flows))
        assert wide == narrow
        assert reads[2] - reads[1] < 3 * 10 * (reads[1] - reads[0]), reads


@pytest.mark.soak
@pytest.mark.timeout(examples(300, soak=7_200))
async def test_ten_thousand_steps_cost_ten_times_a_thousand(database_url: str, tmp_path: Path) -> None:
    """F3: no quadratic work: ten times as wide takes nowhere near a hundred times as long."""
    async with flows_stepper(database_url, tmp_path, size=1) as flows:
        await fanned_out(flows, 100)
        narrow, took = await fanned_out(flows, 1_000)
        wide, took_wide = await fanned_out(flows, examples(2_000, soak=10_000))
        assert wide == narrow
        assert examples(1, soak=0) or took_wide < 40 * took, (took, took_wide)
