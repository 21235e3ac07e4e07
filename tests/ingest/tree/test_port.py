"""Tests of the guarantees of the tree, for the folder and the bucket."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest

from penstock.ingest.contract import FailureCode
from penstock.ingest.model import CurrentPointer, RunFailed
from penstock.ingest.supplier import load_supplier
from penstock.ingest.tree import disk, paths
from penstock.ingest.tree.port import FileChanged, parse_pointer
from penstock.kernel.errors import Conflict, Corrupt, NotFound
from tests.ingest.tree.arrivals import BROKEN, INBOX, arrival, arrived, published, sha256
from tests.ingest.tree_backends import (
    SUPPLIER,
    BucketBackend,
    FolderBackend,
    TreeBackend,
    drop,
    stored_paths,
)

ODD_NAMES = [
    "price list (final) 2.csv",
    "Прайс-лист от 01.02.csv",
    "-rf.csv",
    "a'b\"c;$HOME&`x`*?[].csv",
    "日" * 83 + ".csv",
    "y" * 251 + ".csv",
]


# What comes in.


def test_files_in_the_inbox_are_listed(backend: TreeBackend) -> None:
    """I3: the files of the inbox are listed, including unfinished files, but not the files of inner folders."""
    for path in ("price.csv", "later.csv.tmp", ".hidden", "deeper/price.csv"):
        drop(backend, path, b"12345")
    backend.put(f"{paths.make_inbox_path('acme2')}/other.csv", b"")
    found = backend.tree.list_arrivals(SUPPLIER)
    assert sorted(arrival.name for arrival in found) == [".hidden", "later.csv.tmp", "price.csv"]
    assert {(arrival.supplier, arrival.size) for arrival in found} == {(SUPPLIER, 5)}
    assert backend.tree.list_arrivals("unknown") == []


def test_a_changed_file_has_another_signature(backend: TreeBackend) -> None:
    """I3: a file that is written again has another signature, also with the same size."""
    before = arrived(backend, content=b"before")
    assert arrival(backend.tree, "price.csv").signature == before.signature
    assert arrived(backend, content=b"after!").signature != before.signature


def test_a_file_is_hashed_while_it_is_copied(backend: TreeBackend, tmp_path: Path) -> None:
    """I3: the hash is that of the private copy; without a copy the hash is the same."""
    content = os.urandom(3 << 20)
    found = arrived(backend, content=content)
    assert backend.tree.fetch(found, tmp_path / "copy") == backend.tree.fetch(found) == sha256(content)
    assert (tmp_path / "copy").read_bytes() == content


def test_a_change_is_detected(backend: TreeBackend, tmp_path: Path) -> None:
    """I3: a file that has changed since it was listed is not fetched."""
    found = arrived(backend, content=b"before")
    drop(backend, "price.csv", b"after!")
    with pytest.raises(FileChanged):
        backend.tree.fetch(found, tmp_path / "copy")


def test_a_change_during_the_copy_is_detected(backend: TreeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """I3: a file that is written while it is copied is not fetched."""
    found = arrived(backend, content=b"before")
    copied = disk.copy_pieces

    def late(*args: object) -> str:
        digest = copied(*args)  # type: ignore[arg-type]
        drop(backend, "price.csv", b"after!")
        return digest

    monkeypatch.setattr(disk, "copy_pieces", late)
    with pytest.raises(FileChanged):
        backend.tree.fetch(found)


def test_a_removed_file_is_missing(backend: TreeBackend) -> None:
    """I6: a removed file fails with FILE_MISSING and is not moved."""
    found = arrived(backend)
    backend.delete(f"{INBOX}/price.csv")
    with pytest.raises(RunFailed) as failed:
        backend.tree.fetch(found)
    assert failed.value.code is FailureCode.FILE_MISSING
    assert backend.tree.move(found, BROKEN) is None


@pytest.mark.parametrize("name", ODD_NAMES)
def test_unusual_names(backend: TreeBackend, name: str) -> None:
    """I2: a file with any name is fetched and moved, also if its name is taken."""
    for number in range(3):
        found = arrived(backend, name, str(number).encode())
        assert backend.tree.fetch(found) == sha256(str(number).encode())
        assert backend.tree.move(found, BROKEN, ".failed") is not None
    assert backend.tree.list_arrivals(SUPPLIER) == []
    kept = [backend.tree.read(file.path) for file in backend.tree.list_files(BROKEN)]
    assert sorted(content for content in kept if content is not None) == [b"0", b"1", b"2"]


def test_a_name_that_objects_cannot_have(folder: FolderBackend, stored: BucketBackend) -> None:
    """A folder lists any name, also with a line break; a bucket only the names that every store allows."""
    drop(folder, "two\nlines.csv", b"x")
    found = arrival(folder.tree, "two\nlines.csv")
    assert folder.tree.move(found, BROKEN) == f"{BROKEN}/two\nlines.csv"
    place = Path(stored.storage.make_uri(INBOX).removeprefix("file://"))
    place.mkdir(parents=True)
    (place / "two\nlines.csv").write_bytes(b"x")
    assert stored.tree.list_arrivals(SUPPLIER) == []


# Moves.


def test_a_move_leaves_the_inbox_empty(backend: TreeBackend) -> None:
    """I2: a moved file is complete, and is only in the target folder."""
    assert backend.tree.move(arrived(backend), BROKEN) == f"{BROKEN}/price.csv"
    assert backend.tree.list_arrivals(SUPPLIER) == []
    assert backend.tree.read(f"{BROKEN}/price.csv") == b"content"


def test_a_taken_name_gets_a_suffix(backend: TreeBackend) -> None:
    """I2, I6: no file is overwritten; the suffix of the name shows the reason of the move."""
    for number in range(4):
        backend.tree.move(arrived(backend, content=str(number).encode()), BROKEN, ".failed")
    for number in range(3):
        backend.tree.move(arrived(backend, content=str(number).encode()), paths.make_obsolete_path(SUPPLIER))
    failed = ["price.csv", "price.csv.failed", "price.csv.failed.1", "price.csv.failed.2"]
    assert stored_paths(backend.tree, BROKEN) == failed
    assert [backend.tree.read(f"{BROKEN}/{name}") for name in failed] == [b"0", b"1", b"2", b"3"]
    assert stored_paths(backend.tree, paths.make_obsolete_path(SUPPLIER)) == ["price.csv", "price.csv.1", "price.csv.2"]


def test_concurrent_moves_overwrite_nothing(backend: TreeBackend) -> None:
    """I2: files with the same name that are moved at the same time are all stored."""
    barrier = threading.Barrier(4)
    suppliers = [f"s{number}" for number in range(4)]
    for name in suppliers:
        backend.tree.prepare(name)
        backend.put(f"{paths.make_inbox_path(name)}/price.csv", name.encode())

    def move(name: str) -> str | None:
        [found] = backend.tree.list_arrivals(name)
        barrier.wait(10)
        return backend.tree.move(found, BROKEN)

    with ThreadPoolExecutor(4) as movers:
        moved = list(movers.map(move, suppliers))
    assert sorted(backend.tree.read(path or "") or b"" for path in moved) == [name.encode() for name in suppliers]


def test_a_changed_file_is_not_moved(backend: TreeBackend) -> None:
    """I2: a file that has changed since it was listed is not moved."""
    found = arrived(backend, content=b"before")
    drop(backend, "price.csv", b"after!")
    assert backend.tree.move(found, BROKEN) is None
    assert stored_paths(backend.tree, BROKEN) == []
    assert backend.tree.read(f"{INBOX}/price.csv") == b"after!"


# Files.


def test_a_small_file_is_written_atomically(backend: TreeBackend) -> None:
    """I16: a reader sees the old or the new content, never a part."""
    contents = {letter * 300_000 for letter in (b"a", b"b")}
    path = paths.make_run_path("acme_1", paths.MANIFEST)
    backend.tree.write(path, min(contents))
    done = threading.Event()

    def read() -> set[bytes | None]:
        seen = {backend.tree.read(path)}
        while not done.is_set():
            seen.add(backend.tree.read(path))
        return seen

    with ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read)
        for _ in range(5):
            for content in contents:
                backend.tree.write(path, content)
        done.set()
        assert reading.result() <= contents
    assert stored_paths(backend.tree, paths.make_run_path("acme_1")) == [paths.MANIFEST]
    assert backend.tree.read(paths.make_run_path("acme_1", "nothing")) is None


def test_a_stored_file_is_read_at_any_offset(backend: TreeBackend, tmp_path: Path) -> None:
    """I8: a stored file can be read from any offset, and does not change."""
    content = os.urandom(2 << 20)
    (tmp_path / "made").write_bytes(content)
    path = paths.make_run_path("acme_1", paths.FACTS)
    backend.tree.store(tmp_path / "made", path)
    with backend.tree.open(path) as kept:
        assert kept.read() == content
        kept.seek(1 << 20)
        backend.tree.write(path, b"another")
        assert kept.read() == content[1 << 20 :]
    with pytest.raises(NotFound) as missing, backend.tree.open(paths.make_run_path("acme_2", paths.FACTS)):
        pass
    assert missing.value.code == "OBJECT_NOT_FOUND"


def test_files_and_folders_are_listed(backend: TreeBackend) -> None:
    """I12: every file is listed with its size, and every folder that contains a file."""
    for path in ("b/2", "a", "b/c/1", "bc/x"):
        backend.put(f"{paths.RUNS}/{path}", b"123")
    assert stored_paths(backend.tree, paths.RUNS) == ["a", "b/2", "b/c/1", "bc/x"]
    assert {file.size for file in backend.tree.list_files(paths.RUNS)} == {3}
    assert backend.tree.list_folders(paths.RUNS) == ["b", "bc"]
    assert (
        backend.tree.list_folders(f"{paths.RUNS}/nothing") == stored_paths(backend.tree, f"{paths.RUNS}/nothing") == []
    )


def test_a_folder_is_removed_with_its_content(backend: TreeBackend) -> None:
    """I12: a file or a folder is removed, and nothing else; a second removal has no effect."""
    for path in ("a/1", "a/b/2", "ab/3", "c"):
        backend.put(f"{paths.RUNS}/{path}", b"")
    for _ in range(2):
        assert backend.tree.remove(f"{paths.RUNS}/a")
        assert backend.tree.remove(f"{paths.RUNS}/c")
    assert stored_paths(backend.tree, paths.RUNS) == ["ab/3"]


def test_suppliers_are_listed(backend: TreeBackend) -> None:
    """I5: a supplier has a configuration or an inbox, and a valid name."""
    for path in (
        paths.make_config_path("both"),
        paths.make_config_path("configured"),
        f"{paths.CONFIGS}/notes.txt",
        f"{paths.CONFIGS}/a b.yaml",
        f"{paths.INBOX}/both/x",
        f"{paths.INBOX}/sending/x",
        f"{paths.INBOX}/a b/x",
        f"{paths.INBOX}/stray",
    ):
        backend.put(path, b"")
    assert set(backend.tree.list_suppliers()) - {SUPPLIER} == {"both", "configured", "sending"}


def test_runs_and_states_belong_to_a_supplier(backend: TreeBackend) -> None:
    """I5: a supplier whose name is a prefix of another name has only its own runs."""
    run, other = "acme_20260101T000000Z_00000a", "acme_2_20260101T000000Z_00000b"
    for run_id in (run, other):
        backend.put(paths.make_run_path(run_id, paths.MANIFEST), b"{}")
    backend.put(paths.make_state_path(SUPPLIER, run, paths.FACTS), b"")
    assert (backend.tree.list_runs(SUPPLIER), backend.tree.list_runs("acme_2")) == ([run], [other])
    assert (backend.tree.list_states(SUPPLIER), backend.tree.list_states("acme_2")) == ([run], [])


def test_a_configuration_is_a_local_file(backend: TreeBackend) -> None:
    """I7: a configuration can be loaded; if it is missing, the message names its path."""
    with backend.tree.open_config(SUPPLIER) as file, pytest.raises(RunFailed) as failed:
        load_supplier(file)
    assert failed.value.code is FailureCode.CONFIG_DQ_MISSING
    assert paths.make_config_path(SUPPLIER) in failed.value.message
    backend.put(
        paths.make_config_path(SUPPLIER), b"min_fact_count: 1\nmax_bad_ratio: 0.5\nallow_empty_snapshot: false\n"
    )
    with backend.tree.open_config(SUPPLIER) as file:
        assert load_supplier(file)[0].min_fact_count == 1


def test_a_supplier_is_locked(backend: TreeBackend) -> None:
    """I4: a second process gets the name of the first; other suppliers are not locked, and the lock is released."""
    with backend.tree.lock(SUPPLIER, "first"):
        with pytest.raises(Conflict) as refused, backend.tree.lock(SUPPLIER, "second"):
            pass
        assert refused.value.code == "LOCKED"
        assert "locked by first" in refused.value.message
        with backend.tree.lock("other", "second"):
            pass
    with backend.tree.lock(SUPPLIER, "second"):
        pass


def test_the_work_folder_is_private_and_removed(backend: TreeBackend) -> None:
    """I16: leftovers of a killed run are removed by the next run, and are not in the tree."""
    killed = backend.tree.open_work_folder(SUPPLIER, "acme_1")
    (killed.__enter__() / "input").write_bytes(b"left behind")
    with backend.tree.open_work_folder(SUPPLIER, "acme_2") as folder:
        assert [*folder.parent.iterdir(), *folder.iterdir()] == [folder]
    assert not folder.exists()


# The state.


def test_a_state_becomes_current_by_the_switch(backend: TreeBackend) -> None:
    """I11: a stored state is not current before the switch, and is complete."""
    assert backend.tree.read_pointer(SUPPLIER) is None
    first = published(backend, "first")
    assert backend.tree.read_pointer(SUPPLIER) is None
    backend.tree.switch_pointer(SUPPLIER, first, None)
    assert backend.tree.read_pointer(SUPPLIER) == first
    second = published(backend, "second", 2)
    assert backend.tree.read_pointer(SUPPLIER) == first
    backend.tree.switch_pointer(SUPPLIER, second, first)
    assert backend.tree.read_pointer(SUPPLIER) == second
    assert backend.tree.read(paths.make_state_path(SUPPLIER, "first", paths.FACTS)) == b"first"
    assert backend.tree.read_pointer("other") is None


def test_a_late_writer_cannot_switch_back(backend: TreeBackend) -> None:
    """I11: a writer that has seen no state, an older state or a removed state is superseded."""
    first, second, late = (
        published(backend, name, fence) for name, fence in (("first", 1), ("second", 2), ("late", 2))
    )
    backend.tree.switch_pointer(SUPPLIER, first, None)
    backend.tree.switch_pointer(SUPPLIER, second, first)
    for seen in (None, first, late):
        with pytest.raises(RunFailed) as failed:
            backend.tree.switch_pointer(SUPPLIER, late, seen)
        assert failed.value.code is FailureCode.SUPERSEDED
        assert "the current state is second (fence 2)" in failed.value.message
    assert backend.tree.read_pointer(SUPPLIER) == second


def test_a_damaged_pointer_is_an_error(backend: TreeBackend) -> None:
    """I14: a file that is not a valid pointer is never used as one."""
    first = published(backend, "first")
    backend.tree.switch_pointer(SUPPLIER, first, None)
    is_folder = isinstance(backend, FolderBackend)
    path = paths.make_state_path(SUPPLIER, "first", paths.POINTER) if is_folder else f"{paths.CURRENT}/{SUPPLIER}.json"
    backend.tree.write(path, b"{") if not is_folder else _overwrite(Path(backend.tree.make_uri(path)))
    with pytest.raises(Corrupt) as damaged:
        backend.tree.read_pointer(SUPPLIER)
    assert damaged.value.code == "POINTER_DAMAGED"


def test_a_pointer_of_a_later_release_is_read() -> None:
    """R27: additional fields of a pointer are ignored; a missing field makes it invalid."""
    known = CurrentPointer("r1", "ab", 3, "2026-01-01T00:00:00Z")
    assert parse_pointer(orjson.dumps({**known.as_dict(), "region": "eu"}), "here") == known
    for content in (b"[]", b"3", orjson.dumps({"run_id": "r1"})):
        with pytest.raises(Corrupt):
            parse_pointer(content, "here")


def _overwrite(file: Path) -> None:
    file.chmod(0o644)
    file.write_bytes(b"{")
