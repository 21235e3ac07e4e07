"""Statements on runs and steps in PostgreSQL: a typed function for each."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import asyncpg

from penstock.flows.contract import FlowRunStatus, StepStatus
from penstock.flows.model import (
    RUN,
    STEP,
    ClaimedStep,
    EndedStep,
    Json,
    NewRun,
    NewStep,
    Prefetch,
    RunChange,
    StepEnd,
    StepError,
    StepKey,
    StepSettlement,
)
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.kernel.states.journal import APPENDED_MOVES

CHANNEL = "penstock_flows"
NO_PREFETCH: tuple[Sequence[str], int, None, None] = ((), 0, None, None)

_MACROS = {
    "<moves>": APPENDED_MOVES,
    "<becomes_ready>": f"(t.unmet = met.met AND t.status = {STEP.format_sql('PENDING')} AND NOT t.needs_evaluation)",
    "<is_prefetched>": "(t.kind = ANY ($16::text[]) AND met.position <= $17::integer)",
    "<starts_ready>": "($14 AND s.unmet = 0 AND NOT s.needs_evaluation)",
    "<open>": "(r.open - CASE WHEN r.is_counted THEN done.closed ELSE done.last END)",
    # F7: one failure fails the run; otherwise it ends with the last of its steps without children.
    "<run_reached>": f"""CASE
            WHEN r.status <> {RUN.format_sql("RUNNING")} THEN r.status
            WHEN done.failed > 0 THEN {RUN.format_sql("FAILED")}
            WHEN <open> > 0 THEN r.status
            WHEN r.failed > 0 THEN {RUN.format_sql("FAILED")}
            ELSE {RUN.format_sql("SUCCEEDED")} END""",
}


def _expand_macros(body: str) -> str:
    for macro, text in reversed(_MACROS.items()):  # a later macro may contain an earlier one
        body = body.replace(macro, text)
    return body


SQL = {name: _expand_macros(body) for name, body in sql.load(__package__, {"run": RUN, "step": STEP}).items()}


async def insert_run(
    connection: Connection, new: NewRun, steps: Sequence[NewStep], now: datetime, *, is_started: bool
) -> tuple[int, list[StepKey]] | None:
    """F2: insert a run; return its number and the steps to evaluate now, or None if the run id exists."""
    row = await connection.fetchrow(
        SQL["insert_run"],
        *(new.run_id, new.flow, new.scope, new.digest, new.fail_fast, new.open, *(new.parent or (None, None))),
        *(new.depth, new.scheduled_for, new.trace, new.created_by, now, is_started),
        *_make_step_columns(steps),
    )
    return None if row is None else (row["id"], [(row["id"], n) for n in row["to_evaluate"]])


async def insert_steps(tx: Connection, run: int, steps: Sequence[NewStep], now: datetime) -> None:
    """Insert PENDING steps of a run."""
    await tx.execute(SQL["insert_steps"], run, now, *_make_step_columns(steps))


def _make_step_columns(steps: Sequence[NewStep]) -> list[list[Any]]:
    return [
        [step.n for step in steps],
        [step.step_id for step in steps],
        [step.kind for step in steps],
        [_encode_indexes(step.depends_on) for step in steps],
        [_encode_indexes(step.children) for step in steps],
        [len(step.depends_on) for step in steps],
        [step.needs_evaluation for step in steps],
        [step.is_plain for step in steps],
        [step.required for step in steps],
        [step.spec for step in steps],
        [step.resolved_inputs for step in steps],
        [step.map_n for step in steps],
        [step.max_attempts for step in steps],
        [step.time_limit for step in steps],
    ]


async def reuse_steps(
    tx: Connection,
    run: int,
    reused: Sequence[tuple[int, str, Json | None, Json | None, str | None, str]],
    now: datetime,
    actor: str,
) -> None:
    """F19: reuse steps of another run: index, status, outputs, error, artifacts and reason of each."""
    columns = [list(column) for column in zip(*reused, strict=True)]
    await tx.execute(SQL["reuse_steps"], run, now, actor, *columns)


async def lock_runs(tx: Connection, runs: Iterable[int]) -> dict[int, asyncpg.Record]:
    """Lock *runs* until the end of the transaction."""
    return {row["id"]: row for row in await tx.fetch(SQL["lock_runs"], sorted(set(runs)))}


async def count_running_runs(connection: Connection, flow: str) -> int:
    """F16: return the number of running runs of a flow."""
    return int(await connection.fetchval(SQL["count_running_runs"], flow))


async def move_run(
    tx: Connection,
    run: int,
    source: FlowRunStatus,
    target: FlowRunStatus,
    actor: str,
    now: datetime,
    reason: str | None = None,
) -> RunChange:
    """Change the status of a locked run; Conflict BAD_MOVE if the machine has no such transition."""
    RUN.check(source, target)
    row = await tx.fetchrow(SQL["move_run"], run, source.value, target.value, reason, actor, now)
    if row is None:
        raise AssertionError(f"run {run} is not {source.value}: it must be locked")
    return RunChange(run, row["run_id"], row["flow"], target, reason, row["duration"])


async def advance(tx: Connection, runs: Sequence[int], now: datetime) -> StepSettlement:
    """F3: make all steps of *runs* without unmet dependencies ready, or return them for evaluation."""
    settlement = StepSettlement()
    for change, run, n, kind in await tx.fetch(SQL["advance"], runs, now):
        if change == "ready":
            settlement.ready.add(kind)
        else:
            settlement.to_evaluate.append((run, n))
    return settlement


async def settle(
    connection: Connection, ends: Sequence[StepEnd], now: datetime, actor: str, prefetch: Prefetch | None = None
) -> StepSettlement:
    """F3–F5: end steps, with all effects, in one statement. Ends that no longer apply are missing in the result."""
    columns = [list(column) for column in zip(*ends, strict=True)]
    rows = await connection.fetch(SQL["settle"], *columns, now, actor, *(prefetch or NO_PREFETCH))
    errors = {(end.run, end.n): end.error for end in ends}
    reasons = {(end.run, end.n): end.reason for end in ends}
    settlement = StepSettlement()
    for row in rows:
        key = (row["run"], row["n"])
        match row["change"]:
            case "ended":
                settlement.ended.append(_make_ended_step(row, reasons[key], errors[key]))
                if row["status"] == StepStatus.READY:
                    settlement.ready.add(row["kind"])
            case "claimed":
                settlement.prefetched.append(_make_claimed_step(row, prefetch.until if prefetch else now))
            case "ready":
                settlement.ready.add(row["kind"])
            case "evaluate":
                settlement.to_evaluate.append(key)
            case _:
                status = FlowRunStatus(row["status"])
                run = RunChange(row["run"], row["run_id"], row["flow"], status, duration=row["duration"])
                settlement.runs.append(run)
    return settlement


async def settle_and_claim(
    connection: Connection, claimed: ClaimedStep, outputs: Json, digest: str, now: datetime, prefetch: Prefetch
) -> list[ClaimedStep] | None:
    """F3–F5: end a step and claim its only child; return None, with no effect, if it is not the only effect."""
    values = (outputs, digest, now, prefetch.kinds, prefetch.worker, prefetch.until)
    row = await connection.fetchrow(SQL["settle_and_claim"], *claimed.key, claimed.fence, *values)
    if row is None:
        return None
    return [_make_claimed_step(row, prefetch.until)] if row["n"] is not None else []


async def make_ready(tx: Connection, resolved: Sequence[tuple[int, int, Json | None]], now: datetime) -> set[str]:
    """F8: make evaluated steps ready; return the kinds of those that are ready now."""
    columns = [list(column) for column in zip(*resolved, strict=True)]
    return {row["kind"] for row in await tx.fetch(SQL["make_ready"], *columns, now)}


async def expand(tx: Connection, key: StepKey, items: int, inputs: Json | None, now: datetime) -> int | None:
    """F14: start a step of an engine kind; return its fence, or None if it is not PENDING."""
    fence: int | None = await tx.fetchval(SQL["expand"], *key, items, inputs, now)
    return fence


async def cancel_waiting(
    tx: Connection, run: int, reason: str, actor: str, now: datetime, map_n: int | None = None
) -> list[int]:
    """F7, F9: cancel the steps of a run that have not started, or the items of one of its maps."""
    return [row["n"] for row in await tx.fetch(SQL["cancel_waiting"], run, map_n, reason, now, actor)]


async def claim(
    connection: Connection, capacities: Mapping[str, int], limit: int, worker: str, now: datetime, until: datetime
) -> list[ClaimedStep]:
    """F4: claim steps for *worker*, up to the capacity of each kind."""
    rows = await connection.fetch(SQL["claim"], list(capacities), list(capacities.values()), limit, now, worker, until)
    scopes = {row["run"]: row["scope"] for row in rows if row["scope"] is not None}
    return [_make_claimed_step(row, until, scopes[row["run"]]) for row in rows]


async def read_steps(tx: Connection, keys: Sequence[StepKey]) -> list[asyncpg.Record]:
    """Return steps with everything that decides their next status."""
    return await tx.fetch(SQL["read_steps"], *([key[n] for key in keys] for n in (0, 1)))


async def find_steps(
    connection: Connection, names: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[StepKey, str]]:
    """Return the keys and kinds of steps, by run id and step id."""
    rows = await connection.fetch(SQL["find_steps"], *([name[n] for name in names] for n in (0, 1)))
    return {(row["run_id"], row["step_id"]): ((row["run"], row["n"]), row["kind"]) for row in rows}


def encode_error(error: StepError | None) -> Json | None:
    """Return an error as it is stored."""
    return None if error is None else error.as_dict()


def _encode_indexes(indexes: Sequence[int]) -> str:
    return f"{{{','.join(map(str, indexes))}}}"


def _make_ended_step(row: asyncpg.Record, reason: str | None, error: Json | None) -> EndedStep:
    return EndedStep(
        (row["run"], row["n"]),
        StepStatus(row["status"]),
        row["map_n"],
        row["run_id"],
        row["step_id"],
        row["kind"],
        row["attempts"],
        reason,
        error,
    )


def _make_claimed_step(row: asyncpg.Record, until: datetime, scope: Json | None = None) -> ClaimedStep:
    return ClaimedStep(
        row["run"],
        row["n"],
        row["run_id"],
        row["step_id"],
        row["kind"],
        row["fence"],
        row["attempts"],
        row["inputs"] or {},
        row["scope"] if scope is None else scope,
        until,
        row["time_limit"],
        row["trace"],
        row["is_plain"],
    )
