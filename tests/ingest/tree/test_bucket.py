"""Tests of the guarantees of the bucket: moves in parts, switches of the pointer, its lock."""

import os
import stat
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import CurrentPointer, RunFailed
from penstock.ingest.tree import bucket, paths
from penstock.ingest.tree.bucket import BucketTree
from penstock.kernel.errors import BadConfig, Conflict, Transient
from penstock.kernel.storage.objects import ObjectStorage
from tests.ingest.tree.arrivals import BROKEN, INBOX, arrived, published
from tests.ingest.tree_backends import SUPPLIER, BucketBackend, stored_paths
from tests.services.s3 import S3Bucket


@pytest.fixture(params=["s3_bucket", "stored"])
def anywhere(request: pytest.FixtureRequest) -> BucketBackend:
    chosen: BucketBackend = request.getfixturevalue(request.param)
    return chosen


def test_a_file_that_arrives_during_a_move_stays(anywhere: BucketBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a file that takes the name of a file during its move is not lost, and neither is the moved file."""
    found = arrived(anywhere, content=b"before")
    create = type(anywhere.storage).create

    async def late(storage: object, path: str, data: bytes) -> object:
        made = await create(storage, path, data)  # type: ignore[arg-type]
        await anywhere.storage.put(f"{INBOX}/price.csv", b"after!")
        return made

    monkeypatch.setattr(type(anywhere.storage), "create", late)
    moved = anywhere.tree.move(found, BROKEN)
    assert moved == f"{BROKEN}/price.csv"
    assert (anywhere.tree.read(moved), anywhere.tree.read(f"{INBOX}/price.csv")) == (b"before", b"after!")


def test_a_large_file_moves_in_parts(anywhere: BucketBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a large file that is written in parts does not overwrite a file either."""
    monkeypatch.setattr(bucket, "SMALL", 1000)
    for letter in (b"a", b"b"):
        assert anywhere.tree.move(arrived(anywhere, content=letter * 5000), BROKEN) is not None
    assert [anywhere.tree.read(f"{BROKEN}/{name}") for name in stored_paths(anywhere.tree, BROKEN)] == [
        b"a" * 5000,
        b"b" * 5000,
    ]
    assert anywhere.tree.list_arrivals(SUPPLIER) == []


def test_a_failed_move_leaves_the_name_free(anywhere: BucketBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: a failed move has no effect, and the next move uses the same name."""
    monkeypatch.setattr(bucket, "SMALL", 1000)
    found = arrived(anywhere, content=b"a" * 5000)

    async def fail(*_: object) -> None:
        raise Transient("STORAGE_DOWN", "no")

    with monkeypatch.context() as patch:
        patch.setattr(type(anywhere.storage), "put_file", fail)
        with pytest.raises(Transient):
            anywhere.tree.move(found, BROKEN)
    assert anywhere.tree.move(found, BROKEN) == f"{BROKEN}/price.csv"


@pytest.mark.parametrize("has_state", [False, True])
def test_of_many_writers_a_single_one_switches(anywhere: BucketBackend, has_state: bool) -> None:
    """I11: of several machines that switch at the same time, exactly one succeeds."""
    seen = published(anywhere, "before") if has_state else None
    if seen is not None:
        anywhere.tree.switch_pointer(SUPPLIER, seen, None)
    pointers = [published(anywhere, f"run{number}", 2) for number in range(6)]
    barrier = threading.Barrier(6)

    def switch(pointer: CurrentPointer) -> FailureCode | None:
        machine = anywhere.machine()
        barrier.wait(10)
        try:
            machine.switch_pointer(SUPPLIER, pointer, seen)
        except RunFailed as failed:
            return failed.code
        return None

    with ThreadPoolExecutor(6) as writers:
        outcomes = list(writers.map(switch, pointers))
    assert sorted(map(str, outcomes)) == ["None", *["SUPERSEDED"] * 5]
    assert anywhere.tree.read_pointer(SUPPLIER) == pointers[outcomes.index(None)]


@pytest.mark.parametrize("call", ["create", "replace"])
def test_a_writer_paused_during_the_switch_is_superseded(
    anywhere: BucketBackend, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I11: a writer that is overtaken between its read and its write changes nothing."""
    tree, seen = anywhere.tree, None
    if call == "replace":
        tree.switch_pointer(SUPPLIER, seen := published(anywhere, "before"), None)
    mine, theirs = published(anywhere, "mine", 2), published(anywhere, "theirs", 2)
    another = anywhere.machine()
    write = getattr(type(anywhere.storage), call)

    async def paused(storage: object, *args: object, **options: object) -> object:
        monkeypatch.undo()
        switched = threading.Thread(target=another.switch_pointer, args=(SUPPLIER, theirs, seen))
        switched.start()
        switched.join()
        return await write(storage, *args, **options)

    monkeypatch.setattr(type(anywhere.storage), call, paused)
    with pytest.raises(RunFailed) as failed:
        tree.switch_pointer(SUPPLIER, mine, seen)
    assert failed.value.code is FailureCode.SUPERSEDED
    assert tree.read_pointer(SUPPLIER) == theirs


def test_a_lost_response_is_not_a_conflict(anywhere: BucketBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: a client that repeats a write after a lost response is not superseded by itself."""
    mine = published(anywhere, "mine")
    create = type(anywhere.storage).create

    async def twice(storage: object, path: str, data: bytes) -> object:
        await create(storage, path, data)  # type: ignore[arg-type]
        return await create(storage, path, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(anywhere.storage), "create", twice)
    anywhere.tree.switch_pointer(SUPPLIER, mine, None)
    assert anywhere.tree.read_pointer(SUPPLIER) == mine


def test_a_removed_state_does_not_become_current(anywhere: BucketBackend) -> None:
    """I12: a writer whose state was removed by retention publishes nothing."""
    mine = published(anywhere, "mine")
    anywhere.tree.remove(paths.make_state_path(SUPPLIER, "mine"))
    with pytest.raises(RunFailed) as failed:
        anywhere.tree.switch_pointer(SUPPLIER, mine, None)
    assert failed.value.code is FailureCode.SUPERSEDED
    assert anywhere.tree.read_pointer(SUPPLIER) is None


def test_a_pointer_is_written_last(anywhere: BucketBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: the facts are stored first, and the pointer of the state last."""
    stored: list[str] = []
    keep = BucketTree.store

    def noted(tree: BucketTree, source: Path, path: str) -> None:
        stored.append(source.name)
        keep(tree, source, path)

    monkeypatch.setattr(BucketTree, "store", noted)
    published(anywhere, "mine")
    assert stored == [paths.FACTS, paths.POINTER]


def test_the_lock_depends_on_the_bucket(s3_bucket: BucketBackend, s3: S3Bucket, tmp_path: Path) -> None:
    """I4: processes of a machine exclude each other by the URL of the bucket, with or without a slash at its end."""
    trees = [
        BucketTree(s3_bucket.storage, url, tmp_path / "locks") for url in ("s3://one/a", "s3://one/a/", "s3://one/b")
    ]
    with trees[0].lock(SUPPLIER, "first"):
        with pytest.raises(Conflict), trees[1].lock(SUPPLIER, "second"):
            pass
        with trees[2].lock(SUPPLIER, "third"):
            pass
    for tree in trees:
        tree.close()


def test_the_lock_folder_belongs_to_the_user(
    stored: BucketBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: without a configured folder, locks are in a folder of the temporary files that only this user can enter."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    tree = BucketTree(stored.storage, "s3://one")
    with tree.lock(SUPPLIER, "first"):
        [folder] = tmp_path.glob("penstock-ingest-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    folder.rename(tmp_path / f"penstock-ingest-{another}")
    with pytest.raises(BadConfig, match="belongs to another user"), tree.lock(SUPPLIER, "second"):
        pass
    tree.close()


def test_an_unavailable_server_is_reported(s3: S3Bucket, tmp_path: Path) -> None:
    """I16: an error of the store is raised as STORAGE_DOWN with a hint."""
    dead = {**s3.options, "endpoint": "http://127.0.0.1:1"}
    tree = BucketTree(ObjectStorage(s3.url, dead), s3.url, tmp_path)
    with pytest.raises(Transient) as down:
        tree.list_arrivals(SUPPLIER)
    assert (down.value.code, bool(down.value.hint)) == ("STORAGE_DOWN", True)
    tree.close()
