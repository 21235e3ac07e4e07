"""The record of runs in the database, written from the blocking code of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.ingest.run import store
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import try_advisory_lock
from penstock.kernel.errors import Conflict
from penstock.kernel.text import format_time


class DatabaseRecorder:
    """A recorder that writes each event in a transaction of its own."""

    def __init__(self, bridge: AsyncBridge, db: Database, holder: str) -> None:
        self._bridge = bridge
        self._db = db
        self._holder = holder

    def record_start(self, run_id: str, supplier: str) -> None:
        async def write() -> None:
            async with self._db.transaction() as tx:
                await store.insert_run(tx, run_id, supplier, self._holder, self._db.clock.now())

        self._bridge.call(write())

    def record_move(self, supplier: str, run_id: str | None, name: str, to: str, reason: str) -> None:
        async def write() -> None:
            async with self._db.transaction() as tx:
                await store.insert_move(tx, supplier, run_id, name, to, reason, self._db.clock.now())

        self._bridge.call(write())

    def record_end(self, manifest: dict[str, Any]) -> None:
        async def write() -> None:
            async with self._db.transaction() as tx:
                await store.end_run(tx, manifest, self._holder, self._db.clock.now())

        self._bridge.call(write())

    @contextmanager
    def lock(self, root: str, supplier: str) -> Iterator[None]:
        """I4: lock *supplier* among all hosts that share the tree; Conflict LOCKED names the owner of the lock."""
        name = f"penstock.ingest {root} {supplier}"
        with (
            self._bridge.enter(self._db.session()) as connection,
            self._bridge.enter(try_advisory_lock(connection, name)) as is_locked,
        ):
            if not is_locked:
                raise self._make_locked_error(supplier)
            yield

    def _make_locked_error(self, supplier: str) -> Conflict:
        async def find_running() -> tuple[str, str, Any] | None:
            async with self._db.connection() as connection:
                return await store.find_running(connection, supplier)

        running = self._bridge.call(find_running())
        if running is None:
            owner, holder = "another host", None
        else:
            run_id, holder, started_at = running
            owner = f"{holder} (run {run_id}, since {format_time(started_at)})"
        hint = "wait until that run ends, or stop it"
        return Conflict("LOCKED", f"supplier {supplier} is locked by {owner}", hint=hint, holder=holder)
