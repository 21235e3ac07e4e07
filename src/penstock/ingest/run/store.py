"""A typed function per statement of queries.sql."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import RUN
from penstock.kernel.db import sql
from penstock.kernel.db.database import Connection
from penstock.kernel.states import journal

SQL = sql.load("penstock.ingest.run", {"run": RUN})
Position = tuple[datetime, str] | tuple[None, None]
START: Position = (None, None)


@dataclass(frozen=True, slots=True)
class IngestRunRow:
    """A run as it is listed."""

    run_id: str
    supplier: str
    status: IngestRunState
    holder: str
    failure_code: str | None
    started_at: datetime
    finished_at: datetime | None
    manifest: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class MoveRow:
    """A file that went somewhere."""

    file_name: str
    moved_to: str
    why: str
    moved_at: datetime
    run_id: str | None


async def start(tx: Connection, run_id: str, supplier: str, holder: str, now: datetime) -> None:
    """Note that a run begins."""
    entry = journal.JournalEntry(RUN.name, run_id, None, IngestRunState.RUNNING.value, holder, now)
    numbers = await journal.append(tx, [entry])
    await tx.execute(SQL["start"], run_id, supplier, holder, now, numbers)


async def end(tx: Connection, manifest: dict[str, Any], holder: str, now: datetime) -> bool:
    """Note how a run ended; whether that was news."""
    status = IngestRunState(manifest["status"])
    RUN.check(IngestRunState.RUNNING, status)
    moments = (datetime.fromisoformat(manifest[name]) for name in ("started_at", "finished_at"))
    run_id, code = manifest["run_id"], manifest["failure_code"]
    ended = await tx.fetchval(SQL["end"], run_id, manifest["supplier"], status.value, holder, code, *moments, manifest)
    if ended is None:
        return False
    entry = journal.JournalEntry(
        RUN.name, run_id, IngestRunState.RUNNING.value, status.value, holder, now, code, manifest["fence"]
    )
    await tx.execute(SQL["note"], run_id, await journal.append(tx, [entry]))
    return True


async def move(tx: Connection, supplier: str, run_id: str | None, name: str, to: str, why: str, now: datetime) -> None:
    """Note where a file went."""
    await tx.execute(SQL["move"], supplier, run_id, name, to, why, now)


async def running(connection: Connection, supplier: str) -> tuple[str, str, datetime] | None:
    """The run under way for *supplier*, who works on it, and since when."""
    row = await connection.fetchrow(SQL["running"], supplier)
    return None if row is None else (row["run_id"], row["holder"], row["started_at"])


async def runs(
    connection: Connection, supplier: str | None, status: IngestRunState | None, after: Position, limit: int
) -> list[IngestRunRow]:
    """The runs there were, the latest first."""
    rows = await connection.fetch(SQL["runs"], supplier, status and status.value, *after, limit)
    return [_run(row) for row in rows]


async def run(connection: Connection, run_id: str) -> tuple[IngestRunRow, list[int]] | None:
    """One run, and the numbers of what the journal noted of it."""
    row = await connection.fetchrow(SQL["run"], run_id)
    return None if row is None else (_run(row), row["moves"])


async def moves_of_run(connection: Connection, run_id: str) -> list[MoveRow]:
    return [MoveRow(**row) for row in await connection.fetch(SQL["moves_of_run"], run_id)]


async def moves(connection: Connection, supplier: str, limit: int) -> list[MoveRow]:
    """Where the files of a supplier went, the latest first."""
    return [MoveRow(**row) for row in await connection.fetch(SQL["moves"], supplier, limit)]


async def prune(tx: Connection, before: datetime, limit: int) -> int:
    """Forget runs and moves older than *before*, up to *limit* of each; how many."""
    return int(await tx.fetchval(SQL["prune"], before, limit))


def _run(row: Any) -> IngestRunRow:
    known = {name: row[name] for name in IngestRunRow.__slots__}
    return IngestRunRow(**{**known, "status": IngestRunState(row["status"])})
