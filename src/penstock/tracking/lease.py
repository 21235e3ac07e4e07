"""Leases on the rows of a table: claim, heartbeat, settle and reap, protected by a fence that only grows.

A stage declares a `Lease` over a table. The table needs its key, the column of the state, and these columns, all NOT
NULL: `id bigint` (in order of arrival), `fence bigint`, `attempts integer`, `due_at timestamptz` and `moves bigint[]`
(the numbers of its journal entries); also `worker text` and `lease_until timestamptz`.
An index on `(due_at, id) WHERE <state> = <ready>` and one on `(lease_until)` of claimed rows keep the statements fast.
A row that passes several stages has one `Lease` per stage, each with its own state and attempts column.
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
from penstock.kernel.tasks.outcome import sanitize_reason

Key = tuple[Any, ...]
REAPER = "reaper"
REAP_LIMIT = 1_000
_NOW = {"claim": "$3", "settle": "$1", "reap": "$1"}  # the parameter of each statement with the current time
_ACTOR = {"settle": "coalesce(t.worker, 'unnamed')", "reap": f"'{REAPER}'::text"}


class LeasedRow(NamedTuple):
    """A claimed row; its worker may settle it until a later claim or a reap increments the fence."""

    key: Key
    fence: int
    attempt: int
    row: asyncpg.Record


class LeaseReport(NamedTuple, Generic[S]):
    """The outcome of a row that was claimed under *fence*.

    *due_at* is the time when a row that returns to the queue can be claimed again; None keeps its position. Without
    *counts_attempt* the claim costs no attempt: the row was not processed, or the failure was not its own.
    """

    key: Key
    fence: int
    target: S
    reason: str | None = None
    due_at: datetime | None = None
    counts_attempt: bool = True


class AcceptedReport(NamedTuple, Generic[S]):
    """An accepted report: the state of the row, and whether this report moved it there."""

    key: Key
    fence: int
    state: S
    moved: bool


@dataclass(frozen=True)
class Lease(Generic[S]):
    """The declaration of a leased table, and of the states that mean ready, claimed, done and failed."""

    table: str
    machine: StateMachine[S]
    ready: S
    claimed: S
    done: S
    failed: S
    key: Mapping[str, str] = field(default_factory=lambda: {"id": "bigint"})  # columns and their types
    state: str = "status"
    attempts: str = "attempts"
    stamp: str | None = None  # optional column with the time of the last move
    condition: str = "true"  # condition on a claimable row besides its state
    subject: str = "t.id::text"  # name of the row in the journal; `t` is the row
    max_attempts: int | str = 5  # a number, or a column of the row: "t.max_attempts"

    def __post_init__(self) -> None:
        """Raise Conflict if the machine does not allow the moves of this lease."""
        self.machine.check(self.ready, self.claimed)
        for target in (self.done, self.failed):
            self.machine.check(self.claimed, target)
        if self._return_path[0] is not self.ready:
            self.machine.check(self._return_path[0], self.ready)

    async def claim(
        self, tx: Connection, *, worker: str, limit: int, lease_for: timedelta, now: datetime
    ) -> list[LeasedRow]:
        """Claim up to *limit* ready rows for *worker*, oldest first; empty if no row is available."""
        # The limit as a literal: the plan then fits every call and is made once per connection.
        query = self._sql["claim"].replace("<limit>", str(int(limit)))
        rows = await tx.fetch(query, worker, now + lease_for, now)
        return [LeasedRow(self._key(row), row["fence"], row[self.attempts], row) for row in rows]

    async def heartbeat(
        self, tx: Connection, claims: Iterable[tuple[Key, int]], *, until: datetime
    ) -> set[tuple[Key, int]]:
        """Extend the leases of *claims* (key and fence) and return those still valid; the missing ones were lost."""
        rows = await tx.fetch(self._sql["heartbeat"], until, *self._make_columns(sorted(set(claims))))
        return {(self._key(row), row["fence"]) for row in rows}

    async def settle(
        self, tx: Connection, reports: Sequence[LeaseReport[S]], *, now: datetime
    ) -> list[AcceptedReport[S]]:
        """Settle claimed rows and return the accepted reports; a missing report is superseded and changed nothing.

        A repeated report is accepted without a move. Of two reports on one row the first counts. The journal names
        the worker of each row as the actor.
        """
        for target in {report.target for report in reports} - {self.ready}:
            self.machine.check(self.claimed, target)
        first: dict[tuple[Key, int], LeaseReport[S]] = {}
        for report in reports:
            first.setdefault((report.key, report.fence), report)
        groups: dict[tuple[Any, ...], list[LeaseReport[S]]] = defaultdict(list)
        for report in first.values():
            groups[report[2:]].append(report)
        return [accepted for group in groups.values() for accepted in await self._settle(tx, group, now)]

    async def _settle(
        self, tx: Connection, reports: Sequence[LeaseReport[S]], now: datetime
    ) -> list[AcceptedReport[S]]:
        """Settle *reports* that differ only in the row."""
        _, _, target, reason, due_at, counts_attempt = reports[0]
        # Always in the same order, so that concurrent batches do not deadlock.
        keys = self._make_columns(sorted((report.key, report.fence) for report in reports))
        due = due_at if target is self.ready else None
        why = sanitize_reason(reason) if reason else None
        moved = await tx.fetch(self._sql["settle"], now, target.value, why, due, counts_attempt, *keys)
        states = self.machine.states
        accepted = [AcceptedReport(self._key(row), row["fence"], states(row["state"]), True) for row in moved]
        if len(moved) < len(reports):
            settled = await tx.fetch(self._sql["settled_before"], target.value, counts_attempt, *keys)
            names = {(report.key, report.fence) for report in accepted}
            repeated = [AcceptedReport(self._key(row), row["fence"], states(row["state"]), False) for row in settled]
            accepted += [report for report in repeated if (report.key, report.fence) not in names]
        return accepted

    async def reap(self, tx: Connection, *, now: datetime) -> list[tuple[Key, S]]:
        """Take back rows with an expired lease and return their new states: ready, or failed after max_attempts."""
        rows = await tx.fetch(self._sql["reap"], now, REAP_LIMIT)
        return [(self._key(row), self.machine.states(row["status"])) for row in rows]

    @cached_property
    def _key(self) -> Callable[[asyncpg.Record], Key]:
        columns = itemgetter(*self.key)
        return columns if len(self.key) > 1 else lambda row: (columns(row),)

    def _make_columns(self, rows: Sequence[tuple[Key, int]]) -> list[list[Any]]:
        """Return keys and fences as arrays for the parameters of a statement."""
        return [*([key[n] for key, _ in rows] for n in range(len(self.key))), [fence for _, fence in rows]]

    @cached_property
    def _return_path(self) -> tuple[S, ...]:
        """Return the states that lead a claimed row back to ready: directly, or through failed."""
        return (self.ready,) if self.machine.can(self.claimed, self.ready) else (self.failed, self.ready)

    @cached_property
    def _sql(self) -> Mapping[str, str]:
        statements = load("penstock.tracking", file="lease.sql")
        exhausted = "{} = <ready> AND {} AND t.<attempts> >= <max_attempts>"
        words = {
            "steps": statements["steps"],
            "paths": self._make_path_relation(),
            "reported_keys": self._make_report_relation(first=2),
            "reported_settled": self._make_report_relation(first=6),
            "reported_before": self._make_report_relation(first=3),
            "reached_before": f"CASE WHEN {exhausted.format('$1', '$2')} THEN <failed> ELSE $1 END",
            "reached": f"CASE WHEN {exhausted.format('$2', '$5')} THEN <failed> ELSE $2 END",
            "moves": APPENDED_MOVES,
            "is_reported": " AND ".join(f"t.{column} = reported.{column}" for column in self.key),
            "keys": ", ".join(f"t.{column}" for column in self.key),
            "table": self.table,
            "state": self.state,
            "attempts": self.attempts,
            "stamp": f", {self.stamp} = <now>" if self.stamp else "",
            "machine": f"'{self.machine.name}'",
            "ready": self.machine.format_sql(self.ready.name),
            "claimed": self.machine.format_sql(self.claimed.name),
            "failed": self.machine.format_sql(self.failed.name),
            "condition": self.condition,
            "max_attempts": str(self.max_attempts),
            "subject": self.subject,
        }
        return {
            name: _fill(body, {**words, "now": _NOW.get(name, ""), "actor": _ACTOR.get(name, "")})
            for name, body in statements.items()
        }

    def _make_path_relation(self) -> str:
        """Return the moves to each state a claimed row can reach, as a relation: reached, number, source, target."""
        paths = [(self.claimed, self.done), (self.claimed, self.failed), (self.claimed, *self._return_path)]
        words = [[self.machine.format_sql(state.name) for state in path] for path in paths]
        rows = [f"({path[-1]}, {n}, {path[n - 1]}, {path[n]})" for path in words for n in range(1, len(path))]
        return f"(VALUES {', '.join(rows)}) AS step (reached, n, source, target)"

    def _make_report_relation(self, *, first: int) -> str:
        """Return a relation `reported` of keys and fences, bound from parameter *first* on."""
        columns = {**self.key, "fence": "bigint"}
        arrays = ", ".join(f"${first + n}::{kind}[]" for n, kind in enumerate(columns.values()))
        return f"unnest({arrays}) AS reported ({', '.join(columns)})"


def _fill(body: str, words: Mapping[str, str]) -> str:
    for word, text in words.items():
        body = body.replace(f"<{word}>", text)
    return body
