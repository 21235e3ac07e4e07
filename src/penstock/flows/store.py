"""Runs and steps on PostgreSQL: a typed function per statement."""

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
    StepEnd,
    StepError,
    StepKey,
    StepSettlement,
)
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.kernel.states.journal import APPENDED_MOVES

CHANNEL = "penstock_flows"
NO_APPETITE: tuple[Sequence[str], int, None, None] = ((), 0, None, None)

_TURN = f"t.unmet = met.met AND t.status = {STEP.sql('PENDING')} AND NOT t.needs_evaluation"
_WORDS = {
    "<moves>": APPENDED_MOVES,
    "<turn>": f"({_TURN})",
    "<handed>": "(t.kind = ANY ($16::text[]) AND met.place <= $17::integer)",
    "<first>": "($14 AND s.unmet = 0 AND NOT s.needs_evaluation)",
    "<open>": "(r.open - CASE WHEN r.is_counted THEN done.closed ELSE done.last END)",
    # F7: one failure is enough; else a run ends with the last of the steps nothing depends on.
    "<run_reached>": f"""CASE
            WHEN r.status <> {RUN.sql("RUNNING")} THEN r.status
            WHEN done.failed > 0 THEN {RUN.sql("FAILED")}
            WHEN <open> > 0 THEN r.status
            WHEN r.failed > 0 THEN {RUN.sql("FAILED")}
            ELSE {RUN.sql("SUCCEEDED")} END""",
}


def _filled(body: str) -> str:
    for word, text in reversed(_WORDS.items()):  # a later word may hold an earlier one
        body = body.replace(word, text)
    return body


SQL = {name: _filled(body) for name, body in sql.load(__package__, {"run": RUN, "step": STEP}).items()}


async def insert_run(
    connection: Connection, new: NewRun, steps: Sequence[NewStep], now: datetime, *, is_begun: bool
) -> tuple[int, list[StepKey]] | None:
    """F2: the number of a new run, and its steps that must be looked at now; None when its id is taken."""
    row = await connection.fetchrow(
        SQL["insert_run"],
        *(new.run_id, new.flow, new.scope, new.digest, new.fail_fast, new.open, *(new.parent or (None, None))),
        *(new.depth, new.scheduled_for, new.trace, new.created_by, now, is_begun),
        *_step_columns(steps),
    )
    return None if row is None else (row["id"], [(row["id"], n) for n in row["looks"]])


async def insert_steps(tx: Connection, run: int, steps: Sequence[NewStep], now: datetime) -> None:
    """More steps of a run, all waiting."""
    await tx.execute(SQL["insert_steps"], run, now, *_step_columns(steps))


def _step_columns(steps: Sequence[NewStep]) -> list[list[Any]]:
    return [
        [step.n for step in steps],
        [step.step_id for step in steps],
        [step.kind for step in steps],
        [_places(step.depends_on) for step in steps],
        [_places(step.children) for step in steps],
        [len(step.depends_on) for step in steps],
        [step.needs_evaluation for step in steps],
        [step.is_plain for step in steps],
        [step.required for step in steps],
        [step.spec for step in steps],
        [step.given for step in steps],
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
    """F19: take over what another run did: place, status, outputs, error, artifacts and where from."""
    columns = [list(column) for column in zip(*reused, strict=True)]
    await tx.execute(SQL["reuse_steps"], run, now, actor, *columns)


async def lock_runs(tx: Connection, runs: Iterable[int]) -> dict[int, asyncpg.Record]:
    """Hold *runs* until the end of the transaction."""
    return {row["id"]: row for row in await tx.fetch(SQL["lock_runs"], sorted(set(runs)))}


async def count_active(connection: Connection, flow: str) -> int:
    """F16: how many runs of a flow are under way."""
    return int(await connection.fetchval(SQL["count_active"], flow))


async def move_run(
    tx: Connection,
    run: int,
    source: FlowRunStatus,
    target: FlowRunStatus,
    actor: str,
    now: datetime,
    reason: str | None = None,
) -> None:
    """Move a run that is held; Conflict BAD_MOVE when no move leads there."""
    RUN.check(source, target)
    await tx.fetchval(SQL["move_run"], run, source.value, target.value, reason, actor, now)


async def advance(tx: Connection, runs: Sequence[int], now: datetime) -> StepSettlement:
    """F3: give their turn to all steps of *runs* that wait for nothing."""
    told = StepSettlement()
    for what, run, n, kind in await tx.fetch(SQL["advance"], runs, now):
        if what == "ready":
            told.ready.add(kind)
        else:
            told.to_evaluate.append((run, n))
    return told


async def settle(
    connection: Connection, ends: Sequence[StepEnd], now: datetime, actor: str, appetite: Prefetch | None = None
) -> StepSettlement:
    """F3–F5: end steps, and all that follows in one statement; what is not told back was no longer as said."""
    columns = [list(column) for column in zip(*ends, strict=True)]
    rows = await connection.fetch(SQL["settle"], *columns, now, actor, *(appetite or NO_APPETITE))
    told = StepSettlement()
    for row in rows:
        match row["what"]:
            case "ended":
                place = (row["run"], row["n"])
                told.ended.append(
                    EndedStep(place, StepStatus(row["status"]), row["map_n"], row["step_id"], row["kind"])
                )
                if row["status"] == StepStatus.READY:
                    told.ready.add(row["kind"])
            case "handed":
                told.prefetched.append(_claimed(row, appetite.until if appetite else now))
            case "ready":
                told.ready.add(row["kind"])
            case "look":
                told.to_evaluate.append((row["run"], row["n"]))
            case _:
                told.runs.append((row["run"], row["run_id"], FlowRunStatus(row["status"])))
    return told


async def pass_on(
    connection: Connection, held: ClaimedStep, outputs: Json, digest: str, now: datetime, appetite: Prefetch
) -> list[ClaimedStep] | None:
    """F3–F5: end a step and have the one after it; None, and nothing done, when it is not as simple as that."""
    place = (held.run, held.n, held.fence)
    told = (outputs, digest, now, appetite.kinds, appetite.worker, appetite.until)
    row = await connection.fetchrow(SQL["pass_on"], *place, *told)
    if row is None:
        return None
    return [_claimed(row, appetite.until)] if row["n"] is not None else []


async def make_ready(tx: Connection, filled: Sequence[tuple[int, int, Json | None]], now: datetime) -> set[str]:
    """F8: give their turn to steps that were looked at; the kinds of those that got it."""
    columns = [list(column) for column in zip(*filled, strict=True)]
    return {row["kind"] for row in await tx.fetch(SQL["make_ready"], *columns, now)}


async def expand(tx: Connection, place: StepKey, items: int, given: Json | None, now: datetime) -> int | None:
    """F14: begin a step of the engine's own; its fence, or None when it no longer waits."""
    found: int | None = await tx.fetchval(SQL["expand"], *place, items, given, now)
    return found


async def cancel_waiting(
    tx: Connection, run: int, reason: str, actor: str, now: datetime, map_n: int | None = None
) -> list[int]:
    """F7, F9: end what has not begun in a run, or among the items of one of its maps."""
    return [row["n"] for row in await tx.fetch(SQL["cancel_waiting"], run, map_n, reason, now, actor)]


async def claim(
    connection: Connection, rooms: Mapping[str, int], limit: int, worker: str, now: datetime, until: datetime
) -> list[ClaimedStep]:
    """F4: steps that are now *worker*'s alone; of each kind as many as there is room for."""
    rows = await connection.fetch(SQL["claim"], list(rooms), list(rooms.values()), limit, now, worker, until)
    scopes = {row["run"]: row["scope"] for row in rows if row["scope"] is not None}
    return [_claimed(row, until, scopes[row["run"]]) for row in rows]


async def steps_at(tx: Connection, places: Sequence[StepKey]) -> list[asyncpg.Record]:
    """All that decides what becomes of some steps."""
    return await tx.fetch(SQL["steps_at"], *([place[n] for place in places] for n in (0, 1)))


async def places_of(
    connection: Connection, names: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], tuple[StepKey, str]]:
    """Where steps are that are known by their names, and of which kind."""
    rows = await connection.fetch(SQL["places_of"], *([name[n] for name in names] for n in (0, 1)))
    return {(row["run_id"], row["step_id"]): ((row["run"], row["n"]), row["kind"]) for row in rows}


def error_document(error: StepError | None) -> Json | None:
    """An error as it is kept."""
    return None if error is None else error.as_dict()


def _places(places: Sequence[int]) -> str:
    return f"{{{','.join(map(str, places))}}}"


def _claimed(row: asyncpg.Record, until: datetime, scope: Json | None = None) -> ClaimedStep:
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
