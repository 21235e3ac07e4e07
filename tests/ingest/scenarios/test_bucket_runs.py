"""Runs on a bucket: publications by one machine, and by two machines, paused machines and killed machines."""

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.ingest.contract import FailureCode, IngestRunStatus
from penstock.ingest.model import CurrentPointer, RunManifest
from penstock.ingest.run import publish
from penstock.ingest.run.hooks import RunHooks, RunOutcome
from penstock.ingest.run.publish import OnStep, PublishStep
from penstock.ingest.run.run import Ingestion
from penstock.ingest.tree import paths
from penstock.ingest.tree.port import STRAY_FILE, STRAY_FOLDER, FileTree
from penstock.kernel.errors import Conflict
from penstock.kernel.storage import ObjectInfo, Storage, StoredObject
from tests.ingest.tree_backends import SUPPLIER, BucketBackend, drop, s3_backend, stored_backend, stored_paths
from tests.services.s3 import S3Bucket, open_s3_bucket
from tests.support.crash import Killed

CONFIG = b"""
min_fact_count: 1
max_bad_ratio: 0.5
allow_empty_snapshot: false
columns:
  sku: {from: sku, required: true}
  price: {from: price, type: integer}
key: [sku]
"""
FIRST, OLD, NEW, LAST = (f"sku,price\nA,{price}\nB,2\n".encode() for price in (1, 2, 3, 4))
BROKEN = b"sku,price\nA,no\nB,neither\n"
BEFORE_SWITCH = [
    PublishStep.COPIED,
    PublishStep.SORTED,
    PublishStep.STARTED,
    PublishStep.PROCESSED,
    PublishStep.CHECKED,
    PublishStep.ARTIFACTS_STORED,
    PublishStep.STATE_STORED,
    PublishStep.SWITCHING,
]
WAIT = 30


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Bucket]:
    with open_s3_bucket() as bucket:
        yield bucket


@pytest.fixture
def backend(s3: S3Bucket, tmp_path: Path) -> Iterator[BucketBackend]:
    with s3_backend(s3, tmp_path / "machines") as backend:
        backend.put(paths.make_config_path(SUPPLIER), CONFIG)
        yield backend


def run(tree: FileTree, on_step: OnStep = lambda _step: None) -> RunOutcome:
    return Ingestion(tree, "test", RunHooks(on_step=on_step)).run(SUPPLIER)


def failure(outcome: RunOutcome) -> FailureCode | None:
    return outcome.manifest.failure.code if outcome.manifest and outcome.manifest.failure else None


def has_published(outcome: RunOutcome) -> bool:
    return outcome.manifest is not None and outcome.manifest.status is IngestRunStatus.PASS


def read_json(tree: FileTree, path: str) -> dict[str, Any]:
    content = tree.read(path)
    assert content is not None, path
    data: dict[str, Any] = orjson.loads(content)
    return data


def read_complete_state(tree: FileTree) -> CurrentPointer | None:
    """I11: return the pointer, and check that its state is complete and has its hash."""
    pointer = tree.read_pointer(SUPPLIER)
    if pointer is None:
        return None
    with tree.open(paths.make_state_path(SUPPLIER, pointer.run_id, paths.FACTS)) as facts:
        assert sha256(facts.read()).hexdigest() == pointer.sha256
    assert read_json(tree, paths.make_state_path(SUPPLIER, pointer.run_id, paths.POINTER)) == pointer.as_dict()
    manifest = read_json(tree, paths.make_state_path(SUPPLIER, pointer.run_id, paths.MANIFEST))
    assert (manifest["status"], manifest["fence"]) == ("PASS", pointer.fence)
    return pointer


def has_published_content(tree: FileTree, content: bytes) -> bool:
    """Return whether the published state was made of *content*."""
    pointer = read_complete_state(tree)
    assert pointer is not None
    manifest = read_json(tree, paths.make_state_path(SUPPLIER, pointer.run_id, paths.MANIFEST))
    return bool(manifest["input_sha256"] == sha256(content).hexdigest())


def find_folders(tree: FileTree, content: bytes) -> set[str]:
    """Return the folders with a file of this content."""
    folders = {
        "inbox": paths.make_inbox_path(SUPPLIER),
        "obsolete": paths.make_obsolete_path(SUPPLIER),
        "duplicates": paths.make_duplicates_path(SUPPLIER),
        "broken": paths.make_broken_path(SUPPLIER),
    }
    names = {name for name, folder in folders.items() if content in _read_contents(tree, folder)}
    archived = [
        file.path for file in tree.list_files(paths.make_archive_path(SUPPLIER)) if "/obsolete/" not in file.path
    ]
    return names | ({"archive"} if content in [tree.read(path) for path in archived] else set())


def _read_contents(tree: FileTree, folder: str) -> list[bytes | None]:
    return [tree.read(file.path) for file in tree.list_files(folder)]


def assert_settled(tree: FileTree) -> None:
    """I10, I16: check that the inbox is empty, and that the published run has passed and is accepted."""
    assert tree.list_arrivals(SUPPLIER) == []
    pointer = read_complete_state(tree)
    assert pointer is not None
    manifest = read_json(tree, paths.make_run_path(pointer.run_id, paths.MANIFEST))
    assert manifest["status"] == "PASS"
    assert read_json(tree, paths.make_accepted_path(SUPPLIER, manifest["input_sha256"]))["run_id"] == pointer.run_id


def assert_next_file_is_published(backend: BucketBackend, fence: int) -> None:
    """I16: check that the next file is published."""
    drop(backend, "last.csv", LAST)
    assert has_published(run(backend.machine()))
    assert has_published_content(backend.tree, LAST)
    assert read_complete_state(backend.tree).fence == fence  # type: ignore[union-attr]
    assert_settled(backend.tree)


# One machine.


def test_file_is_published(backend: BucketBackend) -> None:
    """I10, I11: the state is complete, the file is archived and accepted, and the pointer is an object."""
    drop(backend, "price.csv", FIRST)
    outcome = run(backend.tree)
    assert has_published(outcome)
    pointer = read_complete_state(backend.tree)
    assert pointer is not None
    assert outcome.manifest is not None
    assert (pointer.run_id, pointer.fence) == (outcome.manifest.run_id, 1)
    assert backend.tree.read(f"{paths.CURRENT}/{SUPPLIER}.json") is not None
    assert stored_paths(backend.tree, paths.make_archive_path(SUPPLIER)) == ["price.csv"]
    assert outcome.manifest.moved_to == f"{paths.make_archive_path(SUPPLIER)}/price.csv"
    assert_settled(backend.tree)


def test_next_publication_replaces_the_state(backend: BucketBackend) -> None:
    """I11, I14, I21: the fence grows, the old state is unchanged, and the changes are recorded."""
    drop(backend, "price.csv", FIRST)
    first = run(backend.tree).manifest
    drop(backend, "price.csv", NEW)
    second = run(backend.tree).manifest
    assert first is not None
    assert second is not None
    assert second.changes is not None
    assert (second.fence, second.previous_run, second.changes.changed) == (2, first.run_id, 1)
    assert has_published_content(backend.tree, NEW)
    assert backend.tree.list_states(SUPPLIER) == sorted([first.run_id, second.run_id])
    assert stored_paths(backend.tree, paths.make_archive_path(SUPPLIER)) == ["price.csv", "price.csv.1"]


def test_rejected_file_goes_to_quarantine(backend: BucketBackend) -> None:
    """I6: a rejected file goes to broken with a code in the manifest, and the state stays."""
    drop(backend, "price.csv", FIRST)
    run(backend.tree)
    before = read_complete_state(backend.tree)
    drop(backend, "price.csv", BROKEN)
    outcome = run(backend.tree)
    assert failure(outcome) is FailureCode.DQ_TOO_FEW_FACTS or failure(outcome) is FailureCode.DQ_TOO_MANY_BAD_ROWS
    assert find_folders(backend.tree, BROKEN) == {"broken"}
    assert read_complete_state(backend.tree) == before
    assert outcome.manifest is not None
    assert read_json(backend.tree, paths.make_run_path(outcome.manifest.run_id, paths.MANIFEST))["status"] == "FAIL"


def test_newest_unique_file_wins(backend: BucketBackend) -> None:
    """I2: known content goes to duplicates, older files go to obsolete, by the times of the bucket."""
    drop(backend, "price.csv", FIRST)
    run(backend.tree)
    drop(backend, "a-old.csv", OLD, age=200)
    drop(backend, "again.csv", FIRST, age=100)
    drop(backend, "z-new.csv", NEW, age=50)
    drop(backend, "unfinished.csv.tmp", LAST)
    assert has_published(run(backend.tree))
    assert has_published_content(backend.tree, NEW)
    assert find_folders(backend.tree, OLD) == {"obsolete"}
    assert find_folders(backend.tree, FIRST) == {"archive", "duplicates"}
    assert [arrival.name for arrival in backend.tree.list_arrivals(SUPPLIER)] == ["unfinished.csv.tmp"]
    again = run(backend.tree)
    assert (again.manifest, again.reason) == (None, "the inbox is empty")


def test_ignored_entries_of_a_bucket_are_listed(backend: BucketBackend) -> None:
    """Status: folders in an inbox, and entries beside the inboxes, are listed with their location."""
    drop(backend, "price.csv", FIRST)
    assert (backend.tree.list_ignored(SUPPLIER), backend.tree.list_ignored()) == ([], [])
    drop(backend, "old/price.csv", OLD)
    backend.put(f"{paths.INBOX}/acme corp/price.csv", NEW)
    backend.put(f"{paths.INBOX}/price.csv", NEW)
    (folder,) = backend.tree.list_ignored(SUPPLIER)
    assert (folder.name, folder.kind) == ("old", "folder")
    assert folder.path == backend.tree.make_uri(f"{paths.make_inbox_path(SUPPLIER)}/old")
    strays = [(entry.name, entry.kind) for entry in backend.tree.list_ignored()]
    assert strays == [("acme corp", STRAY_FOLDER), ("price.csv", STRAY_FILE)]


def test_machine_runs_a_supplier_once_at_a_time(backend: BucketBackend) -> None:
    """I4: a second run on the same machine is refused while the first is active."""
    drop(backend, "price.csv", FIRST)

    def run_again(step: PublishStep) -> None:
        if step is PublishStep.CHECKED:
            with pytest.raises(Conflict):
                run(backend.tree)

    assert has_published(run(backend.tree, run_again))


# Two machines.


@pytest.mark.full
@pytest.mark.parametrize(
    "step",
    [
        PublishStep.LOCKED,
        PublishStep.RECOVERED,
        PublishStep.COPIED,
        PublishStep.STARTED,
        PublishStep.STATE_STORED,
        PublishStep.SWITCHING,
    ],
)
@pytest.mark.parametrize("has_state", [False, True])
def test_one_of_two_machines_publishes(backend: BucketBackend, step: PublishStep, has_state: bool) -> None:
    """I4, I11: without a common lock the pointer decides; the file is neither lost nor blocked."""
    if has_state:
        drop(backend, "first.csv", FIRST)
        run(backend.tree)
    drop(backend, "price.csv", NEW)
    barrier = threading.Barrier(2)

    def meet(at: PublishStep) -> None:
        if at is step:
            barrier.wait(WAIT)

    def race(tree: FileTree) -> RunOutcome:
        try:
            return run(tree, meet)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as machines:
        outcomes = list(machines.map(race, [backend.machine(), backend.machine()]))
    winners = [outcome for outcome in outcomes if has_published(outcome)]
    assert len(winners) == 1
    [loser] = [outcome for outcome in outcomes if not has_published(outcome)]
    codes = [FailureCode.SUPERSEDED]
    if step in (PublishStep.LOCKED, PublishStep.RECOVERED):  # no barrier in the run: the other may have ended already
        codes += [FailureCode.FILE_MISSING]
    assert loser.reason is not None or failure(loser) in codes
    assert has_published_content(backend.tree, NEW)
    assert find_folders(backend.tree, NEW) <= {"archive", "duplicates"}
    assert_settled(backend.tree)
    assert_next_file_is_published(backend, fence=2 + has_state)


@contextmanager
def pause_at(tree: FileTree, step: PublishStep) -> Iterator[tuple[threading.Event, "Future[RunOutcome]"]]:
    """Run in a thread that waits at *step* until the event is set."""
    reached, go = threading.Event(), threading.Event()

    def wait(at: PublishStep) -> None:
        if at is step:
            reached.set()
            assert go.wait(WAIT)

    with ThreadPoolExecutor(1) as machine:
        try:
            running = machine.submit(run, tree, wait)
            running.add_done_callback(lambda _: reached.set())
            assert reached.wait(WAIT)
            assert not running.done(), running.result()
            yield go, running
        finally:
            go.set()


@pytest.mark.full
@pytest.mark.parametrize(
    ("step", "has_state"),
    [*((step, True) for step in PublishStep), (PublishStep.SWITCHING, False), (PublishStep.SWITCHED, False)],
)
def test_paused_machine_cannot_restore_an_older_state(
    backend: BucketBackend, step: PublishStep, has_state: bool
) -> None:
    """I11, I16: a machine that wakes up after a newer publication does not replace it."""
    if has_state:
        drop(backend, "first.csv", FIRST)
        run(backend.tree)
    drop(backend, "price.csv", OLD, age=100)
    with pause_at(backend.machine(), step) as (go, running):
        drop(backend, "newer.csv", NEW)
        assert has_published(run(backend.machine()))
        newest = read_complete_state(backend.tree)
        assert has_published_content(backend.tree, NEW)
        go.set()
        outcome = running.result(WAIT)
    assert read_complete_state(backend.tree) == newest
    assert newest is not None
    is_switched = step in (PublishStep.SWITCHED, PublishStep.RECORDED, PublishStep.ACCEPTED, PublishStep.MOVED)
    assert newest.fence == 1 + has_state + is_switched
    assert has_published(outcome) == is_switched
    assert (failure(outcome) is FailureCode.SUPERSEDED) == (step in BEFORE_SWITCH)
    assert find_folders(backend.tree, OLD) == ({"archive"} if is_switched else {"obsolete"})
    assert_settled(backend.tree)
    assert_next_file_is_published(backend, fence=newest.fence + 1)


def test_machine_that_publishes_during_its_recovery_has_passed(
    backend: BucketBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: a run that publishes while another machine records it as failed has passed."""
    drop(backend, "price.csv", NEW)
    write_manifest = publish.write_manifest
    with pause_at(backend.machine(), PublishStep.SWITCHING) as (go, running):

        def write_late(tree: FileTree, manifest: RunManifest) -> None:
            monkeypatch.undo()
            go.set()
            assert has_published(running.result(WAIT))
            write_manifest(tree, manifest)

        monkeypatch.setattr(publish, "write_manifest", write_late)
        assert run(backend.machine()).reason is not None
    assert_settled(backend.tree)
    assert_next_file_is_published(backend, fence=2)


# A machine that dies.


class CrashingObjectStorage:
    """The storage of a machine that dies before a number of writes, or when `die` is called."""

    def __init__(self, inner: Storage, writes: int = 1_000_000) -> None:
        self._inner = inner
        self._left = writes

    def die(self) -> None:
        self._left = -1

    def _write(self) -> Storage:
        self._left -= 1
        return self._read()

    def _read(self) -> Storage:
        if self._left < 0:
            self._left = -1
            raise Killed
        return self._inner

    async def put(self, path: str, data: bytes) -> ObjectInfo:
        return await self._write().put(path, data)

    async def create(self, path: str, data: bytes) -> ObjectInfo:
        return await self._write().create(path, data)

    async def replace(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        return await self._write().replace(path, data, etag=etag)

    async def put_file(self, path: str, source: Path) -> ObjectInfo:
        return await self._write().put_file(path, source)

    async def delete(self, path: str) -> None:
        await self._write().delete(path)

    async def get(self, path: str) -> StoredObject:
        return await self._read().get(path)

    def stream(self, path: str, *, etag: str | None = None) -> AsyncIterator[bytes]:
        return self._read().stream(path, etag=etag)

    async def read_info(self, path: str) -> ObjectInfo | None:
        return await self._read().read_info(path)

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return self._read().list(prefix)

    def make_uri(self, path: str) -> str:
        return self._inner.make_uri(path)

    async def check(self) -> None:
        await self._read().check()


def kill(backend: BucketBackend, step: PublishStep, before: OnStep = lambda _step: None) -> None:
    """Run on a machine that dies at *step*."""
    storage = CrashingObjectStorage(backend.storage)

    def at_step(at: PublishStep) -> None:
        before(at)
        if at is step:
            storage.die()
            raise Killed

    with pytest.raises(Killed):
        run(backend.machine(storage), at_step)


@pytest.mark.full
@pytest.mark.parametrize("step", PublishStep)
def test_machine_killed_at_any_step(backend: BucketBackend, step: PublishStep) -> None:
    """I10, I16: the state is unchanged or complete, and the next run on another machine completes the killed run."""
    drop(backend, "first.csv", FIRST)
    run(backend.tree)
    before = read_complete_state(backend.tree)
    drop(backend, "price.csv", NEW)
    kill(backend, step)
    assert read_complete_state(backend.tree) == before or has_published_content(backend.tree, NEW)
    run(backend.machine())
    assert has_published_content(backend.tree, NEW)
    assert find_folders(backend.tree, NEW) == {"archive"}
    assert_settled(backend.tree)
    assert_next_file_is_published(backend, fence=3)


def test_machine_that_publishes_after_its_recovery_and_dies(backend: BucketBackend) -> None:
    """I10: the run of the published state has passed, whatever another machine recorded before."""
    drop(backend, "price.csv", NEW)
    given_up = threading.Event()

    def wait_there(at: PublishStep) -> None:
        if at is PublishStep.SWITCHING:
            waiting.set()
            assert given_up.wait(WAIT)

    waiting = threading.Event()
    with ThreadPoolExecutor(1) as machine:
        dying = machine.submit(kill, backend, PublishStep.SWITCHED, wait_there)
        assert waiting.wait(WAIT)
        with pause_at(backend.machine(), PublishStep.STATE_STORED) as (go, running):
            given_up.set()
            dying.result(WAIT)
            go.set()
            assert failure(running.result(WAIT)) is FailureCode.SUPERSEDED
    run(backend.machine())
    assert_settled(backend.tree)
    assert find_folders(backend.tree, NEW) <= {"archive", "duplicates"}
    assert_next_file_is_published(backend, fence=2)


def _drop_one(backend: BucketBackend) -> None:
    drop(backend, "price.csv", NEW)


def _drop_many(backend: BucketBackend) -> None:
    drop(backend, "again.csv", FIRST, age=300)
    drop(backend, "old.csv", OLD, age=200)
    drop(backend, "price.csv", NEW, age=100)


def _drop_broken(backend: BucketBackend) -> None:
    drop(backend, "price.csv", BROKEN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("deliver", "expected"),
    [
        (_drop_one, {NEW: {"archive"}}),
        (_drop_many, {NEW: {"archive"}, OLD: {"obsolete"}, FIRST: {"archive", "duplicates"}}),
        (_drop_broken, {BROKEN: {"broken"}}),
    ],
)
def test_machine_killed_before_any_write(
    tmp_path: Path, deliver: Callable[[BucketBackend], None], expected: dict[bytes, set[str]]
) -> None:
    """I2, I10, I16: a machine that is killed between any two writes loses no file; its next run completes the work."""
    writes, is_killed = 0, True
    while is_killed:
        with stored_backend(tmp_path / f"{writes}", tmp_path / "machines") as backend:
            backend.put(paths.make_config_path(SUPPLIER), CONFIG)
            drop(backend, "first.csv", FIRST)
            run(backend.tree)
            before = read_complete_state(backend.tree)
            deliver(backend)
            try:
                run(backend.machine(CrashingObjectStorage(backend.storage, writes), "again"))
                is_killed = False
            except Killed:
                pass
            assert read_complete_state(backend.tree) == before or has_published_content(backend.tree, NEW)
            assert all(find_folders(backend.tree, content) for content in expected), writes
            run(backend.machine(name="again"))
            assert {content: find_folders(backend.tree, content) for content in expected} == expected, writes
            assert_settled(backend.tree)
            writes += 1
    assert writes > 10
