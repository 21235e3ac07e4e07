"""The journal: every move of every machine with actor, time and reason, in the transaction that makes the move."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection

SQL = sql.load("penstock.kernel.states", file="journal.sql")
MOVES_LIMIT = 1_000  # numbers of journal entries that a row stores: with unlimited retries it must not grow unlimited
# The array of those numbers with the number of the statement's `entry` appended, in an UPDATE of a table called t.
APPENDED_MOVES = f"(t.moves || (SELECT number FROM entry))[cardinality(t.moves) + 2 - {MOVES_LIMIT}:]"
PRUNE_LIMIT = 10_000
Position = tuple[int, int, int]  # transaction, entry, index in the entry
BEGINNING: Position = (0, 0, 0)
_SCAN_LIMIT = 20_000  # latest entries in which past moves are searched


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """A move of one subject. *source* is None for the move that created the subject."""

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
    """A stored entry. Positions grow in the order of visibility: a reader that resumes after one misses nothing."""

    position: Position
    entry: JournalEntry


async def append(tx: Connection, entries: Sequence[JournalEntry]) -> list[int]:
    """Store *entries* in order if *tx* commits; return the number of each, which its subject must store."""
    return [await tx.fetchval(SQL["append"], *_make_entry_arguments(entry)) for entry in entries]


async def read_history(
    connection: Connection,
    numbers: Sequence[int],
    subjects: Sequence[str],
    *,
    after: tuple[int, int] = (0, 0),
    limit: int = 1000,
) -> list[StoredEntry]:
    """Return the moves of *subjects* in the entries with these *numbers*, oldest first, after (entry, index)."""
    return [_make_stored_entry(row) for row in await connection.fetch(SQL["history"], numbers, subjects, *after, limit)]


async def read_after(
    connection: Connection, after: Position, *, limit: int, machines: Collection[str] | None = None
) -> tuple[list[StoredEntry], Position]:
    """Return the moves of settled transactions after position *after*, and the position from which to continue.

    No entry will ever appear before the returned ones. With *machines*, entries of other machines up to the returned
    position are not read again.
    """
    end = int(await connection.fetchval(SQL["end"]))
    selected = None if machines is None else list(machines)
    rows = await connection.fetch(SQL["tail"], str(after[0]), *after[1:], limit, str(end), selected)
    entries = [_make_stored_entry(row) for row in rows]
    return entries, entries[-1].position if len(entries) == limit else max(after, (end, 0, 0))


async def read_end_position(connection: Connection) -> Position:
    """Return the position from which `read_after` returns only future moves."""
    return int(await connection.fetchval(SQL["end"])), 0, 0


async def read_position_before_last(
    connection: Connection, machines: Collection[str], count: int, subject_prefix: str = ""
) -> Position:
    """Return the position from which `read_after` returns the last *count* moves of *machines*, then future moves.

    With *subject_prefix*, only moves of subjects with this prefix count.

    Only the latest entries are searched: a request for rare moves must not read the whole journal.
    """
    end = await read_end_position(connection)
    row = (
        await connection.fetchrow(SQL["before_last"], list(machines), count, _SCAN_LIMIT, str(end[0]), subject_prefix)
        if count
        else None
    )
    return (int(row["tx"]), row["id"], row["n"]) if row else end


async def prune(tx: Connection, before: datetime, *, limit: int = PRUNE_LIMIT) -> int:
    """Delete up to *limit* entries older than *before*, and return their number."""
    return int(await tx.fetchval(SQL["prune"], before, limit))


def _make_entry_arguments(entry: JournalEntry) -> tuple[object, ...]:
    columns = (entry.subject, entry.source, entry.target, entry.actor, entry.reason, entry.fence)
    return entry.machine, entry.at, *([value] for value in columns)


def _make_stored_entry(row: asyncpg.Record) -> StoredEntry:
    tx, number, index, machine, subject, source, target, actor, at, reason, fence = row
    return StoredEntry(
        (int(tx), number, index), JournalEntry(machine, subject, source, target, actor, at, reason, fence)
    )
