"""Every move of every machine: who, when, why. Written in the transaction that makes the move."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from penstock.kernel import sql
from penstock.kernel.db import Connection

SQL = sql.load("penstock.kernel", file="journal.sql")
PRUNE_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
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
class Noted:
    """An entry as it was kept. Positions grow with visibility: a reader who goes on after one misses nothing."""

    position: tuple[int, int]
    entry: Entry


async def append(tx: Connection, entries: Sequence[Entry]) -> None:
    """Keep *entries*, in order, if and only if *tx* commits."""
    columns = zip(
        *((e.machine, e.subject, e.source, e.target, e.actor, e.at, e.reason, e.fence) for e in entries),
        strict=True,
    )
    if entries:
        await tx.execute(SQL["append"], *map(list, columns))


async def history(
    connection: Connection, machines: Sequence[str], subjects: Sequence[str], *, after: int = 0, limit: int = 1000
) -> list[Noted]:
    """The moves of some subjects, oldest first, beginning after entry number *after*."""
    return [_noted(row) for row in await connection.fetch(SQL["history"], machines, subjects, after, limit)]


async def tail(connection: Connection, after: tuple[int, int], *, limit: int = 1000) -> list[Noted]:
    """What settled transactions noted after position *after*; nothing will ever appear before what is told."""
    return [_noted(row) for row in await connection.fetch(SQL["tail"], str(after[0]), after[1], limit)]


async def end(connection: Connection) -> tuple[int, int]:
    """The position from which `tail` tells only what is yet to come."""
    return int(await connection.fetchval(SQL["end"])), 0


async def prune(tx: Connection, before: datetime, *, limit: int = PRUNE_LIMIT) -> int:
    """Forget up to *limit* entries older than *before*; returns how many."""
    return int(await tx.fetchval(SQL["prune"], before, limit))


def _noted(row) -> Noted:  # type: ignore[no-untyped-def]
    *position, machine, subject, source, target, actor, at, reason, fence = row
    return Noted((int(position[0]), position[1]), Entry(machine, subject, source, target, actor, at, reason, fence))
