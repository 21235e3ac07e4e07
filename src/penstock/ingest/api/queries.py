"""The queries of the API: runs and moves from the database, suppliers and states from the tree."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import TypeVar

from penstock.ingest.api import schemas
from penstock.ingest.api.folder import FolderViews
from penstock.ingest.config import IngestSection
from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import (
    CurrentPointer,
    IgnoredEntry,
    SupplierStatus,
    check_supplier_name,
    make_run_not_found_error,
    parse_supplier,
)
from penstock.ingest.run import store
from penstock.ingest.run.store import FileMoveRow, IngestRunRow, Position
from penstock.ingest.state.reader import PublishedState
from penstock.ingest.state.supplier_status import read_supplier_status
from penstock.ingest.tree.port import FileTree
from penstock.kernel.db.database import Database
from penstock.kernel.db.page import Page, make_page
from penstock.kernel.errors import NotFound
from penstock.kernel.states import journal
from penstock.kernel.states.journal import StoredEntry

T = TypeVar("T")
_CHUNK = 1 << 20


class IngestViews:
    """The data behind the API; without a tree only the data of the database."""

    def __init__(self, db: Database, tree: FileTree | None, section: IngestSection) -> None:
        self._db = db
        self._tree = tree
        self._section = section
        self._comparison = asyncio.Lock()

    async def list_suppliers(self) -> list[SupplierStatus]:
        """Return the status of every supplier."""
        return await asyncio.to_thread(self._read_statuses) if self._tree is not None else []

    async def list_strays(self) -> list[IgnoredEntry]:
        """Return the entries beside the inboxes, which belong to no supplier."""
        return await asyncio.to_thread(self._tree.list_ignored) if self._tree is not None else []

    async def read(self, query: Callable[[FolderViews], T]) -> T:
        """Return the result of *query* on the tree; NotFound NO_ROOT if the server has no tree."""
        if self._tree is None:
            raise NotFound("NO_ROOT", "this server has no folder of suppliers", hint="set ingest.root on the server")
        return await asyncio.to_thread(query, FolderViews(self._tree, self._section, self._db.clock))

    async def compare_runs(self, supplier: str, before: str | None, after: str | None, limit: int) -> schemas.StateDiff:
        """I10, I21: compare two runs; one comparison at a time, because each reads two states."""
        async with self._comparison:
            return await self.read(lambda folder: folder.diff(supplier, before, after, limit))

    async def list_moves(self, supplier: str, limit: int) -> list[FileMoveRow]:
        """Return the files of a supplier that were moved out of the inbox, newest first."""
        async with self._db.connection() as connection:
            return await store.list_moves(connection, check_supplier_name(supplier), limit)

    async def list_runs(
        self, supplier: str | None, status: IngestRunState | None, after: Position, limit: int
    ) -> Page[IngestRunRow]:
        """Return runs after a position, newest first."""
        if supplier is not None:
            check_supplier_name(supplier)
        async with self._db.connection() as connection:
            rows = await store.list_runs(connection, supplier, status, after, limit + 1)
        return make_page(rows, limit, lambda row: [row.started_at, row.run_id])

    async def read_run(self, run_id: str) -> tuple[IngestRunRow, list[FileMoveRow], list[StoredEntry]]:
        """Return a run, the files that it moved, and its history."""
        parse_supplier(run_id)
        async with self._db.connection() as connection:
            run = await store.find_run(connection, run_id)
            if run is None:
                raise make_run_not_found_error(run_id)
            row, numbers = run
            moves = await store.list_run_moves(connection, run_id)
            return row, moves, await journal.read_history(connection, numbers, [run_id])

    async def read_facts(self, supplier: str) -> "tuple[CurrentPointer, AsyncIterator[bytes]]":
        """Return the pointer to the published state after its hash is verified, and the facts of that state."""
        stack = ExitStack()
        state = await self.read(lambda folder: stack.enter_context(folder.open_state(supplier)))
        return state.pointer, _read_chunks(state, stack)

    def _read_statuses(self) -> list[SupplierStatus]:
        tree, section, now = self._tree, self._section.alerts, self._db.clock.now()
        if tree is None:
            return []
        return [read_supplier_status(tree, supplier, section, now) for supplier in tree.list_suppliers()]


async def _read_chunks(state: PublishedState, stack: ExitStack) -> AsyncIterator[bytes]:
    try:
        while chunk := await asyncio.to_thread(state.content.read, _CHUNK):
            yield chunk
    finally:
        stack.close()
