"""Flows where there is much of them: fans ten times as broad, and tables with a hundred thousand finished runs."""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from benchmarks import peers
from benchmarks.flows import OURS
from benchmarks.flows_defined import KIND, LARGE, WARM_UP, fan_of
from benchmarks.flows_ours import make_runs, opened
from benchmarks.harness import Bench, Figure, Group, ratio
from benchmarks.harvest_place import fresh_database
from benchmarks.peers.flows_env import BREADTH
from benchmarks.session import Session
from penstock.flows.contract import StepReportKind
from penstock.flows.definition.spec import RunRequest
from penstock.flows.model import ClaimedStep, Prefetch, StepReport
from penstock.flows.runtime import FlowsPlatform
from penstock.kernel.db.database import Database
from penstock.kernel.db.embedded import run_embedded_postgres

STEPS, CHUNK, BATCH = 10, 10_000, 100
WORKER = "benchmark"
FILL = """
WITH run AS (
    INSERT INTO flow_run (run_id, flow, status, scope, digest, fail_fast, open, created_by, created_at, started_at,
                          finished_at, moves)
    SELECT 'old-' || n, 'old', 'SUCCEEDED', '{}', repeat('0', 64), false, 0, 'benchmark', at, at, at, ARRAY[1, 2]
    FROM generate_series($1::int, $2::int - 1) AS n CROSS JOIN LATERAL (SELECT now() - interval '1 day' AS at) AS t
    RETURNING id
)
INSERT INTO flow_step (run, n, step_id, kind, status, depends_on, children, unmet, needs_evaluation, is_plain, required,
                       spec, outputs, reported_fence, reported_digest, fence, attempts, worker, due_at, started_at,
                       finished_at, moves)
SELECT run.id, n, 's' || n, $3, 'SUCCEEDED', ARRAY[n - 1], ARRAY[n + 1], 0, false, true, true, '{"kind": "noop"}', '{}',
       1, repeat('0', 64), 1, 1, 'worker', at, at, at, ARRAY[1, 2, 3]
FROM run CROSS JOIN generate_series(0, $4::int - 1) AS n
CROSS JOIN LATERAL (SELECT now() - interval '1 day' AS at) AS t
"""
FORGET = """
WITH forgotten AS (DELETE FROM flow_run WHERE status = 'RUNNING' RETURNING id)
DELETE FROM flow_step WHERE run = ANY (ARRAY(SELECT id FROM forgotten))
"""
WRITTEN, MAPPED = "written down", "by a map"
FANS = {WRITTEN: "fan", MAPPED: "map"}
EMPTY = "an empty table"


@dataclass(frozen=True)
class Sizes:
    """Fans and their breadths, as they are defined, finished runs in a table, and runs that are made at once."""

    fans: Sequence[str]
    breadths: Sequence[int]
    finished: int
    created: int

    @property
    def full_table(self) -> str:
        return f"{self.finished:,} finished runs"


@asynccontextmanager
async def benches(session: Session, sizes: Sizes) -> AsyncIterator[list[Bench]]:
    """Open fans of both breadths, and claims and new runs in both tables."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(run_embedded_postgres(session.postgres))
        found = [
            Bench(_fan(breadth, how), "steps", partial(_run_fan, url, FANS[how], breadth))
            for how in sizes.fans
            for breadth in sizes.breadths
        ]
        for where, finished in {EMPTY: 0, sizes.full_table: sizes.finished}.items():
            own = await stack.enter_async_context(fresh_database(url))
            platform = await stack.enter_async_context(opened(own, str(session.folder)))
            await _fill(platform.db, finished)
            found.append(Bench(_claims(where), "steps", partial(_claim_all, platform, sizes.breadths[-1])))
            found.append(Bench(_creation(where), "runs", partial(_create, platform, sizes.created)))
        yield found


def conclusions(figures: Sequence[Figure], sizes: Sizes) -> list[str]:
    """Return what a greater breadth, and finished runs, do to the speed."""
    few, many, narrow, broad = EMPTY, sizes.full_table, sizes.breadths[0], sizes.breadths[-1]
    pairs = {
        **{f"a fan of {broad:,} {how}": (_fan(broad, how), _fan(narrow, how)) for how in sizes.fans},
        f"claims with {many}": (_claims(many), _claims(few)),
        f"new runs with {many}": (_creation(many), _creation(few)),
    }
    known = {what: ratio(figures, *pair) for what, pair in pairs.items()}
    return [f"{what}: {times:.2f} times the speed of the small one" for what, times in known.items() if times]


GROUP = Group(
    benches,
    full=Sizes(fans=(WRITTEN, MAPPED), breadths=(BREADTH, LARGE), finished=100_000, created=200),
    smoke=Sizes(fans=(MAPPED,), breadths=(WARM_UP,), finished=100, created=8),
    conclude=conclusions,
)


async def _run_fan(url: str, workload: str, breadth: int) -> float:
    async with fresh_database(url) as own:
        args = (workload, "--breadth", str(breadth), "--dsn", own)
        return float((await peers.ask(Path(sys.executable), OURS, *args))["rate"])


async def _claim_all(platform: FlowsPlatform, breadth: int) -> float:
    """Return steps a second while claiming a fan in batches; ending them is not timed."""
    await platform.engine.create(RunRequest(flow=fan_of(breadth)), WORKER)
    await _end(platform, await platform.engine.claim(WORKER, {KIND: 1}, limit=1))
    seconds, steps = 0.0, 0
    while True:
        began = perf_counter()
        held = await platform.engine.claim(WORKER, {KIND: BATCH}, limit=BATCH)
        if not held:
            break
        seconds, steps = seconds + perf_counter() - began, steps + len(held)
        await _end(platform, held)
    assert steps == breadth + 1, f"{steps} steps were claimed"
    return steps / seconds


async def _end(platform: FlowsPlatform, held: Sequence[ClaimedStep]) -> None:
    reports = [
        (
            claimed_step,
            StepReport(claimed_step.run_id, claimed_step.step_id, claimed_step.fence, StepReportKind.SUCCEEDED),
        )
        for claimed_step in held
    ]
    await platform.engine.settle_succeeded(reports, Prefetch((), 0, WORKER, platform.db.clock.now()))


async def _create(platform: FlowsPlatform, runs: int) -> float:
    """Return runs of 40 steps a second, made a few at a time."""
    began = perf_counter()
    await make_runs(platform, "chain", range(runs))
    rate = runs / (perf_counter() - began)
    await platform.db.execute(FORGET)
    return rate


async def _fill(db: Database, runs: int) -> None:
    for start in range(0, runs, CHUNK):
        print(f"filling {start:,} of {runs:,} runs", file=sys.stderr)
        await db.execute(FILL, start, min(start + CHUNK, runs), KIND, STEPS)
    await db.execute("VACUUM ANALYZE")


def _fan(breadth: int, how: str) -> str:
    return f"a fan of {breadth:,}, {how}"


def _claims(where: str) -> str:
    return f"claims of {BATCH}, {where}"


def _creation(where: str) -> str:
    return f"new runs of 40 steps, {where}"
