"""The SQL statements of ingest, one typed function per statement."""

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
class FileMoveRow:
    """A file that was moved out of an inbox."""

    file_name: str
    moved_to: str
    reason: str
    moved_at: datetime
    run_id: str | None


async def insert_run(tx: Connection, run_id: str, supplier: str, holder: str, now: datetime) -> None:
    """Insert a run that starts."""
    entry = journal.JournalEntry(RUN.name, run_id, None, IngestRunState.RUNNING.value, holder, now)
    numbers = await journal.append(tx, [entry])
    await tx.execute(SQL["insert_run"], run_id, supplier, holder, now, numbers)


async def end_run(tx: Connection, manifest: dict[str, Any], holder: str, now: datetime) -> bool:
    """Record the end of a run; return false if it was recorded before."""
    status = IngestRunState(manifest["status"])
    RUN.check(IngestRunState.RUNNING, status)
    times = (datetime.fromisoformat(manifest[name]) for name in ("started_at", "finished_at"))
    run_id, code = manifest["run_id"], manifest["failure_code"]
    ended = await tx.fetchval(
        SQL["end_run"], run_id, manifest["supplier"], status.value, holder, code, *times, manifest
    )
    if ended is None:
        return False
    entry = journal.JournalEntry(
        RUN.name, run_id, IngestRunState.RUNNING.value, status.value, holder, now, code, manifest["fence"]
    )
    await tx.execute(SQL["append_moves"], run_id, await journal.append(tx, [entry]))
    return True


async def insert_move(
    tx: Connection, supplier: str, run_id: str | None, name: str, to: str, reason: str, now: datetime
) -> None:
    """Insert a file that was moved out of the inbox."""
    await tx.execute(SQL["insert_move"], supplier, run_id, name, to, reason, now)


async def find_running(connection: Connection, supplier: str) -> tuple[str, str, datetime] | None:
    """Return the active run of *supplier*, its process, and its start."""
    row = await connection.fetchrow(SQL["find_running"], supplier)
    return None if row is None else (row["run_id"], row["holder"], row["started_at"])


async def list_runs(
    connection: Connection, supplier: str | None, status: IngestRunState | None, after: Position, limit: int
) -> list[IngestRunRow]:
    """Return runs after a position, newest first."""
    rows = await connection.fetch(SQL["list_runs"], supplier, status and status.value, *after, limit)
    return [_make_run(row) for row in rows]


async def find_run(connection: Connection, run_id: str) -> tuple[IngestRunRow, list[int]] | None:
    """Return a run, and the numbers of its journal entries."""
    row = await connection.fetchrow(SQL["find_run"], run_id)
    return None if row is None else (_make_run(row), row["moves"])


async def list_run_moves(connection: Connection, run_id: str) -> list[FileMoveRow]:
    return [FileMoveRow(**row) for row in await connection.fetch(SQL["list_run_moves"], run_id)]


async def list_moves(connection: Connection, supplier: str, limit: int) -> list[FileMoveRow]:
    """Return the files of a supplier that were moved, newest first."""
    return [FileMoveRow(**row) for row in await connection.fetch(SQL["list_moves"], supplier, limit)]


async def prune(tx: Connection, before: datetime, limit: int) -> int:
    """Delete runs and moves older than *before*, up to *limit* of each; return the number of deleted rows."""
    return int(await tx.fetchval(SQL["prune"], before, limit))


def _make_run(row: Any) -> IngestRunRow:
    values = {name: row[name] for name in IngestRunRow.__slots__}
    return IngestRunRow(**{**values, "status": IngestRunState(row["status"])})
