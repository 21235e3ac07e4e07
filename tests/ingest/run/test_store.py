"""The record of runs in the database, and runs while the database is down."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import asyncpg
import pytest

from penstock.app.platform import open_ingest_workspace
from penstock.ingest.api.queries import IngestViews
from penstock.ingest.contract import IngestRunState
from penstock.ingest.model import RUN
from penstock.ingest.run import ledger, store
from penstock.ingest.run.publish import PublishStep
from penstock.ingest.tree import paths
from penstock.ingest.tree.folder import FolderTree
from penstock.ingest.workspace import IngestWorkspace
from penstock.kernel.db.database import Database
from penstock.kernel.errors import Conflict, Transient
from penstock.settings import Settings
from tests.ingest.harness import SUPPLIER, IngestHarness, failure, run, snapshot
from tests.support.crash import call_at
from tests.support.processes import penstock

ONE, TWO, THREE = (snapshot({"A": price, "B": 2}) for price in (1, 2, 3))
BROKEN = snapshot({"A": "none"})
WAIT = 30


async def test_status_column_allows_the_states_of_the_machine(db: Database) -> None:
    """The CHECK of the status column allows exactly the states of the machine."""
    definition = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conname = $1"
    await db.execute(f"CREATE TABLE twin (status text CONSTRAINT twin CHECK ({RUN.format_sql_check('status')}))")
    assert await db.fetchval(definition, "ingest_run_status_check") == await db.fetchval(definition, "twin")


async def test_runs_and_moves_are_recorded(
    harness: IngestHarness, workspace: IngestWorkspace, views: IngestViews
) -> None:
    """I4, I8: each run is recorded with its manifest and history, each moved file with its target and the reason."""
    harness.drop(ONE, "one.csv")
    first = run(workspace).manifest
    harness.drop(ONE, "again.csv")
    harness.drop(THREE, "older.csv")
    harness.drop(TWO, "two.csv")
    second = run(workspace).manifest
    harness.drop(BROKEN, "broken.csv")
    third = run(workspace).manifest
    assert first is not None
    assert second is not None
    assert third is not None
    runs = await views.list_runs(SUPPLIER, None, store.START, 10)
    assert [(item.run_id, item.status) for item in runs.items] == [
        (third.run_id, IngestRunState.FAIL),
        (second.run_id, IngestRunState.PASS),
        (first.run_id, IngestRunState.PASS),
    ]
    assert [item.run_id for item in (await views.list_runs(None, IngestRunState.FAIL, store.START, 10)).items] == [
        third.run_id
    ]
    row, moves, history = await views.read_run(third.run_id)
    assert row.manifest == harness.read_json(paths.make_run_path(third.run_id, paths.MANIFEST))
    assert (row.failure_code, row.finished_at) == ("DQ_TOO_MANY_BAD_ROWS", third.finished_at)
    assert [(move.file_name, move.moved_to, move.reason) for move in moves] == [
        ("broken.csv", f"{paths.make_broken_path(SUPPLIER)}/broken.csv", "DQ_TOO_MANY_BAD_ROWS")
    ]
    assert [(stored.entry.source, stored.entry.target, stored.entry.reason) for stored in history] == [
        (None, "RUNNING", None),
        ("RUNNING", "FAIL", "DQ_TOO_MANY_BAD_ROWS"),
    ]
    all_moves = await views.list_moves(SUPPLIER, 10)
    assert [(move.file_name, move.reason, move.run_id) for move in reversed(all_moves)] == [
        ("one.csv", "published", first.run_id),
        ("again.csv", "accepted before", None),
        ("older.csv", "a newer file is in the inbox", None),
        ("two.csv", "published", second.run_id),
        ("broken.csv", "DQ_TOO_MANY_BAD_ROWS", third.run_id),
    ]


@contextmanager
def disable_flock() -> Iterator[None]:
    """Disable the lock of the tree, as on a disk that hosts share without common locks."""

    @contextmanager
    def lock_nothing(*_: object) -> Iterator[None]:
        yield

    with mock.patch.object(FolderTree, "lock", lock_nothing):
        yield


def test_two_hosts_take_turns(harness: IngestHarness, workspace: IngestWorkspace, configured: Settings) -> None:
    """I4: of the hosts that share a tree one runs at a time; the other gets LOCKED with the owner."""
    harness.drop(ONE)
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(WAIT)

    with disable_flock(), ThreadPoolExecutor(1) as pool, open_ingest_workspace(configured, uses_database=True) as other:
        first = pool.submit(run, workspace, call_at(PublishStep.PROCESSED, wait))
        assert started.wait(WAIT)
        with pytest.raises(Conflict, match=r"supplier acme is locked by ingest.* \(run acme_") as refused:
            run(other)
        assert (refused.value.code, refused.value.exit_code) == ("LOCKED", 6)
        go_on.set()
        assert first.result(WAIT).is_pass
        assert run(other).reason == "the inbox is empty"


def end_connections(url: str) -> None:
    """End every connection to a database, as a failover does."""

    async def terminate() -> None:
        connection = await asyncpg.connect(url)
        try:
            query = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
            )
            await connection.execute(query + "pg_backend_pid()")
        finally:
            await connection.close()

    asyncio.run(terminate())


def test_failover_of_the_database_loses_nothing(
    harness: IngestHarness, workspace: IngestWorkspace, database_url: str
) -> None:
    """I16: a failover may end a run; after the next run, the file is published and recorded."""
    harness.drop(ONE)
    with suppress(Transient):
        run(workspace, call_at(PublishStep.PROCESSED, lambda: end_connections(database_url)))
    assert run(workspace).is_pass
    assert [fact["payload"]["price"] for fact in harness.facts()] == [1, 2]

    async def list_recorded() -> list[str]:
        async with Database.open(database_url) as db, db.connection() as connection:
            runs = await store.list_runs(connection, SUPPLIER, IngestRunState.PASS, store.START, 10)
            return [run.run_id for run in runs]

    assert asyncio.run(list_recorded()) == [harness.current()]


@pytest.mark.parametrize(
    ("step", "status"),
    [
        (PublishStep.RECOVERED, None),
        (PublishStep.PROCESSED, "PASS"),
        (PublishStep.RECORDED, "PASS"),
        (PublishStep.ACCEPTED, "PASS"),
    ],
)
async def test_database_that_goes_down_during_a_run(
    harness: IngestHarness,
    workspace: IngestWorkspace,
    views: IngestViews,
    db: Database,
    step: PublishStep,
    status: str | None,
) -> None:
    """I16: the run ends with exit code 7; a published state stays, and the next run records it."""
    harness.drop(ONE)

    def refuse(*_: Any) -> None:
        raise Transient("DATABASE_DOWN", "the connection is lost", hint="try again")

    is_down = threading.Event()
    writes = ("insert_run", "insert_move", "end_run")
    with mock.patch.multiple(store, **{name: _refuse_if(is_down, getattr(store, name), refuse) for name in writes}):
        with pytest.raises(Transient) as refused:
            run(workspace, call_at(step, is_down.set))
        assert refused.value.exit_code == 7
        is_down.clear()
        unrecorded = ledger.load(harness.tree, SUPPLIER).running
        assert unrecorded is not None
        again = run(workspace)
    row, _, _ = await views.read_run(unrecorded)
    if status is None:  # the run was not started, so the next run takes the file
        assert (row.status, row.failure_code) == (IngestRunState.FAIL, "INTERRUPTED")
        assert again.manifest is not None
        assert harness.current() == again.manifest.run_id
    else:
        assert row.status.value == status
        assert harness.current() == unrecorded
        assert again.manifest is None
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == []
    assert [fact["payload"]["price"] for fact in harness.facts()] == [1, 2]


def _refuse_if(is_down: threading.Event, call: Any, refuse: Callable[..., None]) -> Any:
    async def guarded(*args: Any) -> Any:
        if is_down.is_set():
            refuse()
        return await call(*args)

    return guarded


def test_unreachable_database_is_an_error(harness: IngestHarness, tmp_path: Path) -> None:
    """Exit code 7 with an error and a hint; no file is touched."""
    harness.drop(ONE)
    config = f"ingest: {{root: {harness.root}}}\ndatabase: {{url: 'postgresql://user@127.0.0.1:1/none'}}\n"
    (tmp_path / "penstock.yaml").write_text(config)
    result = penstock("ingest", "run", SUPPLIER, cwd=tmp_path)
    assert (result.code, result.out) == (7, "")
    assert result.err.startswith("error: ")
    assert "hint: " in result.err
    assert harness.names(paths.make_inbox_path(SUPPLIER)) == ["price.csv"]


def test_root_option_needs_no_database(harness: IngestHarness, tmp_path: Path) -> None:
    """With --root the database is not used."""
    harness.drop(ONE)
    (tmp_path / "penstock.yaml").write_text("database: {url: 'postgresql://user@127.0.0.1:1/none'}\n")
    assert penstock("ingest", "run", SUPPLIER, "--root", "root", cwd=tmp_path).code == 0


async def test_end_of_a_run_is_recorded_once(harness: IngestHarness, workspace: IngestWorkspace, db: Database) -> None:
    """I16: a second end of a run changes nothing."""
    harness.drop(ONE)
    manifest = run(workspace).manifest
    assert manifest is not None
    async with db.transaction() as tx:
        other = {**manifest.as_dict(), "status": "FAIL", "failure_code": "INTERRUPTED"}
        assert not await store.end_run(tx, other, "another", db.clock.now())
    async with db.connection() as connection:
        stored = await store.find_run(connection, manifest.run_id)
    assert stored is not None
    assert (stored[0].status, len(stored[1])) == (IngestRunState.PASS, 2)
    assert failure(run(workspace)) is None
