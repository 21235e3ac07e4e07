"""Work handed out for a time: claim, heartbeat, settle, reap, under a fence that only grows.

A stage declares a `Lease` over a table. Besides its key and the column of the state the table has, all NOT NULL:
`id bigint` (in order of arrival), `fence bigint`, `attempts integer`, `due_at timestamptz` and `moves bigint[]` (the
numbers of its journal entries); and `worker text`, `lease_until timestamptz`.
An index on `(due_at, id) WHERE <state> = <ready>` and one on `(lease_until)` of held rows keep it fast.
A row whose stages follow one another has one `Lease` per stage, each with a state and a count of attempts of its own.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from operator import itemgetter
from typing import Any, Generic, NamedTuple

import asyncpg

from penstock.kernel.db.database import Connection
from penstock.kernel.db.sql import load
from penstock.kernel.machine import S, StateMachine
from penstock.kernel.states.journal import APPENDED_MOVES
from penstock.kernel.tasks.outcome import clean_reason

Key = tuple[Any, ...]
REAPER = "reaper"
REAP_LIMIT = 1_000
_NOW = {"claim": "$3", "settle": "$1", "reap": "$1"}  # which parameter of each statement tells the time
_ACTOR = {"settle": "coalesce(t.worker, 'unnamed')", "reap": f"'{REAPER}'::text"}


class LeasedRow(NamedTuple):
    """A row its worker may settle as long as nobody got a higher fence."""

    key: Key
    fence: int
    attempt: int
    row: asyncpg.Record


class LeaseReport(NamedTuple, Generic[S]):
    """What a worker says of a row it held under *fence*.

    *due_at* is when a row that goes back is handed out again; without it the row keeps its place. One that does not
    count was not its own fault, or not begun: it costs no attempt.
    """

    key: Key
    fence: int
    target: S
    reason: str | None = None
    due_at: datetime | None = None
    counts: bool = True


class AcceptedReport(NamedTuple, Generic[S]):
    """A report that was believed: where the row is now, and whether this very report moved it there."""

    key: Key
    fence: int
    state: S
    moved: bool


@dataclass(frozen=True)
class Lease(Generic[S]):
    """A declaration: which table, and which states of its machine mean ready, held, done and failed."""

    table: str
    machine: StateMachine[S]
    ready: S
    held: S
    done: S
    failed: S
    key: Mapping[str, str] = field(default_factory=lambda: {"id": "bigint"})  # columns and their types
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
        self, tx: Connection, *, worker: str, limit: int, lease_for: timedelta, now: datetime
    ) -> list[LeasedRow]:
        """Rows now held by *worker* alone, oldest first; empty when all are taken."""
        # The limit as a literal: with it the plan is good for every call, and is made once, not each time.
        query = self._sql["claim"].replace("<limit>", str(int(limit)))
        rows = await tx.fetch(query, worker, now + lease_for, now)
        return [LeasedRow(self._key(row), row["fence"], row[self.attempts], row) for row in rows]

    async def heartbeat(
        self, tx: Connection, held: Iterable[tuple[Key, int]], *, until: datetime
    ) -> set[tuple[Key, int]]:
        """Extend leases, given by key and fence; those still held. A missing one was lost: stop working on it."""
        rows = await tx.fetch(self._sql["heartbeat"], until, *self._columns(sorted(set(held))))
        return {(self._key(row), row["fence"]) for row in rows}

    async def settle(
        self, tx: Connection, reports: Sequence[LeaseReport[S]], *, now: datetime
    ) -> list[AcceptedReport[S]]:
        """End what is still held, or was ended just so before. What is not told back was superseded: unchanged.

        Of two reports on one row the first counts. The journal names the holder of each row as the author.
        """
        for target in {report.target for report in reports} - {self.ready}:
            self.machine.check(self.held, target)
        said: dict[tuple[Key, int], LeaseReport[S]] = {}
        for report in reports:
            said.setdefault((report.key, report.fence), report)
        alike: dict[tuple[Any, ...], list[LeaseReport[S]]] = defaultdict(list)
        for report in said.values():
            alike[report[2:]].append(report)
        return [one for group in alike.values() for one in await self._settle(tx, group, now)]

    async def _settle(
        self, tx: Connection, reports: Sequence[LeaseReport[S]], now: datetime
    ) -> list[AcceptedReport[S]]:
        """Settle *reports* that differ in nothing but the row."""
        _, _, target, reason, due_at, counts = reports[0]
        # In one order, so that batches do not deadlock.
        said = self._columns(sorted((report.key, report.fence) for report in reports))
        due = due_at if target is self.ready else None
        why = clean_reason(reason) if reason else None
        found = await tx.fetch(self._sql["settle"], now, target.value, why, due, counts, *said)
        states = self.machine.states
        settled = [AcceptedReport(self._key(row), row["fence"], states(row["state"]), True) for row in found]
        if len(found) < len(reports):
            before = await tx.fetch(self._sql["standing"], target.value, counts, *said)
            moved = {(one.key, one.fence) for one in settled}
            told = [AcceptedReport(self._key(row), row["fence"], states(row["state"]), False) for row in before]
            settled += [one for one in told if (one.key, one.fence) not in moved]
        return settled

    async def reap(self, tx: Connection, *, now: datetime) -> list[tuple[Key, S]]:
        """Take back what nobody settled in time: ready again, or failed once its attempts are used up."""
        rows = await tx.fetch(self._sql["reap"], now, REAP_LIMIT)
        return [(self._key(row), self.machine.states(row["status"])) for row in rows]

    @cached_property
    def _key(self) -> Callable[[asyncpg.Record], Key]:
        columns = itemgetter(*self.key)
        return columns if len(self.key) > 1 else lambda row: (columns(row),)

    def _columns(self, rows: Sequence[tuple[Key, int]]) -> list[list[Any]]:
        """Keys and fences as arrays to bind."""
        return [*([key[n] for key, _ in rows] for n in range(len(self.key))), [fence for _, fence in rows]]

    @cached_property
    def _way_back(self) -> tuple[S, ...]:
        """The moves that bring a held row back to ready: straight, or through failed."""
        return (self.ready,) if self.machine.can(self.held, self.ready) else (self.failed, self.ready)

    @cached_property
    def _sql(self) -> Mapping[str, str]:
        statements = load("penstock.tracking", file="lease.sql")
        exhausted = "{} = <ready> AND {} AND t.<attempts> >= <max_attempts>"
        words = {
            "steps": statements["steps"],
            "paths": self._paths(),
            "said_keys": self._said(first=2),
            "said_settled": self._said(first=6),
            "said_standing": self._said(first=3),
            "reached_before": f"CASE WHEN {exhausted.format('$1', '$2')} THEN <failed> ELSE $1 END",
            "reached": f"CASE WHEN {exhausted.format('$2', '$5')} THEN <failed> ELSE $2 END",
            "moves": APPENDED_MOVES,
            "is_said": " AND ".join(f"t.{column} = said.{column}" for column in self.key),
            "keys": ", ".join(f"t.{column}" for column in self.key),
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
        }
        return {
            name: _fill(body, {**words, "now": _NOW.get(name, ""), "actor": _ACTOR.get(name, "")})
            for name, body in statements.items()
        }

    def _paths(self) -> str:
        """Which moves lead a held row to where it is found after: reached, number, source, target."""
        ways = [(self.held, self.done), (self.held, self.failed), (self.held, *self._way_back)]
        words = [[self.machine.sql(state.name) for state in way] for way in ways]
        rows = [f"({way[-1]}, {n}, {way[n - 1]}, {way[n]})" for way in words for n in range(1, len(way))]
        return f"(VALUES {', '.join(rows)}) AS step (reached, n, source, target)"

    def _said(self, *, first: int) -> str:
        """Keys and fences, bound from parameter *first* on, as rows of a relation `said`."""
        columns = {**self.key, "fence": "bigint"}
        arrays = ", ".join(f"${first + n}::{kind}[]" for n, kind in enumerate(columns.values()))
        return f"unnest({arrays}) AS said ({', '.join(columns)})"


def _fill(body: str, words: Mapping[str, str]) -> str:
    for word, text in words.items():
        body = body.replace(f"<{word}>", text)
    return body
