"""What can be seen of ingest: runs and moves from the database, suppliers and states from the tree."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from itertools import islice
from typing import Any, TypeVar

from penstock.ingest.config import IngestSection
from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import CurrentPointer, SupplierStatus, checked_supplier, no_run, no_supplier, supplier_of
from penstock.ingest.run import store
from penstock.ingest.run.store import IngestRunRow, MoveRow, Position
from penstock.ingest.state import reader
from penstock.ingest.state.reader import PublishedState
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.tree.port import FileTree
from penstock.kernel.db.database import Database
from penstock.kernel.db.page import Page, page
from penstock.kernel.errors import NotFound
from penstock.kernel.states import journal
from penstock.kernel.states.journal import StoredEntry

T = TypeVar("T")
_PIECE = 1 << 20


class IngestViews:
    """Ingest as it is seen through the API; without a tree only what the database knows."""

    def __init__(self, db: Database, tree: FileTree | None, section: IngestSection) -> None:
        self._db = db
        self._tree = tree
        self._section = section

    async def suppliers(self) -> list[SupplierStatus]:
        """Where every supplier stands."""
        if self._tree is None:
            return []
        tree = self._tree
        return await asyncio.to_thread(lambda: [self._standing(tree, supplier) for supplier in tree.suppliers()])

    async def supplier(self, name: str) -> SupplierStatus:
        """Where one stands; NotFound when nobody has that name."""
        checked_supplier(name)

        def look(tree: FileTree) -> SupplierStatus:
            if name not in (known := tree.suppliers()):
                raise no_supplier(name, known)
            return self._standing(tree, name)

        return await self._in_tree(look)

    async def moves(self, supplier: str, limit: int) -> list[MoveRow]:
        async with self._db.connection() as connection:
            return await store.moves(connection, checked_supplier(supplier), limit)

    async def runs(
        self, supplier: str | None, status: IngestRunState | None, after: Position, limit: int
    ) -> Page[IngestRunRow]:
        if supplier is not None:
            checked_supplier(supplier)
        async with self._db.connection() as connection:
            rows = await store.runs(connection, supplier, status, after, limit + 1)
        return page(rows, limit, lambda row: [row.started_at, row.run_id])

    async def run(self, run_id: str) -> tuple[IngestRunRow, list[MoveRow], list[StoredEntry]]:
        """A run, the files it moved, and its history."""
        supplier_of(run_id)
        async with self._db.connection() as connection:
            found = await store.run(connection, run_id)
            if found is None:
                raise no_run(run_id)
            row, numbers = found
            moves = await store.moves_of_run(connection, run_id)
            return row, moves, await journal.history(connection, numbers, [run_id])

    async def bad_rows(self, run_id: str, limit: int) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
        """The manifest and the stats of a run, and its first bad rows."""

        def look(tree: FileTree) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
            manifest = reader.manifest_of(tree, run_id)
            return manifest, reader.stats_of(tree, run_id), list(islice(reader.bad_rows(tree, run_id), limit))

        return await self._in_tree(look)

    async def state(self, supplier: str) -> tuple[CurrentPointer, dict[str, Any]]:
        """Which state is current, and the manifest of its run."""

        def look(tree: FileTree) -> tuple[CurrentPointer, dict[str, Any]]:
            pointer = reader.current(tree, supplier)
            return pointer, reader.manifest_of(tree, pointer.run_id)

        return await self._in_tree(look)

    async def facts(self, supplier: str) -> "tuple[CurrentPointer, AsyncIterator[bytes]]":
        """The current state, its hash verified, and its facts in pieces; all of that one state."""
        stack = ExitStack()
        state = await self._in_tree(lambda tree: stack.enter_context(reader.open_state(tree, supplier)))
        return state.pointer, _pieces(state, stack)

    def _standing(self, tree: FileTree, name: str) -> SupplierStatus:
        return standing(tree, name, self._section.alerts, self._db.clock.now())

    async def _in_tree(self, look: Callable[[FileTree], T]) -> T:
        if self._tree is None:
            raise NotFound("NO_ROOT", "this Penstock has no tree of suppliers", hint="set ingest.root")
        return await asyncio.to_thread(look, self._tree)


async def _pieces(state: PublishedState, stack: ExitStack) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(state.content.read, _PIECE):
            yield piece
    finally:
        stack.close()
