"""What can be seen of ingest: runs and moves from the database, suppliers and states from the tree."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import TypeVar

from penstock.ingest.api import schemas
from penstock.ingest.api.folder import FolderViews
from penstock.ingest.config import IngestSection
from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import CurrentPointer, SupplierStatus, checked_supplier, no_run, supplier_of
from penstock.ingest.run import store
from penstock.ingest.run.store import IngestRunRow, MoveRow, Position
from penstock.ingest.state.reader import PublishedState
from penstock.ingest.state.supplier_status import standing
from penstock.ingest.tree.port import FileTree
from penstock.kernel.db.database import Database
from penstock.kernel.db.page import Page, make_page
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
        self._comparison = asyncio.Lock()

    async def suppliers(self) -> list[SupplierStatus]:
        """Where every supplier stands."""
        if self._tree is None:
            return []
        tree = self._tree
        return await asyncio.to_thread(lambda: [self._standing(tree, supplier) for supplier in tree.list_suppliers()])

    async def read(self, query: Callable[[FolderViews], T]) -> T:
        """Return the result of *query* on the tree; NotFound NO_ROOT if the server has no tree."""
        if self._tree is None:
            raise NotFound("NO_ROOT", "this server has no folder of suppliers", hint="set ingest.root on the server")
        return await asyncio.to_thread(query, FolderViews(self._tree, self._section, self._db.clock))

    async def diff(self, supplier: str, before: str | None, after: str | None, limit: int) -> schemas.StateDiff:
        """I10, I21: compare two runs; one comparison at a time, because each reads two states."""
        async with self._comparison:
            return await self.read(lambda folder: folder.diff(supplier, before, after, limit))

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
        return make_page(rows, limit, lambda row: [row.started_at, row.run_id])

    async def run(self, run_id: str) -> tuple[IngestRunRow, list[MoveRow], list[StoredEntry]]:
        """A run, the files it moved, and its history."""
        supplier_of(run_id)
        async with self._db.connection() as connection:
            found = await store.run(connection, run_id)
            if found is None:
                raise no_run(run_id)
            row, numbers = found
            moves = await store.moves_of_run(connection, run_id)
            return row, moves, await journal.read_history(connection, numbers, [run_id])

    async def facts(self, supplier: str) -> "tuple[CurrentPointer, AsyncIterator[bytes]]":
        """The current state, its hash verified, and its facts in pieces; all of that one state."""
        stack = ExitStack()
        state = await self.read(lambda folder: stack.enter_context(folder.open_state(supplier)))
        return state.pointer, _pieces(state, stack)

    def _standing(self, tree: FileTree, name: str) -> SupplierStatus:
        return standing(tree, name, self._section.alerts, self._db.clock.now())


async def _pieces(state: PublishedState, stack: ExitStack) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(state.content.read, _PIECE):
            yield piece
    finally:
        stack.close()
