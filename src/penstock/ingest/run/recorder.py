"""What the database is told of runs, from the blocking code that runs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.ingest.run import store
from penstock.ingest.tree.async_bridge import AsyncBridge
from penstock.kernel.db.database import Database
from penstock.kernel.db.locks import try_advisory_lock
from penstock.kernel.errors import Conflict


class DatabaseRecorder:
    """Writes down what happens, each thing in a transaction of its own."""

    def __init__(self, bridge: AsyncBridge, db: Database, holder: str) -> None:
        self._bridge = bridge
        self._db = db
        self._holder = holder

    def started(self, run_id: str, supplier: str) -> None:
        async def write() -> None:
            async with self._db.transaction() as tx:
                await store.start(tx, run_id, supplier, self._holder, self._db.clock.now())

        self._bridge.call(write())

    def moved(self, supplier: str, run_id: str | None, name: str, to: str, why: str) -> None:
        async def write() -> None:
            async with self._db.transaction() as tx:
                await store.move(tx, supplier, run_id, name, to, why, self._db.clock.now())

        self._bridge.call(write())

    def ended(self, manifest: dict[str, Any]) -> None:
        async def write() -> None:
            async with self._db.transaction() as tx:
                await store.end(tx, manifest, self._holder, self._db.clock.now())

        self._bridge.call(write())

    @contextmanager
    def lock(self, root: str, supplier: str) -> Iterator[None]:
        """I4: alone among all hosts that share the tree; Conflict LOCKED, naming who holds it."""
        name = f"penstock.ingest {root} {supplier}"
        with (
            self._bridge.entered(self._db.session()) as connection,
            self._bridge.entered(try_advisory_lock(connection, name)) as is_ours,
        ):
            if not is_ours:
                raise self._locked(supplier)
            yield

    def _locked(self, supplier: str) -> Conflict:
        async def ask() -> tuple[str, str, Any] | None:
            async with self._db.connection() as connection:
                return await store.running(connection, supplier)

        known = self._bridge.call(ask())
        who = f"{known[1]} (run {known[0]}, since {known[2].isoformat()})" if known else "another host"
        hint = "wait for it to end, or stop it"
        return Conflict(
            "LOCKED", f"supplier {supplier} is locked by {who}", hint=hint, holder=known[1] if known else None
        )
