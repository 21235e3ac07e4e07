"""Locks: between processes of one machine by a file, between machines by PostgreSQL."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import orjson

from penstock.kernel.clock import Clock, SystemClock
from penstock.kernel.db.database import Connection
from penstock.kernel.errors import Conflict


def compute_advisory_key(name: str) -> int:
    """Return the number of the advisory lock *name* in PostgreSQL."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)


@asynccontextmanager
async def hold_advisory_lock(connection: Connection, name: str, *, timeout: float | None = None) -> AsyncIterator[None]:
    """Lock *name* on a connection of `Database.session`, waiting up to *timeout*; a lost connection releases it."""
    key = compute_advisory_key(name)
    await connection.execute("SELECT pg_advisory_lock($1)", key, timeout=timeout)
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", key)


@asynccontextmanager
async def try_advisory_lock(connection: Connection, name: str) -> AsyncIterator[bool]:
    """Lock *name* unless another session has locked it; yield whether it was locked."""
    key = compute_advisory_key(name)
    is_locked = bool(await connection.fetchval("SELECT pg_try_advisory_lock($1)", key))
    try:
        yield is_locked
    finally:
        if is_locked and not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", key)


async def acquire_transaction_lock(tx: Connection, name: str) -> None:
    """Lock *name* until the end of the transaction, waiting for other sessions that have locked it."""
    await tx.execute("SELECT pg_advisory_xact_lock($1)", compute_advisory_key(name))


@contextmanager
def hold_file_lock(path: Path, holder: str, clock: Clock | None = None, subject: str | None = None) -> Iterator[None]:
    """Lock *path* for this process; Conflict LOCKED, naming *subject* and its holder, if another process has locked it.

    The lock is released when the process dies.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _make_locked_error(path, subject or str(path.parent)) from None
        note = {"holder": holder, "pid": os.getpid(), "since": f"{(clock or SystemClock()).now():%Y-%m-%dT%H:%M:%SZ}"}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, orjson.dumps(note), 0)
        yield
    finally:
        # The file is not removed: otherwise two processes could lock two files of the same name.
        os.close(descriptor)


def _make_locked_error(path: Path, subject: str) -> Conflict:
    note: object = None
    with contextlib.suppress(OSError, orjson.JSONDecodeError):
        note = orjson.loads(path.read_bytes())
    fields = note if isinstance(note, dict) else {}  # another program may have written the file
    holder, pid, since = (fields.get(name, "unknown") for name in ("holder", "pid", "since"))
    message = f"{subject} is locked by {holder} (pid {pid}, since {since})"
    hint = "wait until that process ends, or stop it"
    return Conflict("LOCKED", message, hint=hint, holder=holder, pid=pid, since=since)
