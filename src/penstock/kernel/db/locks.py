"""One at a time: between processes of one machine by a file, between machines by PostgreSQL."""

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


def advisory_key(name: str) -> int:
    """The number PostgreSQL knows the lock *name* by."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)


@asynccontextmanager
async def advisory_lock(connection: Connection, name: str, *, timeout: float | None = None) -> AsyncIterator[None]:
    """Hold *name* on a connection of `session`, waiting for it as long as its time-out; its loss frees it."""
    key = advisory_key(name)
    await connection.execute("SELECT pg_advisory_lock($1)", key, timeout=timeout)
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", key)


@asynccontextmanager
async def try_advisory_lock(connection: Connection, name: str) -> AsyncIterator[bool]:
    """Hold *name* if nobody does; yields whether it is held."""
    key = advisory_key(name)
    held = bool(await connection.fetchval("SELECT pg_try_advisory_lock($1)", key))
    try:
        yield held
    finally:
        if held and not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", key)


async def acquire_transaction_lock(tx: Connection, name: str) -> None:
    """Hold *name* until the end of the transaction, waiting for whoever holds it."""
    await tx.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name))


@contextmanager
def file_lock(path: Path, holder: str, clock: Clock | None = None, what: str | None = None) -> Iterator[None]:
    """Hold *path* for this process; Conflict LOCKED, naming who holds *what*, when another does. Death frees it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _locked(path, what or str(path.parent)) from None
        note = {"holder": holder, "pid": os.getpid(), "since": (clock or SystemClock()).now().isoformat()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, orjson.dumps(note), 0)
        yield
    finally:
        # The file stays: removing it would let two processes each hold a lock of that name.
        os.close(descriptor)


def _locked(path: Path, what: str) -> Conflict:
    note: object = None
    with contextlib.suppress(OSError, orjson.JSONDecodeError):
        note = orjson.loads(path.read_bytes())
    known = note if isinstance(note, dict) else {}  # somebody else may have written the file
    holder, pid, since = (known.get(name, "unknown") for name in ("holder", "pid", "since"))
    who = f"{holder} (pid {pid}, since {since})"
    hint = "wait for it to end, or stop it"
    return Conflict("LOCKED", f"{what} is locked by {who}", hint=hint, holder=holder, pid=pid, since=since)
