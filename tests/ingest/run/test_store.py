"""What the database is told of runs, and what becomes of a run when the database is away."""

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


async def test_the_table_knows_the_machines_states(db: Database) -> None:
    """The CHECK of the status column allows just the states the machine declares."""
    definition = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' AND conname = $1"
    await db.execute(f"CREATE TABLE twin (status text CONSTRAINT twin CHECK ({RUN.sql_check('status')}))")
    assert await db.fetchval(definition, "ingest_run_status_check") == await db.fetchval(definition, "twin")


async def test_runs_and_moves_are_recorded(harness: IngestHarness, place: IngestWorkspace, views: IngestViews) -> None:
    """I4, I8: each run with its manifest and history, each file with where it went and why."""
    harness.drop(ONE, "one.csv")
    first = run(place).manifest
    harness.drop(ONE, "again.csv")
    harness.drop(THREE, "older.csv")
    harness.drop(TWO, "two.csv")
    second = run(place).manifest
    harness.drop(BROKEN, "broken.csv")
    third = run(place).manifest
    assert first is not None
    assert second is not None
    assert third is not None
    found = await views.runs(SUPPLIER, None, store.START, 10)
    assert [(item.run_id, item.status) for item in found.items] == [
        (third.run_id, IngestRunState.FAIL),
        (second.run_id, IngestRunState.PASS),
        (first.run_id, IngestRunState.PASS),
    ]
    assert [item.run_id for item in (await views.runs(None, IngestRunState.FAIL, store.START, 10)).items] == [
        third.run_id
    ]
    row, moved, history = await views.run(third.run_id)
    assert row.manifest == harness.read_json(paths.run(third.run_id, paths.MANIFEST))
    assert (row.failure_code, row.finished_at) == ("DQ_TOO_MANY_BAD_ROWS", third.finished_at)
    assert [(one.file_name, one.moved_to, one.reason) for one in moved] == [
        ("broken.csv", f"{paths.broken(SUPPLIER)}/broken.csv", "DQ_TOO_MANY_BAD_ROWS")
    ]
    assert [(one.entry.source, one.entry.target, one.entry.reason) for one in history] == [
        (None, "RUNNING", None),
        ("RUNNING", "FAIL", "DQ_TOO_MANY_BAD_ROWS"),
    ]
    everything = await views.moves(SUPPLIER, 10)
    assert [(one.file_name, one.reason, one.run_id) for one in reversed(everything)] == [
        ("one.csv", "published", first.run_id),
        ("again.csv", "accepted before", None),
        ("older.csv", "a newer file is in the inbox", None),
        ("two.csv", "published", second.run_id),
        ("broken.csv", "DQ_TOO_MANY_BAD_ROWS", third.run_id),
    ]


@contextmanager
def without_flock() -> Iterator[None]:
    """As on a disk shared by hosts whose locks do not know of each other."""

    @contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    with mock.patch.object(FolderTree, "lock", nothing):
        yield


def test_two_hosts_take_turns(harness: IngestHarness, place: IngestWorkspace, configured: Settings) -> None:
    """I4: where several hosts share the tree the database lets one at a time; the other is told who works."""
    harness.drop(ONE)
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(WAIT)

    with without_flock(), ThreadPoolExecutor(1) as pool, open_ingest_workspace(configured, uses_database=True) as other:
        first = pool.submit(run, place, call_at(PublishStep.PROCESSED, wait))
        assert started.wait(WAIT)
        with pytest.raises(Conflict, match=r"supplier acme is locked by ingest.* \(run acme_") as told:
            run(other)
        assert (told.value.code, told.value.exit_code) == ("LOCKED", 6)
        go_on.set()
        assert first.result(WAIT).is_pass
        assert run(other).reason == "the inbox is empty"


def cut_off(url: str) -> None:
    """End every connection to a database, as a failover does."""

    async def cut() -> None:
        connection = await asyncpg.connect(url)
        try:
            query = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> "
            )
            await connection.execute(query + "pg_backend_pid()")
        finally:
            await connection.close()

    asyncio.run(cut())


def test_connections_that_are_cut_do_no_harm(harness: IngestHarness, place: IngestWorkspace, database_url: str) -> None:
    """I16: a failover in mid-run ends the run or does not; in the end all is published and recorded."""
    harness.drop(ONE)
    with suppress(Transient):
        run(place, call_at(PublishStep.PROCESSED, lambda: cut_off(database_url)))
    assert run(place).is_pass
    assert [fact["payload"]["price"] for fact in harness.facts()] == [1, 2]

    async def recorded() -> list[str]:
        async with Database.open(database_url) as db, db.connection() as connection:
            return [
                one.run_id for one in await store.list_runs(connection, SUPPLIER, IngestRunState.PASS, store.START, 10)
            ]

    assert asyncio.run(recorded()) == [harness.current()]


@pytest.mark.parametrize(
    ("step", "ended"),
    [
        (PublishStep.RECOVERED, None),
        (PublishStep.PROCESSED, "PASS"),
        (PublishStep.RECORDED, "PASS"),
        (PublishStep.ACCEPTED, "PASS"),
    ],
)
async def test_the_database_goes_away_in_mid_run(
    harness: IngestHarness,
    place: IngestWorkspace,
    views: IngestViews,
    db: Database,
    step: PublishStep,
    ended: str | None,
) -> None:
    """I16: the run ends with what may work later (7); what it published stands, and the next run records it."""
    harness.drop(ONE)

    def refuse(*_: Any) -> None:
        raise Transient("DATABASE_DOWN", "it went away", hint="try again")

    is_away = threading.Event()
    recorded = ("insert_run", "insert_move", "end_run")
    with mock.patch.multiple(store, **{name: _unless(is_away, getattr(store, name), refuse) for name in recorded}):
        with pytest.raises(Transient) as told:
            run(place, call_at(step, is_away.set))
        assert told.value.exit_code == 7
        is_away.clear()
        unrecorded = ledger.load(harness.tree, SUPPLIER).running
        assert unrecorded is not None
        again = run(place)
    row, _, _ = await views.run(unrecorded)
    if ended is None:  # it was never begun, so its file is taken by the next
        assert (row.status, row.failure_code) == (IngestRunState.FAIL, "INTERRUPTED")
        assert again.manifest is not None
        assert harness.current() == again.manifest.run_id
    else:
        assert row.status.value == ended
        assert harness.current() == unrecorded
        assert again.manifest is None
    assert harness.names(paths.inbox(SUPPLIER)) == []
    assert [fact["payload"]["price"] for fact in harness.facts()] == [1, 2]


def _unless(is_away: threading.Event, works: Any, refuses: Callable[..., None]) -> Any:
    async def call(*args: Any) -> Any:
        if is_away.is_set():
            refuses()
        return await works(*args)

    return call


def test_a_database_that_is_away_is_told(harness: IngestHarness, tmp_path: Path) -> None:
    """Exit code 7 and a sentence; nothing was touched."""
    harness.drop(ONE)
    config = f"ingest: {{root: {harness.root}}}\ndatabase: {{url: 'postgresql://nobody@127.0.0.1:1/none'}}\n"
    (tmp_path / "penstock.yaml").write_text(config)
    done = penstock("ingest", "run", SUPPLIER, cwd=tmp_path)
    assert (done.code, done.out) == (7, "")
    assert done.err.startswith("error: ")
    assert "hint: " in done.err
    assert harness.names(paths.inbox(SUPPLIER)) == ["price.csv"]


def test_a_named_root_needs_no_database(harness: IngestHarness, tmp_path: Path) -> None:
    """A folder is enough: with --root the database is not asked."""
    harness.drop(ONE)
    (tmp_path / "penstock.yaml").write_text("database: {url: 'postgresql://nobody@127.0.0.1:1/none'}\n")
    assert penstock("ingest", "run", SUPPLIER, "--root", "root", cwd=tmp_path).code == 0


async def test_an_end_that_is_told_twice_counts_once(
    harness: IngestHarness, place: IngestWorkspace, db: Database
) -> None:
    """I16: what has ended stays as it is, whoever tells it again."""
    harness.drop(ONE)
    manifest = run(place).manifest
    assert manifest is not None
    async with db.transaction() as tx:
        other = {**manifest.as_dict(), "status": "FAIL", "failure_code": "INTERRUPTED"}
        assert not await store.end_run(tx, other, "another", db.clock.now())
    async with db.connection() as connection:
        found = await store.find_run(connection, manifest.run_id)
    assert found is not None
    assert (found[0].status, len(found[1])) == (IngestRunState.PASS, 2)
    assert failure(run(place)) is None
