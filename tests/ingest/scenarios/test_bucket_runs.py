"""Whole runs on a bucket: what is published, and what two machines, a paused one and a killed one do to it."""

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
from penstock.ingest.tree.port import FileTree
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
    with open_s3_bucket() as place:
        yield place


@pytest.fixture
def backend(s3: S3Bucket, tmp_path: Path) -> Iterator[BucketBackend]:
    with s3_backend(s3, tmp_path / "machines") as backend:
        backend.put(paths.config(SUPPLIER), CONFIG)
        yield backend


def run(tree: FileTree, on_step: OnStep = lambda _step: None) -> RunOutcome:
    return Ingestion(tree, "test", RunHooks(on_step=on_step)).run(SUPPLIER)


def failure(outcome: RunOutcome) -> FailureCode | None:
    return outcome.manifest.failure.code if outcome.manifest and outcome.manifest.failure else None


def has_published(outcome: RunOutcome) -> bool:
    return outcome.manifest is not None and outcome.manifest.status is IngestRunStatus.PASS


def told(tree: FileTree, path: str) -> dict[str, Any]:
    content = tree.read(path)
    assert content is not None, path
    data: dict[str, Any] = orjson.loads(content)
    return data


def whole_state(tree: FileTree) -> CurrentPointer | None:
    """I11: what is current, and that all of it is there and is what the pointer says."""
    pointer = tree.read_pointer(SUPPLIER)
    if pointer is None:
        return None
    with tree.open(paths.state(SUPPLIER, pointer.run_id, paths.FACTS)) as facts:
        assert sha256(facts.read()).hexdigest() == pointer.sha256
    assert told(tree, paths.state(SUPPLIER, pointer.run_id, paths.POINTER)) == pointer.as_dict()
    manifest = told(tree, paths.state(SUPPLIER, pointer.run_id, paths.MANIFEST))
    assert (manifest["status"], manifest["fence"]) == ("PASS", pointer.fence)
    return pointer


def is_of(tree: FileTree, content: bytes) -> bool:
    """Whether the current state was made of *content*."""
    pointer = whole_state(tree)
    assert pointer is not None
    manifest = told(tree, paths.state(SUPPLIER, pointer.run_id, paths.MANIFEST))
    return bool(manifest["input_sha256"] == sha256(content).hexdigest())


def places(tree: FileTree, content: bytes) -> set[str]:
    """The folders that hold a file of this content."""
    folders = {
        "inbox": paths.inbox(SUPPLIER),
        "obsolete": paths.obsolete(SUPPLIER),
        "duplicates": paths.duplicates(SUPPLIER),
        "broken": paths.broken(SUPPLIER),
    }
    found = {name for name, folder in folders.items() if content in _contents(tree, folder)}
    archived = [file.path for file in tree.list_files(paths.archive(SUPPLIER)) if "/obsolete/" not in file.path]
    return found | ({"archive"} if content in [tree.read(path) for path in archived] else set())


def _contents(tree: FileTree, folder: str) -> list[bytes | None]:
    return [tree.read(file.path) for file in tree.list_files(folder)]


def assert_settled(tree: FileTree) -> None:
    """I10, I16: the inbox is empty, and what is current is known as accepted and as passed."""
    assert tree.list_arrivals(SUPPLIER) == []
    pointer = whole_state(tree)
    assert pointer is not None
    manifest = told(tree, paths.run(pointer.run_id, paths.MANIFEST))
    assert manifest["status"] == "PASS"
    assert told(tree, paths.accepted(SUPPLIER, manifest["input_sha256"]))["run_id"] == pointer.run_id


def assert_goes_on(backend: BucketBackend, fence: int) -> None:
    """I16: whatever happened, the next file is published."""
    drop(backend, "last.csv", LAST)
    assert has_published(run(backend.machine()))
    assert is_of(backend.tree, LAST)
    assert whole_state(backend.tree).fence == fence  # type: ignore[union-attr]
    assert_settled(backend.tree)


# One machine.


def test_a_file_is_published(backend: BucketBackend) -> None:
    """I10, I11: the state is whole, the file is archived and known, the pointer is an object of its own."""
    drop(backend, "price.csv", FIRST)
    outcome = run(backend.tree)
    assert has_published(outcome)
    pointer = whole_state(backend.tree)
    assert pointer is not None
    assert outcome.manifest is not None
    assert (pointer.run_id, pointer.fence) == (outcome.manifest.run_id, 1)
    assert backend.tree.read(f"{paths.CURRENT}/{SUPPLIER}.json") is not None
    assert stored_paths(backend.tree, paths.archive(SUPPLIER)) == ["price.csv"]
    assert outcome.manifest.moved_to == f"{paths.archive(SUPPLIER)}/price.csv"
    assert_settled(backend.tree)


def test_the_next_publication_replaces_it(backend: BucketBackend) -> None:
    """I11, I14, I21: the fence grows, the old state is still there unchanged, and what changed is told."""
    drop(backend, "price.csv", FIRST)
    first = run(backend.tree).manifest
    drop(backend, "price.csv", NEW)
    second = run(backend.tree).manifest
    assert first is not None
    assert second is not None
    assert second.changes is not None
    assert (second.fence, second.previous_run, second.changes.changed) == (2, first.run_id, 1)
    assert is_of(backend.tree, NEW)
    assert backend.tree.list_states(SUPPLIER) == sorted([first.run_id, second.run_id])
    assert stored_paths(backend.tree, paths.archive(SUPPLIER)) == ["price.csv", "price.csv.1"]


def test_a_broken_file_is_set_aside(backend: BucketBackend) -> None:
    """I6: it fails with a code, goes to broken, leaves a manifest, and the state is untouched."""
    drop(backend, "price.csv", FIRST)
    run(backend.tree)
    before = whole_state(backend.tree)
    drop(backend, "price.csv", BROKEN)
    outcome = run(backend.tree)
    assert failure(outcome) is FailureCode.DQ_TOO_FEW_FACTS or failure(outcome) is FailureCode.DQ_TOO_MANY_BAD_ROWS
    assert places(backend.tree, BROKEN) == {"broken"}
    assert whole_state(backend.tree) == before
    assert outcome.manifest is not None
    assert told(backend.tree, paths.run(outcome.manifest.run_id, paths.MANIFEST))["status"] == "FAIL"


def test_the_newest_unique_file_wins(backend: BucketBackend) -> None:
    """I2: what is known goes to duplicates, what is older to obsolete, by the bucket's own times."""
    drop(backend, "price.csv", FIRST)
    run(backend.tree)
    drop(backend, "a-old.csv", OLD, age=200)
    drop(backend, "again.csv", FIRST, age=100)
    drop(backend, "z-new.csv", NEW, age=50)
    drop(backend, "unfinished.csv.tmp", LAST)
    assert has_published(run(backend.tree))
    assert is_of(backend.tree, NEW)
    assert places(backend.tree, OLD) == {"obsolete"}
    assert places(backend.tree, FIRST) == {"archive", "duplicates"}
    assert [arrival.name for arrival in backend.tree.list_arrivals(SUPPLIER)] == ["unfinished.csv.tmp"]
    again = run(backend.tree)
    assert (again.manifest, again.reason) == (None, "the inbox is empty")


def test_a_machine_runs_once_at_a_time(backend: BucketBackend) -> None:
    """I4: the second run of the same machine is refused while the first is under way."""
    drop(backend, "price.csv", FIRST)

    def again(step: PublishStep) -> None:
        if step is PublishStep.CHECKED:
            with pytest.raises(Conflict):
                run(backend.tree)

    assert has_published(run(backend.tree, again))


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
def test_of_two_machines_one_publishes(backend: BucketBackend, step: PublishStep, has_state: bool) -> None:
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
    ends = [FailureCode.SUPERSEDED]
    if step in (PublishStep.LOCKED, PublishStep.RECOVERED):  # there is nothing to wait for: the other may have ended
        ends += [FailureCode.FILE_MISSING]
    assert loser.reason is not None or failure(loser) in ends
    assert is_of(backend.tree, NEW)
    assert places(backend.tree, NEW) <= {"archive", "duplicates"}
    assert_settled(backend.tree)
    assert_goes_on(backend, fence=2 + has_state)


@contextmanager
def paused(tree: FileTree, step: PublishStep) -> Iterator[tuple[threading.Event, "Future[RunOutcome]"]]:
    """A run that stands at *step* until the event is set."""
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
def test_a_paused_machine_cannot_switch_back(backend: BucketBackend, step: PublishStep, has_state: bool) -> None:
    """I11, I16: another publishes what is newer while it sleeps; when it wakes up, that stays."""
    if has_state:
        drop(backend, "first.csv", FIRST)
        run(backend.tree)
    drop(backend, "price.csv", OLD, age=100)
    with paused(backend.machine(), step) as (go, running):
        drop(backend, "newer.csv", NEW)
        assert has_published(run(backend.machine()))
        newest = whole_state(backend.tree)
        assert is_of(backend.tree, NEW)
        go.set()
        late = running.result(WAIT)
    assert whole_state(backend.tree) == newest
    assert newest is not None
    is_switched = step in (PublishStep.SWITCHED, PublishStep.RECORDED, PublishStep.ACCEPTED, PublishStep.MOVED)
    assert newest.fence == 1 + has_state + is_switched
    assert has_published(late) == is_switched
    assert (failure(late) is FailureCode.SUPERSEDED) == (step in BEFORE_SWITCH)
    assert places(backend.tree, OLD) == ({"archive"} if is_switched else {"obsolete"})
    assert_settled(backend.tree)
    assert_goes_on(backend, fence=newest.fence + 1)


def test_a_machine_that_publishes_while_it_is_given_up_has_passed(
    backend: BucketBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I10: another takes it for dead, and notes so after it has ended: what is current has passed all the same."""
    drop(backend, "price.csv", NEW)
    note = publish.write_manifest
    with paused(backend.machine(), PublishStep.SWITCHING) as (go, running):

        def late(tree: FileTree, manifest: RunManifest) -> None:
            monkeypatch.undo()
            go.set()
            assert has_published(running.result(WAIT))
            note(tree, manifest)

        monkeypatch.setattr(publish, "write_manifest", late)
        assert run(backend.machine()).reason is not None
    assert_settled(backend.tree)
    assert_goes_on(backend, fence=2)


# A machine that dies.


class CrashingObjectStorage:
    """The storage as a machine sees it that dies: before so many writings, or when it is told to."""

    def __init__(self, inner: Storage, writings: int = 1_000_000) -> None:
        self._inner = inner
        self._left = writings

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

    async def info(self, path: str) -> ObjectInfo | None:
        return await self._read().info(path)

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        return self._read().list(prefix)

    def uri(self, path: str) -> str:
        return self._inner.uri(path)

    async def check(self) -> None:
        await self._read().check()


def kill(backend: BucketBackend, step: PublishStep, waits: OnStep = lambda _step: None) -> None:
    """A run of a machine that is gone at *step*."""
    storage = CrashingObjectStorage(backend.storage)

    def at_step(at: PublishStep) -> None:
        waits(at)
        if at is step:
            storage.die()
            raise Killed

    with pytest.raises(Killed):
        run(backend.machine(storage), at_step)


@pytest.mark.full
@pytest.mark.parametrize("step", PublishStep)
def test_a_machine_killed_at_any_step_does_no_harm(backend: BucketBackend, step: PublishStep) -> None:
    """I10, I16: the state is as it was or complete, and the next run, elsewhere, ends what was begun."""
    drop(backend, "first.csv", FIRST)
    run(backend.tree)
    before = whole_state(backend.tree)
    drop(backend, "price.csv", NEW)
    kill(backend, step)
    assert whole_state(backend.tree) == before or is_of(backend.tree, NEW)
    run(backend.machine())
    assert is_of(backend.tree, NEW)
    assert places(backend.tree, NEW) == {"archive"}
    assert_settled(backend.tree)
    assert_goes_on(backend, fence=3)


def test_a_machine_given_up_that_publishes_after_all_and_dies(backend: BucketBackend) -> None:
    """I10: what is current has passed, whatever another machine noted of its run meanwhile."""
    drop(backend, "price.csv", NEW)
    given_up = threading.Event()

    def doze(at: PublishStep) -> None:
        if at is PublishStep.SWITCHING:
            asleep.set()
            assert given_up.wait(WAIT)

    asleep = threading.Event()
    with ThreadPoolExecutor(1) as machine:
        dying = machine.submit(kill, backend, PublishStep.SWITCHED, doze)
        assert asleep.wait(WAIT)
        with paused(backend.machine(), PublishStep.STATE_STORED) as (go, running):
            given_up.set()
            dying.result(WAIT)
            go.set()
            assert failure(running.result(WAIT)) is FailureCode.SUPERSEDED
    run(backend.machine())
    assert_settled(backend.tree)
    assert places(backend.tree, NEW) <= {"archive", "duplicates"}
    assert_goes_on(backend, fence=2)


def _one(backend: BucketBackend) -> None:
    drop(backend, "price.csv", NEW)


def _many(backend: BucketBackend) -> None:
    drop(backend, "again.csv", FIRST, age=300)
    drop(backend, "old.csv", OLD, age=200)
    drop(backend, "price.csv", NEW, age=100)


def _broken(backend: BucketBackend) -> None:
    drop(backend, "price.csv", BROKEN)


@pytest.mark.full
@pytest.mark.parametrize(
    ("deliver", "expected"),
    [
        (_one, {NEW: {"archive"}}),
        (_many, {NEW: {"archive"}, OLD: {"obsolete"}, FIRST: {"archive", "duplicates"}}),
        (_broken, {BROKEN: {"broken"}}),
    ],
)
def test_a_machine_killed_before_any_writing_does_no_harm(
    tmp_path: Path, deliver: Callable[[BucketBackend], None], expected: dict[bytes, set[str]]
) -> None:
    """I2, I10, I16: as above, but between any two writings, and it comes back itself; no input is ever lost."""
    writings, is_killed = 0, True
    while is_killed:
        with stored_backend(tmp_path / f"{writings}", tmp_path / "machines") as backend:
            backend.put(paths.config(SUPPLIER), CONFIG)
            drop(backend, "first.csv", FIRST)
            run(backend.tree)
            before = whole_state(backend.tree)
            deliver(backend)
            try:
                run(backend.machine(CrashingObjectStorage(backend.storage, writings), "again"))
                is_killed = False
            except Killed:
                pass
            assert whole_state(backend.tree) == before or is_of(backend.tree, NEW)
            assert all(places(backend.tree, content) for content in expected), writings
            run(backend.machine(name="again"))
            assert {content: places(backend.tree, content) for content in expected} == expected, writings
            assert_settled(backend.tree)
            writings += 1
    assert writings > 10
