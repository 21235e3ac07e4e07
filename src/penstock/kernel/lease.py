"""Work handed out for a time: claim, heartbeat, settle, reap, under a fence that only grows.

A part declares a `Lease` over a table of its own. The table has `id bigint` as its key and, besides the state's column:
`fence bigint`, `attempts integer`, `due_at timestamptz` (all NOT NULL), `worker text`, `lease_until timestamptz`.
An index on `(due_at, id) WHERE <state> = <ready>` and one on `(lease_until) WHERE <state> = <held>` keep it fast.
A row whose stages follow one another has one `Lease` per stage, each with a state and a count of attempts of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Generic

import asyncpg

from penstock.kernel.db import Connection
from penstock.kernel.machine import Machine, S
from penstock.kernel.outcome import readable
from penstock.kernel.sql import load

REAPER = "reaper"
_NOW = {"claim": "$4", "settle": "$8", "reap": "$1"}  # which parameter of each statement tells the time


@dataclass(frozen=True, slots=True)
class Held:
    """A row its worker may settle as long as nobody got a higher fence."""

    id: int
    fence: int
    attempt: int
    row: asyncpg.Record


@dataclass(frozen=True, slots=True)
class Report(Generic[S]):
    """What a worker says of a row it held under *fence*.

    *due_at* is when a row that goes back is handed out again; without it the row keeps its place. One that does not
    count was not its own fault, or not begun: it costs no attempt.
    """

    id: int
    fence: int
    target: S
    reason: str | None = None
    due_at: datetime | None = None
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Settled(Generic[S]):
    """A report that was believed: where the row is now, and whether this very report moved it there."""

    id: int
    fence: int
    state: S
    moved: bool


@dataclass(frozen=True)
class Lease(Generic[S]):
    """A declaration: which table, and which states of its machine mean ready, held, done and failed."""

    table: str
    machine: Machine[S]
    ready: S
    held: S
    done: S
    failed: S
    state: str = "status"
    attempts: str = "attempts"
    stamp: str | None = None  # the column that tells when the row last moved, if it has one
    condition: str = "true"  # what besides the state makes a row ready
    subject: str = "t.id::text"  # what the journal calls the row; `t` is the row
    max_attempts: int | str = 5  # for all rows, or a column of each: "t.max_attempts"

    def __post_init__(self) -> None:
        """Refuse a declaration whose moves the machine does not know."""
        self.machine.check(self.ready, self.held)
        for target in (self.done, self.failed):
            self.machine.check(self.held, target)
        if self._way_back[0] is not self.ready:
            self.machine.check(self._way_back[0], self.ready)

    async def claim(
        self, tx: Connection, *, worker: str, limit: int, lease_for: timedelta, now: datetime, args: Sequence[Any] = ()
    ) -> list[Held]:
        """Rows now held by *worker* alone, oldest first; empty when all are taken. *args* bind $5… of the condition."""
        rows = await tx.fetch(self._sql["claim"], worker, limit, now + lease_for, now, *args)
        return [Held(row["id"], row["fence"], row[self.attempts], row) for row in rows]

    async def heartbeat(self, tx: Connection, held: Sequence[Held], *, until: datetime) -> set[int]:
        """Extend leases; returns the ids still held. A missing one was lost: stop working on it."""
        rows = await tx.fetch(self._sql["heartbeat"], [h.id for h in held], [h.fence for h in held], until)
        return {row["id"] for row in rows}

    async def settle(
        self, tx: Connection, reports: Sequence[Report[S]], *, now: datetime, actor: str | None = None
    ) -> list[Settled[S]]:
        """End what is still held, or was ended just so before. What is not told back was superseded: unchanged.

        Without an *actor* each row's own holder is noted as the one who said so.
        """
        for target in {report.target for report in reports} - {self.ready}:
            self.machine.check(self.held, target)
        rows = await tx.fetch(
            self._sql["settle"],
            [report.id for report in reports],
            [report.fence for report in reports],
            [report.target.value for report in reports],
            [readable(report.reason) if report.reason else None for report in reports],
            [report.due_at for report in reports],
            [report.counts for report in reports],
            actor,
            now,
        )
        return [Settled(row["id"], row["fence"], self.machine.states(row["state"]), row["moved"]) for row in rows]

    async def reap(self, tx: Connection, *, now: datetime, limit: int = 1000) -> list[tuple[int, S]]:
        """Take back what nobody settled in time: ready again, or failed once its attempts are used up."""
        rows = await tx.fetch(self._sql["reap"], now, limit, REAPER)
        return [(row["id"], self.machine.states(row["status"])) for row in rows]

    @cached_property
    def _way_back(self) -> tuple[S, ...]:
        """The moves that bring a held row back to ready: straight, or through failed."""
        return (self.ready,) if self.machine.can(self.held, self.ready) else (self.failed, self.ready)

    @cached_property
    def _sql(self) -> Mapping[str, str]:
        words = {
            "table": self.table,
            "state": self.state,
            "attempts": self.attempts,
            "stamp": f", {self.stamp} = <now>" if self.stamp else "",
            "machine": f"'{self.machine.name}'",
            "ready": self.machine.sql(self.ready.name),
            "held": self.machine.sql(self.held.name),
            "failed": self.machine.sql(self.failed.name),
            "condition": self.condition,
            "max_attempts": str(self.max_attempts),
            "subject": self.subject,
            "way_back": self._steps_back(),
        }
        statements = load("penstock.kernel", file="lease.sql")
        return {name: _fill(body, {**words, "now": _NOW.get(name, "")}) for name, body in statements.items()}

    def _steps_back(self) -> str:
        """The way back as rows for the journal: number, source, target."""
        names = [self.machine.sql(state.name) for state in (self.held, *self._way_back)]
        return ", ".join(f"({n}, {names[n - 1]}, {names[n]})" for n in range(1, len(names)))


def _fill(body: str, words: Mapping[str, str]) -> str:
    for word, text in words.items():
        body = body.replace(f"<{word}>", text)
    return body
