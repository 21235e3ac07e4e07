"""Every move of every machine: who, when, why. Written in the transaction that makes the move."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection

SQL = sql.load("penstock.kernel.states", file="journal.sql")
MOVES_LIMIT = 1_000  # numbers of journal entries a row keeps: one that is tried without end must not grow without end
# The array of those numbers with that of the statement's `entry` appended, in an UPDATE of a table called t.
APPENDED_MOVES = f"(t.moves || (SELECT number FROM entry))[cardinality(t.moves) + 2 - {MOVES_LIMIT}:]"
PRUNE_LIMIT = 10_000
Position = tuple[int, int, int]  # transaction, entry, place in the entry
BEGINNING: Position = (0, 0, 0)
_LOOKED_AT = 20_000  # entries


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One move of one subject. *source* is None for the first, when the subject came into being."""

    machine: str
    subject: str
    source: str | None
    target: str
    actor: str
    at: datetime
    reason: str | None = None
    fence: int | None = None


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry as it was kept. Positions grow with visibility: a reader who goes on after one misses nothing."""

    position: Position
    entry: JournalEntry


async def append(tx: Connection, entries: Sequence[JournalEntry]) -> list[int]:
    """Keep *entries*, in order, if and only if *tx* commits; the number of each, for its subject to keep."""
    return [await tx.fetchval(SQL["append"], *_alone(entry)) for entry in entries]


async def read_history(
    connection: Connection,
    numbers: Sequence[int],
    subjects: Sequence[str],
    *,
    after: tuple[int, int] = (0, 0),
    limit: int = 1000,
) -> list[StoredEntry]:
    """The moves of *subjects* among the entries they kept the *numbers* of, oldest first, after entry and place."""
    return [_noted(row) for row in await connection.fetch(SQL["history"], numbers, subjects, *after, limit)]


async def read_after(
    connection: Connection, after: Position, *, limit: int, machines: Collection[str] | None = None
) -> tuple[list[StoredEntry], Position]:
    """Return what settled transactions noted after position *after*, and the position from which to go on.

    Nothing will ever appear before what is returned. With *machines*, entries of other machines up to the returned
    position are not read again.
    """
    end = int(await connection.fetchval(SQL["end"]))
    wanted = None if machines is None else list(machines)
    rows = await connection.fetch(SQL["tail"], str(after[0]), *after[1:], limit, str(end), wanted)
    told = [_noted(row) for row in rows]
    return told, told[-1].position if len(told) == limit else max(after, (end, 0, 0))


async def end_position(connection: Connection) -> Position:
    """The position from which `tail_on` returns only what is yet to come."""
    return int(await connection.fetchval(SQL["end"])), 0, 0


async def position_before_last(connection: Connection, machines: Collection[str], count: int) -> Position:
    """The position from which `tail_on` returns the last *count* moves of *machines* first, then what is yet to come.

    Among the latest entries only: who asks for moves that are seldom must not have all of the journal read.
    """
    now = await end_position(connection)
    row = (
        await connection.fetchrow(SQL["before_last"], list(machines), count, _LOOKED_AT, str(now[0])) if count else None
    )
    return (int(row["tx"]), row["id"], row["n"]) if row else now


async def prune(tx: Connection, before: datetime, *, limit: int = PRUNE_LIMIT) -> int:
    """Forget up to *limit* entries older than *before*; returns how many."""
    return int(await tx.fetchval(SQL["prune"], before, limit))


def _alone(entry: JournalEntry) -> tuple[object, ...]:
    told = (entry.subject, entry.source, entry.target, entry.actor, entry.reason, entry.fence)
    return entry.machine, entry.at, *([value] for value in told)


def _noted(row: asyncpg.Record) -> StoredEntry:
    tx, number, place, machine, subject, source, target, actor, at, reason, fence = row
    return StoredEntry(
        (int(tx), number, place), JournalEntry(machine, subject, source, target, actor, at, reason, fence)
    )
